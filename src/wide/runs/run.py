"""A run from base model to report: load, check, decide or train, compare on held-out text, save, draw."""

import importlib.util
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wide.config import ObjectiveConfig, StageConfig, WideConfig
from wide.data.batches import TokenBlocks
from wide.data.tokenizer import load_tokenizer
from wide.methods.apply import apply
from wide.methods.catalogue import get
from wide.methods.method import Target
from wide.models.adapter import load, save
from wide.models.attach import attach, attachment, detach, is_attached, plan_for
from wide.models.dial import calibrate_dial, set_sparsity
from wide.models.discovery import discover
from wide.models.pretrained import device_name
from wide.plan import Dense, LayerPlan, Plan
from wide.records import Record, read_records
from wide.report.drawing import FOLDER, require_matplotlib
from wide.report.page import write_report
from wide.report.selection import Selection
from wide.report.table import layer_lines, summary_table
from wide.runs.folder import CONFIG, RunFolder
from wide.runs.measuring import HeldOut, check_text, training_records
from wide.runs.process import is_main_process, num_processes, say
from wide.runs.settings import GenerationOptions, PruneRequest, RunRequest, flags_named
from wide.runs.sources import find_adapter, load_base, require_lora, training_blocks
from wide.runs.text import continue_prompt
from wide.training.checkpoint import has_checkpoint
from wide.training.rehearsal import rehearsal
from wide.training.stages import prune, recover
from wide.training.trackers import require_tensorboard, require_tracker
from wide.training.trainer import micro_batch_size

_DIAL_BLOCKS = 16
_BOARD = "tensorboard"
_TARGETS = {
    "mean": "of groups, mean of attention and FFN",
    "uniform": "of groups, attention and FFN each",
    "linear_flops": "of the linear FLOPs",
}
_COUNTED = {"nominal": "as the method counts it", "linear_flops": "of the linear FLOPs of the decoder layers"}
_UNSTEERED = "none: what is pruned stays pruned"
_DENSE_ADAPTED = "dense + LoRA"
_STAGES = {
    "stage 1": ("prune", "stage1"),
    "stage 1+2": ("recover", "stage2"),
    "pruned": ("method", "stage1"),
    "pruned + LoRA": ("recover", "stage2"),
    _DENSE_ADAPTED: ("recover", "dense"),
}
"""Subject -> (where the attachment's provenance tells about its stage, folder of the stage)."""


