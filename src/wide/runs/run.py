"""A run from base model to report: load, check, decide or train, compare on held-out text, save, draw."""

import importlib.util
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from wide.config import ObjectiveConfig, StageConfig, WideConfig
from wide.data.batches import TokenBlocks
from wide.errors import ConfigError
from wide.methods.apply import apply, expected_time
from wide.methods.catalogue import get
from wide.methods.method import Target, dense_plan
from wide.models.adapter import load, save
from wide.models.attach import attach, attachment, detach, plan_for
from wide.models.discovery import discover
from wide.models.hub import ADAPTER
from wide.models.lora import require_same_lora
from wide.models.pretrained import choose_device, load_skeleton
from wide.report.drawing import require_matplotlib
from wide.runs.folder import RunFolder
from wide.runs.forecast import Forecast, check_fits
from wide.runs.materials import Materials
from wide.runs.measuring import training_records
from wide.runs.process import num_processes, say
from wide.runs.results import BOARD, DENSE_ADAPTED, RunResults
from wide.runs.settings import PruneRequest, RunRequest, flags_named
from wide.runs.sources import chosen_dtype, require_lora
from wide.training.checkpoint import has_checkpoint
from wide.training.modes import rehearsal
from wide.training.parallel import DataParallel
from wide.training.progress_log import require_tensorboard, require_tracker
from wide.training.stages import prune, recover
from wide.training.trainer import micro_batch_size

_TARGETS = {
    "mean": "of the groups, mean of attention and FFN",
    "uniform": "of the groups, attention and FFN each",
    "linear_flops": "of the prunable work",
}
_COUNTED = {"nominal": "as the method counts it", "linear_flops": "of the work of the decoder layers"}
_UNSTEERED = "none: what is pruned stays pruned"
_STAGES = {
    "stage 1": ("prune", "stage1"),
    "stage 1+2": ("recover", "stage2"),
    "pruned": ("method", "stage1"),
    "pruned + LoRA": ("recover", "stage2"),
    DENSE_ADAPTED: ("recover", "dense"),
}
"""Subject -> (where the attachment's provenance tells about its stage, folder of the stage)."""


