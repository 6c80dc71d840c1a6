"""A run from base model to report: load, check, decide or train, compare on held-out text, save, draw."""

import importlib.util
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from wide.config import ObjectiveConfig, StageConfig, WideConfig, objective_after_stage_1
from wide.data.batches import TokenBlocks
from wide.evaluation.evaluate import evaluate
from wide.methods.apply import apply, expected_time
from wide.methods.catalogue import get
from wide.methods.method import Target, dense_plan
from wide.models.adapter import load, save
from wide.models.attach import attach, attachment, detach, is_attached, plan_for
from wide.models.dial import DEFAULT_POINTS, calibrate_dial, set_sparsity
from wide.models.discovery import discover
from wide.models.lora import add_lora
from wide.models.observe import forward_without_head, judging
from wide.models.pretrained import choose_device, load_skeleton
from wide.plan import Plan
from wide.records import Record, read_records
from wide.report.drawing import FOLDER, require_matplotlib
from wide.report.folders import PAGE, PICTURE, draw_folder
from wide.report.selection import Selection, measure_of
from wide.report.table import layer_lines, summary_table, verdict
from wide.runs.folder import ADAPTER, CONFIG, RunFolder
from wide.runs.forecast import check_fits, forecast, say_groups, say_settings
from wide.runs.materials import ROUTING_TOKENS, Materials
from wide.runs.measuring import training_records
from wide.runs.process import is_main_process, num_processes, say
from wide.runs.settings import GenerationOptions, PruneRequest, RunRequest, flags_named
from wide.runs.sources import chosen_dtype, find_adapter, require_lora
from wide.runs.text import continue_prompt, encode
from wide.training.channel_groups import cluster_channels
from wide.training.checkpoint import has_checkpoint
from wide.training.inference_target import calibration_size
from wide.training.modes import rehearsal
from wide.training.parallel import DataParallel
from wide.training.progress_log import require_tensorboard, require_tracker
from wide.training.stages import prune, recover
from wide.training.text_source import read_batches
from wide.training.trainer import micro_batch_size

