"""A run from base model to report: load, check, train, compare on held-out text, save, draw."""

import importlib.util
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wide.cli.arguments import flags_named
from wide.cli.console import is_main_process, num_processes, say
from wide.cli.loading import find_adapter, held_out_documents, load_base, require_lora, training_blocks
from wide.cli.measuring import HeldOut
from wide.cli.options import EvalOptions, RunOptions, SampleOptions
from wide.cli.run_folder import RunFolder
from wide.cli.text import continue_prompt
from wide.cli.text_options import GenerationOptions
from wide.cli.training_records import training_records
from wide.config import ObjectiveConfig, RecoverConfig, StageConfig, WideConfig, objective_after_stage_1
from wide.data.batches import TokenBlocks
from wide.data.tokenizer import check_vocabulary, length_warning, load_tokenizer
from wide.models.adapter import load, save
from wide.models.attach import attach, attachment, detach, is_attached, plan_for
from wide.models.dial import calibrate_dial, set_sparsity
from wide.models.discovery import discover
from wide.models.pretrained import device_name
from wide.records import Record, RecordFile, fingerprint, read_records
from wide.report.drawing import FOLDER, require_matplotlib
from wide.report.page import write_report
from wide.report.selection import Selection
from wide.report.table import layer_lines, summary_table
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
_UNSTEERED = "none: what is pruned stays pruned"
_STAGES = {
    "stage 1": ("prune", "stage1"),
    "stage 1+2": ("recover", "stage2"),
    "pruned": ("method", "stage1"),
    "pruned + LoRA": ("recover", "stage2"),
}
"""Subject -> (where the attachment's provenance tells about its stage, folder of the stage)."""