class Run:
    """One run of `wide prune` or `wide recover`.

    Args:
        request: Model, data, LoRA, evaluation and sample.
        folder: Where everything goes.
        command: The command line, for the report.
    """

    def __init__(self, request: RunRequest, folder: RunFolder, *, command: Sequence[str]) -> None:
        """Keep what was asked for; nothing is loaded yet."""
        self._request = request
        self._options = request.run
        self._folder = folder
        self._command = shlex.join(command)
        self._began = time.monotonic()
        self._tokenizer: Any = None
        self._held_out: HeldOut | None = None
        self._records = folder.new_records()

    def prune(self, asked: PruneRequest) -> None:
        """Let the method decide or train, then train LoRA if asked, each compared with the dense model.

        Raises:
            WideError: Whatever the method, the training or the evaluation refuses.
        """
        method, objective = get(asked.method), asked.objective
        self._check_batches(*([asked.stage] if method.trains else []))
        model = self._load_model()
        if asked.is_papers:
            decide, subject, adapted = self._train_routers, "stage 1", "stage 1+2"
            target = f"skip {objective.sparsity:.0%} {_TARGETS[objective.target]}"
            # A group size that does not fit must not wait for the text.
            plan_for(asked.settings, discover(model))
        else:
            decide, subject, adapted = self._decide, "pruned", "pruned + LoRA"
            target = f"{method.name}, {objective.sparsity:.0%} {_COUNTED[asked.match]}"
        blocks = self._read_text(model, asked.stage)
        later = None if asked.recover is None else self._blocks(asked.recover)
        self._held_out = self._open_held_out()
        rehearsed = replace(asked, stage=replace(asked.stage, compile=False))
        self._rehearse(model, lambda: decide(model, blocks, rehearsed, {}))
        self._begin(model, target, objective.sparsity)
        self._measure(model, "dense")
        if later is not None and asked.dense_baseline:
            self._adapt_dense(model, later)
        if asked.scoring.untrained and self._held_out is not None and self._is_missing("untrained"):
            self._measure_untrained(model, asked.settings, objective, blocks)
        doing = "training" if method.trains else "deciding"
        places = self._places(subject)
        self._train(model, subject, lambda: decide(model, blocks, asked, places), doing=doing)
        if later is not None:
            self._recover(model, later, adapted)
        self._finish()

    def recover(self, adapter: str, objective: ObjectiveConfig) -> None:
        """Train stage 2 on top of a saved adapter, compared with the dense model and with what it begins with."""
        assert self._request.recover is not None
        self._check_batches()
        model = self._load_model()
        # Attached once before texts are read and anything is written, to see that it fits, and taken off again so that
        # the dense model is measured untouched.
        load(model, find_adapter(adapter))
        steers = attachment(model).plan.is_routed
        detach(model)
        blocks = self._read_text(model, self._request.recover)
        self._held_out = self._open_held_out()
        target = f"skip {objective.sparsity:.0%} {_TARGETS[objective.target]}" if steers else _UNSTEERED
        self._begin(model, target, objective.sparsity)
        self._measure(model, "dense")
        if self._request.dense_baseline:
            self._adapt_dense(model, blocks)
        load(model, find_adapter(adapter))
        self._measure(model, "stage 1")
        self._recover(model, blocks, "stage 1+2", objective)
        self._finish()

    def _train_routers(self, model: Any, blocks: TokenBlocks, asked: PruneRequest, places: Mapping[str, Any]) -> None:
        """Carry out stage 1 of the paper."""
        prune(
            model,
            blocks,
            tokenizer=self._tokenizer,
            config=asked.settings,
            objective=asked.objective,
            stage=asked.stage,
            **places,
        )

    def _decide(self, model: Any, blocks: TokenBlocks, asked: PruneRequest, places: Mapping[str, Any]) -> None:
        """Let a method of the benchmark decide or train, or attach what it decided before."""
        if places and self._folder.resume and self._folder.adapter.is_dir():
            load(model, self._folder.adapter)
            return
        apply(
            model,
            get(asked.method),
            blocks,
            Target(sparsity=asked.objective.sparsity, match=asked.match),
            asked.settings,
            stage=asked.stage,
            objective=asked.objective,
            output=places.get("output"),
            resume=places.get("resume", False),
            seed=asked.stage.seed,
        )
        if places:
            # At once: what took hours to decide must not wait for the evaluation.
            save(model, self._folder.adapter)

    def _recover(self, model: Any, blocks: TokenBlocks, subject: str, objective: ObjectiveConfig | None = None) -> None:
        """Train LoRA; without an objective, toward that of stage 1."""
        self._train(
            model,
            subject,
            lambda: recover(
                model,
                blocks,
                tokenizer=self._tokenizer,
                objective=objective,
                stage=self._request.recover,
                **self._places(subject),
            ),
        )

    def _adapt_dense(self, model: Any, blocks: TokenBlocks) -> None:
        """Train and measure the same LoRA on the dense model, and take it off again."""
        if self._held_out is None or not self._is_missing(_DENSE_ADAPTED):
            return
        attach(model, Plan(tuple(LayerPlan(attention=Dense(), ffn=Dense()) for _ in discover(model))))
        try:
            self._recover(model, blocks, _DENSE_ADAPTED)
        finally:
            detach(model)

    def _places(self, subject: str) -> dict[str, Any]:
        """Return where the training of a subject writes, and whether it goes on with what lies there."""
        name = _STAGES[subject][1]
        wanted = self._options.tensorboard
        if wanted is None:
            wanted = importlib.util.find_spec("tensorboard") is not None
        return {
            "output": self._folder.path / name,
            "resume": self._folder.resume,
            # A folder for each stage: what a resumed stage does again replaces what it wrote, and nothing else.
            "tensorboard": self._folder.path / _BOARD / name if wanted else None,
            "tracker": self._options.tracker,
        }

    def _check_batches(self, *stages: StageConfig) -> None:
        # Seen here rather than by the trainer, which comes after the dense model has been measured.
        groups = [("train", stage) for stage in stages]
        if self._request.recover is not None:
            require_lora()
            groups.append(("recover", self._request.recover))
        for group, stage in groups:
            with flags_named(group, of=asdict(stage)):
                micro_batch_size(stage, num_processes())

    def _rehearse(self, model: Any, deciding: Callable[[], Any]) -> None:
        # What is refused must neither occupy the output folder nor wait until the dense model has been measured.
        if self._folder.resume:
            return
        with rehearsal(model):
            deciding()
        if is_attached(model):
            detach(model)

    def _load_model(self) -> Any:
        if self._options.report:
            require_matplotlib()
        require_tracker(self._options.tracker)
        left_out = require_tensorboard(self._options.tensorboard)
        if left_out is not None:
            say(left_out)
        say(f"model    {self._options.model}")
        self._tokenizer = load_tokenizer(self._options.model)
        return load_base(self._options)

    def _read_text(self, model: Any, stage: StageConfig) -> TokenBlocks:
        blocks = self._blocks(stage)
        check_text(blocks, model, self._options.data)
        return blocks

    def _blocks(self, stage: StageConfig) -> TokenBlocks:
        return training_blocks(
            self._options,
            self._request.scoring,
            self._tokenizer,
            sequence_length=stage.sequence_length,
            seed=stage.seed,
        )

    def _open_held_out(self) -> HeldOut | None:
        scoring = self._request.scoring
        return None if scoring.tokens == 0 else HeldOut(self._options, scoring, self._tokenizer)

    def _begin(self, model: Any, target: str, sparsity: float) -> None:
        self._records.device = device_name(model)
        self._folder.claim()
        if is_main_process():
            self._records.append(self._run_records(target, sparsity))

    def _run_records(self, target: str, sparsity: float) -> Iterator[Record]:
        facts = {
            "description": self._options.description,
            "model": self._options.model,
            "data": self._options.data,
            "target": target,
            "held-out text": "" if self._held_out is None else self._held_out.name,
            "command": self._command,
        }
        for name, value in facts.items():
            yield Record(subject="run", metric=name, value=value, unit="text")
        yield Record(subject="run", metric="target.sparsity", value=sparsity, unit="share")

    def _measure_untrained(
        self, model: Any, config: WideConfig, objective: ObjectiveConfig, blocks: TokenBlocks
    ) -> None:
        if not is_main_process():
            return
        # What stage 1 begins with may have read text already; untrained routers have not.
        attach(model, replace(config, ffn_grouping="adjacent", router_start="random"))
        try:
            target = objective.sparsity
            calibrate_dial(
                model,
                blocks.in_order(self._request.scoring.batch_size, max_blocks=_DIAL_BLOCKS),
                measure="linear_flops" if objective.target == "linear_flops" else "mean",
                include_fixed=objective.include_fixed,
                # Neighbours on both sides, so that the target lies inside the dial.
                sparsities=[point for point in (target / 2, target, (1 + target) / 2) if point > 0],
            )
            set_sparsity(model, target)
            self._measure(model, "untrained")
        finally:
            detach(model)

    def _train(self, model: Any, subject: str, stage: Callable[[], Any], *, doing: str = "training") -> None:
        say(f"\n{subject}: {doing}")
        key, name = _STAGES[subject]
        stage_folder = self._folder.path / name
        try:
            stage()
        except KeyboardInterrupt as interrupt:
            # Deciding, and training before its first checkpoint, begin anew.
            if has_checkpoint(stage_folder):
                what = f"what was reached is kept in {stage_folder}"
            else:
                what = "nothing of it is kept" if self._is_missing(subject) else f"{self._folder.path} is as it was"
            raise KeyboardInterrupt(f"{subject} {str(interrupt) or 'stopped'}; {what}") from interrupt
        if not is_main_process():
            return
        self._records.append(training_records(subject, attachment(model).provenance[key], stage_folder))
        self._measure(model, subject)
        if subject != _DENSE_ADAPTED:
            save(model, self._folder.adapter)

    def _measure(self, model: Any, subject: str) -> None:
        if self._held_out is None or not is_main_process() or not self._is_missing(subject):
            return
        if subject != "untrained" and is_attached(model) and attachment(model).routers():
            # Before the perplexity, whose record says that a subject is done.
            self._held_out.measure_routing(model, subject, self._records)
        report = self._held_out.measure(model, subject, self._records)
        assert report.model.perplexity is not None
        if report.sparsity is not None and subject != "untrained":
            # Beside the adapter stays what it was worth.
            attachment(model).provenance["held_out"] = {
                "data": self._held_out.name,
                "token_perplexity": report.model.perplexity.to_json(),
                "sparsity": report.sparsity.to_json(),
            }
        sparsity = "" if report.sparsity is None else f", skipped {report.sparsity.mean:.1%}"
        say(f"{subject}: perplexity {report.model.perplexity.perplexity:.2f}{sparsity}")
        self._write_sample(model, subject)

    def _is_missing(self, subject: str) -> bool:
        """Return whether a subject is still to be measured, which a resumed run may have done already."""
        file = self._records.path
        return not file.is_file() or Selection(*read_records(file)).record(subject, "token_perplexity") is None

    def _write_sample(self, model: Any, subject: str) -> None:
        wanted = self._request.sample
        if not wanted.prompt or subject == "untrained":
            return
        how = GenerationOptions(max_new_tokens=wanted.tokens, temperature=0.8, top_p=0.9)
        text, _, _ = continue_prompt(model, self._tokenizer, wanted.prompt, how)
        self._records.append([Record(subject=subject, metric="sample", value=wanted.prompt + text, unit="text")])

    def _finish(self) -> None:
        if not is_main_process():
            return
        paths: list[Path] = [self._folder.adapter, self._records.path, self._folder.path / CONFIG]
        if self._options.report:
            paths += [*write_report(self._records.path, self._folder.path), self._folder.path / FOLDER]
        if (self._folder.path / _BOARD).is_dir():
            paths.append(self._folder.path / _BOARD)
        run = Selection(*read_records(self._records.path))
        say()
        if self._held_out is not None:
            say(summary_table(run).to_text())
            say("\n".join(["", *layer_lines(run), *self._sample_lines(run)]))
        say(f"\nfinished in {time.monotonic() - self._began:.0f} s; written:")
        for path in paths:
            say(f"  {path}")

    def _sample_lines(self, run: Selection) -> list[str]:
        text = run.text(run.subjects()[-1], "sample")
        return ["", f"sample ({run.subjects()[-1]}):", *(f"  | {line}" for line in text.splitlines())] if text else []