_DIAL_BLOCKS = 16
_BOARD = "tensorboard"
_TARGETS = {
    "mean": "of the groups, mean of attention and FFN",
    "uniform": "of the groups, attention and FFN each",
    "linear_flops": "of the prunable work",
}
_COUNTED = {"nominal": "as the method counts it", "linear_flops": "of the work of the decoder layers"}
_UNSTEERED = "none: what is pruned stays pruned"
_DENSE_ADAPTED = "dense + LoRA"
_IS_DONE = "token_perplexity"
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
        dry_run: Whether to refuse what can be refused and say what the run costs, and end there.

    Raises:
        TrainingError: If the memory of the host is too small, or a dry run finds that of the GPU to be.
    """

    def __init__(
        self, request: RunRequest, folder: RunFolder, *, command: Sequence[str], dry_run: bool = False
    ) -> None:
        """Refuse what can be refused without a model, then load it."""
        self._dry_run = dry_run
        self._request = request
        self._options = request.run
        self._folder = folder
        self._command = shlex.join(command)
        self._began = time.monotonic()
        self._records = folder.new_records()
        self._target = ""
        stages: list[StageConfig] = []
        if isinstance(request, PruneRequest) and get(request.method).trains:
            _check_batch("train", request.stage)
            stages.append(request.stage)
        if request.recover is not None:
            require_lora()
            _check_batch("recover", request.recover)
            stages.append(request.recover)
        if self._options.report:
            require_matplotlib()
        require_tracker(self._options.tracker)
        left_out = require_tensorboard(self._options.tensorboard)
        if left_out is not None:
            say(left_out)
        stage_2 = None if request.recover is None else request.recover.distillation
        distils = request.objective.distillation > 0 or bool(stage_2)
        self._materials = Materials(
            request.run, request.scoring, max_tokens=request.max_tokens, stages=stages, distils=distils
        )
        device = choose_device(self._options.device)
        # A GPU says itself when its memory is full; a host ends the process.
        if stages and (dry_run or device.type != "cuda"):
            skeleton = load_skeleton(self._options.model)
            for stage in stages:
                may_shard = self._options.parallel != "replicate"
                check_fits(
                    skeleton,
                    stage,
                    distils=distils,
                    device=device,
                    dtype=chosen_dtype(self._options),
                    may_shard=may_shard,
                )
        self._model = self._materials.model
        self._processes = DataParallel.from_environment(next(self._model.parameters()).device)
        if request.sample.prompt and request.scoring.tokens != 0:
            with flags_named("sample", of=()):
                encode(self._model, self._materials.tokenizer, request.sample.prompt, self._sampling)

    def prune(self) -> None:
        """Let the method decide or train, then train LoRA if asked, each compared with the dense model.

        Raises:
            WideError: Whatever the method, the training or the evaluation refuses.
        """
        asked = self._request
        assert isinstance(asked, PruneRequest)
        method, objective = get(asked.method), asked.objective
        if asked.is_papers:
            decide, subject, adapted = self._train_routers, "stage 1", "stage 1+2"
            target = _in_words(objective)
            # A group size that does not fit must not wait for the text.
            plan_for(asked.settings, discover(self._model))
        else:
            decide, subject, adapted = self._decide, "pruned", "pruned + LoRA"
            target = f"{method.name}, {objective.sparsity:.0%} {_COUNTED[asked.match]}"
        blocks = self._materials.check_text(asked.stage)
        later = None if asked.recover is None else self._materials.blocks(asked.recover)
        rehearsed = replace(asked, stage=replace(asked.stage, compile=False))
        self._rehearse(lambda: decide(blocks, rehearsed, {}))
        if self._dry_run:
            self._forecast(blocks, later)
            say(f"\n{self._folder.kept()}")
            return
        self._begin(target, objective.sparsity)
        self._measure("dense")
        self._adapt_dense(later)
        if asked.scoring.untrained and self._is_due("untrained"):
            self._measure_untrained(asked.settings, objective, blocks)
        doing = ", ".join(filter(None, ("training" if method.trains else "deciding", self._expected(asked, blocks))))
        places = self._places(subject)
        self._train(subject, lambda: decide(blocks, asked, places), doing=doing)
        if later is not None:
            self._recover(later, adapted)
        self._finish()

    def recover(self, adapter: str) -> None:
        """Train stage 2 on top of a saved adapter, compared with the dense model and with what it begins with."""
        objective = self._request.objective
        assert self._request.recover is not None
        # Attached once before texts are read and anything is written, to see that it fits, and taken off again so that
        # the dense model is measured untouched.
        load(self._model, find_adapter(adapter))
        steers = attachment(self._model).plan.is_routed
        detach(self._model)
        blocks = self._materials.check_text(self._request.recover)
        if self._dry_run:
            load(self._model, find_adapter(adapter))
            parts = self._measuring(1)
            self._say_in_all(
                parts | {"LoRA": self._forecast_lora(blocks, objective) * (1 + self._request.dense_baseline)}
            )
            say(f"\n{self._folder.kept()}")
            return
        self._begin(_in_words(objective) if steers else _UNSTEERED, objective.sparsity)
        self._measure("dense")
        self._adapt_dense(blocks)
        load(self._model, find_adapter(adapter))
        self._measure("stage 1")
        self._recover(blocks, "stage 1+2", objective)
        self._finish()

    def _train_routers(self, blocks: TokenBlocks, asked: PruneRequest, places: Mapping[str, Any]) -> None:
        """Carry out stage 1 of the paper."""
        config, objective, stage = asked.settings, asked.objective, asked.stage
        prune(self._model, blocks, config=config, objective=objective, stage=stage, **places)

    def _decide(self, blocks: TokenBlocks, asked: PruneRequest, places: Mapping[str, Any]) -> None:
        """Let a method of the benchmark decide or train, or attach what it decided before."""
        if places and self._folder.resume and self._folder.adapter.is_dir():
            load(self._model, self._folder.adapter)
            return
        own = {field.name for field in fields(asked.settings)}
        with flags_named("" if isinstance(asked.settings, WideConfig) else asked.method, of=own, not_of=("sparsity",)):
            apply(
                self._model,
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
            save(self._model, self._folder.adapter)

    def _recover(self, blocks: TokenBlocks, subject: str, objective: ObjectiveConfig | None = None) -> None:
        """Train LoRA; without an objective, toward that of stage 1."""
        stage, places = self._request.recover, self._places(subject)
        self._train(subject, lambda: recover(self._model, blocks, objective=objective, stage=stage, **places))

    def _expected(self, asked: PruneRequest, blocks: TokenBlocks) -> str:
        method, sparsity = get(asked.method), asked.objective.sparsity
        return expected_time(self._model, method, blocks, sparsity, asked.settings, asked.stage)

    def _forecast(self, blocks: TokenBlocks, later: TokenBlocks | None) -> None:
        """Say what `prune` costs."""
        asked = self._request
        assert isinstance(asked, PruneRequest)
        say_settings(self._folder.config)
        parts: dict[str, float] = {}
        if asked.is_papers:
            parts["clustering"] = self._clustering(asked, blocks)
            # What stage 1 begins with may read text, which takes a small share of it.
            attach(self._model, replace(asked.settings, ffn_grouping="adjacent", router_start="random"))
            say_groups(self._model)
            parts["training"] = forecast(self._model, blocks, asked.objective, asked.stage, routers=True)
        else:
            say(f"\n{asked.method}: {self._expected(asked, blocks) or 'how long it takes is not known before'}")
            attach(self._model, dense_plan(len(discover(self._model))))
        parts |= self._measuring(1 + asked.scoring.untrained)
        if later is not None:
            lora = self._forecast_lora(later, asked.objective)
            parts["LoRA"] = lora * (1 + asked.dense_baseline)
        if asked.is_papers:
            self._say_in_all(parts)
        self._materials.take_off()

    def _clustering(self, asked: PruneRequest, blocks: TokenBlocks) -> float:
        """Return the seconds that groups of channels take, by those of one layer."""
        config, specs = asked.settings, discover(self._model)
        if config.ffn_grouping != "clustered":
            return 0.0
        size = micro_batch_size(asked.stage, self._processes.world)
        text = read_batches(
            blocks, batch_size=asked.stage.batch_size, micro_batch_size=size, tokens=config.start_tokens
        )
        began = time.monotonic()
        with torch.no_grad(), judging(self._model):
            for batch in text:
                forward_without_head(self._model, batch.input_ids.to(self._model.device))
        read = time.monotonic()
        plan, seed = Plan(plan_for(config, specs).layers[:1]), asked.stage.seed
        cluster_channels(self._model, specs[:1], plan, text, skipped=0.5, seed=seed, parallel=DataParallel())
        reading, clustering = read - began, time.monotonic() - read
        return reading + len(specs) * max(clustering - reading, 0.0)

    def _measuring(self, more: int) -> dict[str, float]:
        """Return the seconds of all evaluations and calibrations, by a few windows of held-out text.

        Args:
            more: Models that are scored beside those that LoRA is trained for, and the dense one.
        """
        asked, scoring = self._request, self._request.scoring
        documents = self._materials.held_out[0]
        if documents is None:
            return {}
        encoded = self._materials.tokenizer([document.text for document in documents], verbose=False)["input_ids"]
        tokens = min(sum(map(len, encoded)), scoring.tokens or sys.maxsize)
        told: dict[str, Any] = {"tokenizer": self._materials.tokenizer, "compare_dense": False}
        told |= scoring.protocol | {"max_windows": scoring.batch_size}
        began = time.monotonic()
        found = evaluate(self._model, documents, **told).model.perplexity
        each = (time.monotonic() - began) / max(0 if found is None else found.tokens, 1)
        scored = 1 + more + (asked.recover is not None) * (1 + asked.dense_baseline)
        parts = {"evaluation": scored * tokens * each}
        if attachment(self._model).routers():
            began = time.monotonic()
            self._materials.measure_routing("dry run", blocks=1)
            rows = min(ROUTING_TOKENS, tokens) / scoring.window
            parts["routing"] = (1 + (asked.recover is not None)) * rows * (time.monotonic() - began)
            trained = (asked.stage if isinstance(asked, PruneRequest) else None, asked.recover)
            read = sum(calibration_size(stage.num_tokens) for stage in trained if stage is not None)
            parts["calibration"] = (len(DEFAULT_POINTS) + 2) * read * each
        return parts

    def _say_in_all(self, parts: Mapping[str, float]) -> None:
        words = ", ".join(f"{name} {timedelta(seconds=round(seconds))}" for name, seconds in parts.items() if seconds)
        whole = timedelta(seconds=round(sum(parts.values())))
        say(f"\nin all   about {whole} h:m:s: {words}; report and loading come on top")

    def _forecast_lora(self, blocks: TokenBlocks, objective: ObjectiveConfig) -> float:
        """Say what stage 2 costs on the attached model, and return its seconds."""
        stage = self._request.recover
        assert stage is not None
        if not isinstance(self._request, PruneRequest):
            say_settings(self._folder.config)
            say_groups(self._model)
        if attachment(self._model).lora is None:
            add_lora(self._model, rank=stage.lora_rank, alpha=stage.lora_alpha, dropout=stage.lora_dropout)
        routers = stage.train_routers and attachment(self._model).plan.is_routed
        if not routers:
            objective = replace(objective, weight=0.0)
        if stage.distillation is not None:
            objective = replace(objective, distillation=stage.distillation)
        return forecast(self._model, blocks, objective_after_stage_1(objective), stage, routers=routers)

    def _adapt_dense(self, blocks: TokenBlocks | None) -> None:
        """Train and measure the same LoRA on the dense model, if that was asked for, and take it off again."""
        if blocks is None or not self._request.dense_baseline or not self._is_due(_DENSE_ADAPTED):
            return
        attach(self._model, dense_plan(len(discover(self._model))))
        try:
            self._recover(blocks, _DENSE_ADAPTED)
        finally:
            detach(self._model)

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

    def _rehearse(self, deciding: Callable[[], Any]) -> None:
        # What is refused must neither occupy the output folder nor wait until the dense model has been measured.
        if self._folder.resume:
            return
        with rehearsal(self._model):
            deciding()
        self._materials.take_off()

    def _begin(self, target: str, sparsity: float) -> None:
        self._records.device = self._materials.device
        self._folder.claim()
        self._target = target
        if not (self._folder.resume and self._records.latest("run", "target.sparsity")):
            self._records.append(self._materials.run_records(target, self._command, **{"target.sparsity": sparsity}))

    def _measure_untrained(self, config: WideConfig, objective: ObjectiveConfig, blocks: TokenBlocks) -> None:
        # What stage 1 begins with may have read text already; untrained routers have not.
        attach(self._model, replace(config, ffn_grouping="adjacent", router_start="random"))
        try:
            target = objective.sparsity
            calibrate_dial(
                self._model,
                blocks.in_order(self._request.scoring.batch_size, max_blocks=_DIAL_BLOCKS),
                measure="linear_flops" if objective.target == "linear_flops" else "mean",
                include_fixed=objective.include_fixed,
                # Neighbours on both sides, so that the target lies between calibrated ones.
                sparsities=[point for point in (target / 2, target, (1 + target) / 2) if point > 0],
            )
            set_sparsity(self._model, target)
            self._measure("untrained")
        finally:
            detach(self._model)

    def _train(self, subject: str, stage: Callable[[], Any], *, doing: str = "training") -> None:
        if subject != _DENSE_ADAPTED and self._attach_finished(subject):
            return
        say(f"\n{subject}: {doing}")
        key, name = _STAGES[subject]
        stage_folder = self._folder.path / name
        try:
            stage()
        except KeyboardInterrupt as interrupt:
            # Deciding, and training before its first checkpoint, begin anew.
            reached = has_checkpoint(stage_folder)
            what = f"what was reached is kept in {stage_folder}" if reached else "nothing of it is kept"
            raise KeyboardInterrupt(f"{subject} {str(interrupt) or 'stopped'}; {what}") from interrupt
        found = [*training_records(subject, attachment(self._model).provenance[key], stage_folder)]
        if self._materials.held_out[0] is not None:
            found += self._measured(subject)
        if subject != _DENSE_ADAPTED:
            save(self._model, self._folder.adapter)
        # Last: they say that the subject is done.
        self._records.append(found)

    def _attach_finished(self, subject: str) -> bool:
        """Attach what an earlier part of a resumed run made for a subject, and return whether it had finished it."""
        # What a method decided has no other place, and is that of a later stage only where that had ended, too.
        stage_adapter = self._folder.path / _STAGES[subject][1] / ADAPTER
        adapter = stage_adapter if stage_adapter.is_dir() else self._folder.adapter
        metric = "training.seconds" if self._materials.held_out[0] is None else _IS_DONE
        known = self._folder.resume and adapter.is_dir() and self._records.latest(subject, metric) is not None
        if not self._processes.agree(known):
            return False
        say(f"{subject}: finished before")
        if is_attached(self._model):
            detach(self._model)
        load(self._model, adapter)
        return True

    def _measure(self, subject: str) -> None:
        if self._is_due(subject):
            self._records.append(self._measured(subject))

    def _measured(self, subject: str) -> list[Record]:
        """Return what was measured on the held-out text, as records, and note it beside the adapter."""
        # On every process: layers of a sharded model are gathered from all, and those of a replicated one would wait.
        is_untrained, records = subject == "untrained", list[Record]()
        if not is_untrained and is_attached(self._model) and attachment(self._model).routers():
            records += self._materials.measure_routing(subject)
        report, scores = self._materials.measure(subject)
        records += scores
        assert report.model.perplexity is not None
        if report.sparsity is not None and not is_untrained:
            # Beside the adapter stays what it was worth.
            attachment(self._model).provenance["held_out"] = {
                "data": self._materials.held_out[1],
                "token_perplexity": report.model.perplexity.to_json(),
                # The same text: what pruning costs is the distance from these.
                "of_dense": {
                    name: found.value
                    for name in ("dense", _DENSE_ADAPTED)
                    if (found := self._records.latest(name, _IS_DONE)) is not None
                },
                "sparsity": report.sparsity.to_json(),
            }
        field, words = measure_of(self._target)
        sparsity = "" if report.sparsity is None else f", skipped {getattr(report.sparsity, field):.1%} {words}"
        say(f"{subject}: perplexity {report.model.perplexity.perplexity:.2f}{sparsity}")
        if self._request.sample.prompt and not is_untrained:
            prompt = self._request.sample.prompt
            text, _ = continue_prompt(self._model, self._materials.tokenizer, prompt, self._sampling)
            records.append(Record(subject=subject, metric="sample", value=prompt + text, unit="text"))
        return records

    def _is_due(self, subject: str) -> bool:
        """Return whether a subject is to be measured, and was not yet."""
        if self._materials.held_out[0] is None:
            return False
        missing = self._records.latest(subject, _IS_DONE) is None
        # The main process writes the file, so others may read it too early.
        return self._processes.agree(missing)

    @property
    def _sampling(self) -> GenerationOptions:
        return GenerationOptions(max_new_tokens=self._request.sample.tokens, temperature=0.8, top_p=0.9)

    def _finish(self) -> None:
        if not is_main_process():
            return
        paths: list[Path] = [self._folder.adapter, self._records.path, self._folder.path / CONFIG]
        if self._options.report:
            paths += [self._folder.path / name for name in (PAGE, PICTURE, FOLDER)]
            # A resume that had nothing left to do changes nothing.
            if self._records.has_grown or not (self._folder.path / PICTURE).is_file():
                say("\ndrawing the report")
                draw_folder(self._folder.path)
        if (self._folder.path / _BOARD).is_dir():
            paths.append(self._folder.path / _BOARD)
        run = Selection(*read_records(self._records.path))
        say()
        if self._materials.held_out[0] is not None:
            say("\n".join([*verdict(run), "", summary_table({"": run}).to_text()]))
            say("\n".join(["", *layer_lines(run)]))
            if text := run.text(run.subjects()[-1], "sample"):
                say("\n".join(["", f"sample ({run.subjects()[-1]}):", *(f"  | {line}" for line in text.splitlines())]))
        say(f"\nfinished in {time.monotonic() - self._began:.0f} s; written:")
        for path in paths:
            say(f"  {path}")


def _in_words(objective: ObjectiveConfig) -> str:
    counted = (
        "of all work"
        if (objective.target, objective.include_fixed) == ("linear_flops", True)
        else _TARGETS[objective.target]
    )
    return f"skip {objective.sparsity:.0%} {counted}"


def _check_batch(group: str, stage: StageConfig) -> None:
    # Seen here rather than by the trainer, which comes after the dense model has been measured.
    with flags_named(group, of=asdict(stage)):
        micro_batch_size(stage, num_processes())