class Run:
    """One run of `wide prune` or `wide recover`; a dry run refuses what it can, says what the run costs, and ends.

    Raises TrainingError if the memory of the host is too small, or a dry run finds that of the GPU to be.
    """

    def __init__(
        self, request: RunRequest, folder: RunFolder, *, command: Sequence[str], dry_run: bool = False
    ) -> None:
        """Refuse what can be refused without a model, then load it."""
        self._request, self._folder, self._dry_run = request, folder, dry_run
        self._command, self._began = shlex.join(command), time.monotonic()
        options, stages = request.run, list[StageConfig]()
        if isinstance(request, PruneRequest) and get(request.method).trains:
            _check_batch("train", request.stage)
            stages.append(request.stage)
        if request.recover is not None:
            require_lora()
            _check_batch("recover", request.recover)
            stages.append(request.recover)
        if options.report:
            require_matplotlib()
        require_tracker(options.tracker)
        if left_out := require_tensorboard(options.tensorboard):
            say(left_out)
        distils = request.objective.distillation > 0 or bool(request.recover and request.recover.distillation)
        self._materials = Materials(
            options, request.scoring, max_tokens=request.max_tokens, stages=stages, distils=distils
        )
        device = choose_device(options.device)
        # A GPU says itself when its memory is full; a host ends the process.
        if stages and (dry_run or device.type != "cuda"):
            skeleton, dtype = load_skeleton(options.model), chosen_dtype(options)
            may_shard = options.parallel != "replicate"
            for stage in stages:
                check_fits(skeleton, stage, distils=distils, device=device, dtype=dtype, may_shard=may_shard)
        self._model = self._materials.model
        self._processes = DataParallel.from_environment(next(self._model.parameters()).device)
        self._results = RunResults(request, folder, self._materials, self._processes)

    def prune(self) -> None:
        """Let the method decide or train, then train LoRA if asked, each compared with the dense model."""
        asked = self._request
        assert isinstance(asked, PruneRequest)
        method, objective = get(asked.method), asked.objective
        if asked.is_papers:
            decide, subject, adapted, target = self._train_routers, "stage 1", "stage 1+2", _in_words(objective)
            # A group size that does not fit must not wait for the text.
            plan_for(asked.settings, discover(self._model))
        else:
            decide, subject, adapted = self._decide, "pruned", "pruned + LoRA"
            target = f"{method.name}, {objective.sparsity:.0%} {_COUNTED[asked.match]}"
        blocks = self._materials.check_text(asked.stage)
        later = None if asked.recover is None else self._materials.blocks(asked.recover)
        if not self._folder.resume:
            # What is refused must neither occupy the output folder nor wait until the dense model has been measured.
            with rehearsal(self._model):
                decide(blocks, asked, {})
            self._materials.take_off()
        if self._dry_run:
            forecast = Forecast(asked, self._materials, self._folder.config)
            forecast.prune(blocks, later, "" if asked.is_papers else self._expected(asked, blocks))
            say(f"\n{self._folder.kept()}")
            return
        self._results.begin(blocks, target, objective.sparsity, self._command)
        self._results.measure("dense")
        self._adapt_dense(later)
        doing = ", ".join(filter(None, ("training" if method.trains else "deciding", self._expected(asked, blocks))))
        places = self._places(subject)
        self._train(subject, lambda: decide(blocks, asked, places), doing=doing)
        if later is not None:
            self._recover(later, adapted)
        self._results.finish(time.monotonic() - self._began)

    def recover(self, adapter: str) -> None:
        """Train stage 2 on top of a saved adapter, compared with the dense model and with what it begins with."""
        objective = self._request.objective
        assert self._request.recover is not None
        # Attached once before texts are read and anything is written, to see that it fits, and taken off again so that
        # the dense model is measured untouched.
        load(self._model, adapter)
        state, stage = attachment(self._model), self._request.recover
        is_routed, trained = state.plan.is_routed, state.provenance
        target, sparsity = (_in_words(objective), objective.sparsity) if is_routed else (_UNSTEERED, None)
        came_from_prune = is_routed and "method" not in trained
        before, after = ("stage 1", "stage 1+2") if came_from_prune else ("pruned", "pruned + LoRA")
        if state.lora is not None:
            require_same_lora(state.lora, stage)
            if self._request.dense_baseline:
                raise ConfigError(
                    "this adapter has LoRA already, and recover.dense_baseline would give the dense model only what "
                    "this run adds; set it to false, or begin with the adapter of stage 1"
                )
        self._materials.trained |= trained
        detach(self._model)
        blocks = self._materials.check_text(stage)
        if self._dry_run:
            load(self._model, adapter)
            Forecast(self._request, self._materials, self._folder.config).recover(blocks)
            say(f"\n{self._folder.kept()}")
            return
        self._results.begin(blocks, target, sparsity, self._command)
        self._results.measure("dense")
        self._adapt_dense(blocks)
        load(self._model, adapter)
        self._results.measure(before)
        self._recover(blocks, after, objective)
        self._results.finish(time.monotonic() - self._began)

    def _train_routers(self, blocks: TokenBlocks, asked: PruneRequest, places: Mapping[str, Any]) -> None:
        config, objective, stage = asked.settings, asked.objective, asked.stage
        prune(self._model, blocks, config=config, objective=objective, stage=stage, **places)

    def _decide(self, blocks: TokenBlocks, asked: PruneRequest, places: Mapping[str, Any]) -> None:
        """Let a method of the benchmark decide or train, or attach what it decided before."""
        if places and self._folder.resume and self._folder.adapter.is_dir():
            load(self._model, self._folder.adapter)
            return
        own = {field.name for field in fields(asked.settings)}
        target = Target(sparsity=asked.objective.sparsity, match=asked.match)
        how: dict[str, Any] = {"stage": asked.stage, "objective": asked.objective, "seed": asked.stage.seed}
        how |= {"output": places.get("output"), "resume": places.get("resume", False)}
        with flags_named("" if isinstance(asked.settings, WideConfig) else asked.method, of=own, not_of=("sparsity",)):
            apply(self._model, get(asked.method), blocks, target, asked.settings, **how)
        if places:
            # At once: what took hours to decide must not wait for the evaluation. What was trained lies there already,
            # without what the method says of it.
            trains = get(asked.method).trains
            save(self._model, places["output"] / ADAPTER if trains else self._folder.adapter)

    def _recover(self, blocks: TokenBlocks, subject: str, objective: ObjectiveConfig | None = None) -> None:
        """Train LoRA; without an objective, toward that of stage 1."""
        stage, places = self._request.recover, self._places(subject)
        self._train(subject, lambda: recover(self._model, blocks, objective=objective, stage=stage, **places))

    def _expected(self, asked: PruneRequest, blocks: TokenBlocks) -> str:
        method, sparsity = get(asked.method), asked.objective.sparsity
        return expected_time(self._model, method, blocks, sparsity, asked.settings, asked.stage)

    def _adapt_dense(self, blocks: TokenBlocks | None) -> None:
        """Train and measure the same LoRA on the dense model, if that was asked for, and take it off again."""
        if blocks is None or not self._request.dense_baseline or not self._results.is_due(DENSE_ADAPTED):
            return
        attach(self._model, dense_plan(len(discover(self._model))))
        try:
            # Nothing made this model that it could take the loss from.
            like = ObjectiveConfig(distillation=self._request.objective.distillation)
            self._recover(blocks, DENSE_ADAPTED, like)
        finally:
            detach(self._model)

    def _places(self, subject: str) -> dict[str, Any]:
        """Return where the training of a subject writes, and whether it goes on with what lies there."""
        name = _STAGES[subject][1]
        wanted = self._request.run.tensorboard
        if wanted is None:
            wanted = importlib.util.find_spec("tensorboard") is not None
        return {
            "output": self._folder.path / name,
            "resume": self._folder.resume,
            # A folder for each stage: what a resumed stage does again replaces what it wrote, and nothing else.
            "tensorboard": self._folder.path / BOARD / name if wanted else None,
            "tracker": self._request.run.tracker,
        }

    def _train(self, subject: str, stage: Callable[[], Any], *, doing: str = "training") -> None:
        if subject != DENSE_ADAPTED and self._attach_finished(subject):
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
        found += self._results.of(subject)
        if subject != DENSE_ADAPTED:
            save(self._model, self._folder.adapter)
        # Last: they say that the subject is done.
        self._results.records.append(found)

    def _attach_finished(self, subject: str) -> bool:
        """Attach what an earlier part of a resumed run made for a subject, and return whether it had finished it."""
        # What a method decided has no other place, and is that of a later stage only where that had ended, too.
        stage_adapter = self._folder.path / _STAGES[subject][1] / ADAPTER
        adapter = stage_adapter if stage_adapter.is_dir() else self._folder.adapter
        known = self._folder.resume and adapter.is_dir() and self._results.is_done(subject)
        if not self._processes.agree(known):
            return False
        say(f"{subject}: finished before")
        self._materials.take_off()
        load(self._model, adapter)
        if subject == "pruned" and (lora := attachment(self._model).lora) is not None:
            # Of the later stage; it puts on its own.
            lora.unload()
            attachment(self._model).lora = None
            attachment(self._model).provenance.pop("recover", None)
        return True


def _in_words(objective: ObjectiveConfig) -> str:
    return f"skip {objective.sparsity:.0%} {_TARGETS[objective.target]}"


def _check_batch(group: str, stage: StageConfig) -> None:
    # Seen here rather than by the trainer, which comes after the dense model has been measured.
    with flags_named(group, of=asdict(stage)):
        micro_batch_size(stage, num_processes())