class Pipeline:
    """One run of `wide prune` or `wide recover`.

    Args:
        options: Model, data and output.
        scoring: Evaluation on held-out text.
        sample: Generated text for the report.
        folder: Where everything goes.
        command: The command line, for the report.
    """

    def __init__(
        self,
        options: RunOptions,
        scoring: EvalOptions,
        sample: SampleOptions,
        folder: RunFolder,
        *,
        command: Sequence[str],
    ) -> None:
        """Keep what was asked for; nothing is loaded yet."""
        self._options = options
        self._scoring = scoring
        self._sample = sample
        self._folder = folder
        self._command = shlex.join(command)
        self._began = time.monotonic()
        self._tokenizer: Any = None
        self._held_out: HeldOut | None = None
        self._records = RecordFile(folder.records, config_fingerprint=fingerprint(folder.config))

    def prune(
        self, config: WideConfig, objective: ObjectiveConfig, stage: StageConfig, second: RecoverConfig | None
    ) -> None:
        """Train stage 1 and, if given, stage 2, each compared with the dense model."""
        if second is not None:
            require_lora()
        self._check_batches(*(each for each in (stage, second) if each is not None))
        model = self._load_model()
        plan_for(config, discover(model))
        blocks = self._load_texts(model, stage)
        later = None if second is None else self._blocks(second)
        rehearsed = replace(stage, compile=False)
        self._rehearse(model, lambda: prune(model, blocks, config=config, objective=objective, stage=rehearsed))
        self._begin(model, _in_words(objective), objective.sparsity)
        self._measure(model, "dense")
        if self._scoring.untrained and self._held_out is not None and self._is_missing("untrained"):
            self._measure_untrained(model, config, objective, blocks)
        self._train(
            model,
            "stage 1",
            lambda: prune(
                model,
                blocks,
                tokenizer=self._tokenizer,
                config=config,
                objective=objective,
                stage=stage,
                output=self._folder.path / "stage1",
                resume=self._folder.resume,
                tensorboard=self._board("stage1"),
                tracker=self._options.tracker,
            ),
        )
        if second is not None:
            assert later is not None
            self._recover(model, later, objective_after_stage_1(objective), second)
        self._finish()

    def recover(self, adapter: str, objective: ObjectiveConfig, stage: RecoverConfig) -> None:
        """Train stage 2 on top of a saved adapter."""
        require_lora()
        self._check_batches(stage)
        model = self._load_model()
        # Attached once before texts are read and anything is written, to see that it fits, and taken off again so that
        # the dense model is measured untouched.
        load(model, find_adapter(adapter))
        target = _in_words(objective) if attachment(model).plan.is_routed else _UNSTEERED
        detach(model)
        blocks = self._load_texts(model, stage)
        self._begin(model, target, objective.sparsity)
        self._measure(model, "dense")
        load(model, find_adapter(adapter))
        self._measure(model, "stage 1")
        self._recover(model, blocks, objective, stage)
        self._finish()

    def _recover(self, model: Any, blocks: TokenBlocks, objective: ObjectiveConfig, stage: RecoverConfig) -> None:
        self._train(
            model,
            "stage 1+2",
            lambda: recover(
                model,
                blocks,
                tokenizer=self._tokenizer,
                objective=objective,
                stage=stage,
                output=self._folder.path / "stage2",
                resume=self._folder.resume,
                tensorboard=self._board("stage2"),
                tracker=self._options.tracker,
            ),
        )

    @staticmethod
    def _check_batches(*stages: StageConfig) -> None:
        # Seen here rather than by the trainer, which comes after the dense model has been measured.
        for stage in stages:
            group = "recover" if isinstance(stage, RecoverConfig) else "train"
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

    def _load_texts(self, model: Any, stage: StageConfig) -> TokenBlocks:
        blocks = self._blocks(stage)
        check_vocabulary(blocks.largest_id, model)
        warning = length_warning(stage.sequence_length, model)
        if warning is not None:
            say(f"warning  {warning}")
        say(f"data     {self._options.data}: {len(blocks)} blocks of {stage.sequence_length} tokens")
        if self._scoring.tokens != 0:
            documents, name = held_out_documents(self._options.data, self._scoring, text_field=self._options.text_field)
            self._held_out = HeldOut(documents, name, self._scoring, self._tokenizer, self._records)
            say(f"held out {name}: {len(documents)} documents")
        return blocks

    def _blocks(self, stage: StageConfig) -> TokenBlocks:
        return training_blocks(
            self._options, self._scoring, self._tokenizer, sequence_length=stage.sequence_length, seed=stage.seed
        )

    def _board(self, stage: str) -> Path | None:
        """Return where the curves of a stage go for TensorBoard, None where they are not wanted."""
        wanted = self._options.tensorboard
        if wanted is None:
            wanted = importlib.util.find_spec("tensorboard") is not None
        # A folder for each stage: what a resumed stage does again replaces what it wrote, and nothing else.
        return self._folder.path / _BOARD / stage if wanted else None

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
                blocks.in_order(self._scoring.batch_size, max_blocks=_DIAL_BLOCKS),
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
        save(model, self._folder.adapter)

    def _measure(self, model: Any, subject: str) -> None:
        if self._held_out is None or not is_main_process() or not self._is_missing(subject):
            return
        if subject != "untrained" and is_attached(model) and attachment(model).routers():
            # Before the perplexity, whose record says that a subject is done.
            self._held_out.measure_routing(model, subject)
        report = self._held_out.measure(model, subject)
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
        if not self._folder.records.is_file():
            return True
        return Selection(*read_records(self._folder.records)).record(subject, "token_perplexity") is None

    def _write_sample(self, model: Any, subject: str) -> None:
        if not self._sample.prompt or subject == "untrained":
            return
        how = GenerationOptions(max_new_tokens=self._sample.tokens, temperature=0.8, top_p=0.9)
        text, _, _ = continue_prompt(model, self._tokenizer, self._sample.prompt, how)
        sample = Record(subject=subject, metric="sample", value=self._sample.prompt + text, unit="text")
        self._records.append([sample])

    def _finish(self) -> None:
        if not is_main_process():
            return
        paths: list[Path] = [self._folder.adapter, self._folder.records, self._folder.path / "config.yaml"]
        if self._options.report:
            paths += [*write_report(self._folder.records, self._folder.path), self._folder.path / FOLDER]
        if (self._folder.path / _BOARD).is_dir():
            paths.append(self._folder.path / _BOARD)
        run = Selection(*read_records(self._folder.records))
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


def _in_words(objective: ObjectiveConfig) -> str:
    return f"skip {objective.sparsity:.0%} {_TARGETS[objective.target]}"
