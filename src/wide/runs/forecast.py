"""What a run would cost: memory by calculation, time by a few steps on this machine."""

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from wide.config import ObjectiveConfig, RecoverConfig, StageConfig
from wide.data.batches import TokenBatch, TokenBlocks
from wide.evaluation.evaluate import evaluate
from wide.methods.method import dense_plan
from wide.models.attach import attach, attachment, plan_for
from wide.models.discovery import discover
from wide.models.lora import add_lora
from wide.models.observe import forward_without_head, judging, now
from wide.models.pretrained import device_name
from wide.models.thresholds import DEFAULT_POINTS
from wide.plan import Plan
from wide.runs.materials import Materials
from wide.runs.measuring import ROUTING_TOKENS
from wide.runs.process import num_processes, say
from wide.runs.settings import PruneRequest, RunRequest
from wide.training.channel_groups import cluster_channels
from wide.training.inference_target import calibration_size
from wide.training.memory import needed, require_room, saying_what_fits, step_flops
from wide.training.objective import Objective
from wide.training.parallel import DataParallel
from wide.training.progress_log import StageOptions
from wide.training.text_source import read_batches
from wide.training.trainer import Trainer, micro_batch_size

_STEPS = 3
# A step that would take a CPU minutes is tried with fewer and shorter sequences.
_MOST_FLOPS_ON_CPU = 1e12


class Forecast:
    """Says what the parts of a run cost, each on the model as its stage would find it; the model is changed."""

    def __init__(self, request: RunRequest, materials: Materials, settings: Mapping[str, Any]) -> None:
        self._request, self._materials, self._model = request, materials, materials.model
        say(f"settings\n{yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)}")

    def prune(self, blocks: TokenBlocks, later: TokenBlocks | None, expected: str) -> None:
        """Say what `wide prune` costs; `later` is the text of stage 2, `expected` how long the method takes."""
        asked, parts = self._request, dict[str, float]()
        assert isinstance(asked, PruneRequest)
        if asked.is_papers:
            parts["clustering"] = self._clustering(asked, blocks)
            # The fit of routers is not tried: in a run of some length it takes a small share.
            attach(self._model, replace(asked.settings, ffn_grouping="adjacent", router_start="random"))
            self._say_groups()
            parts["training"] = stage_seconds(self._model, blocks, asked.objective, asked.stage, routers=True)
        else:
            say(f"\n{asked.method}: {expected or 'how long it takes is not known before'}")
            attach(self._model, dense_plan(len(discover(self._model))))
        parts |= self._measuring()
        if later is not None:
            parts["LoRA"] = self._lora(later)
        if asked.is_papers:
            _say_in_all(parts)
        self._materials.take_off()

    def recover(self, blocks: TokenBlocks) -> None:
        """Say what `wide recover` costs; the adapter is attached."""
        self._say_groups()
        _say_in_all(self._measuring() | {"LoRA": self._lora(blocks)})

    def _say_groups(self) -> None:
        for line in attachment(self._model).plan.in_words():
            say(f"groups   {line}")

    def _clustering(self, asked: PruneRequest, blocks: TokenBlocks) -> float:
        """Return the seconds that groups of channels take, by those of one layer."""
        config, specs, stage = asked.settings, discover(self._model), asked.stage
        if config.ffn_grouping != "clustered":
            return 0.0
        size = micro_batch_size(stage, num_processes())
        text = read_batches(blocks, batch_size=stage.batch_size, micro_batch_size=size, tokens=config.start_tokens)
        began = time.monotonic()
        with torch.no_grad(), judging(self._model):
            for batch in text:
                forward_without_head(self._model, batch.input_ids.to(self._model.device))
        read = time.monotonic() - began
        plan = Plan(plan_for(config, specs).layers[:1])
        cluster_channels(self._model, specs[:1], plan, text, skipped=0.5, seed=stage.seed, parallel=DataParallel())
        one = time.monotonic() - began - read
        return read + len(specs) * max(one - read, 0.0)

    def _measuring(self) -> dict[str, float]:
        """Return the seconds of all evaluations and calibrations, by a few windows of held-out text."""
        asked, scoring, tokenizer = self._request, self._request.scoring, self._materials.tokenizer
        documents = self._materials.held_out[0]
        if documents is None:
            return {}
        encoded = tokenizer([document.text for document in documents], verbose=False)["input_ids"]
        tokens = min(sum(map(len, encoded)), scoring.tokens or sys.maxsize)
        told: dict[str, Any] = scoring.protocol | {"max_windows": scoring.batch_size}
        began = time.monotonic()
        found = evaluate(self._model, documents, tokenizer=tokenizer, compare_dense=False, **told).model.perplexity
        each = (time.monotonic() - began) / max(0 if found is None else found.tokens, 1)
        recovers = asked.recover is not None
        parts = {"evaluation": (2 + recovers * (1 + asked.dense_baseline)) * tokens * each}
        if attachment(self._model).routers():
            began = time.monotonic()
            self._materials.measure_routing("dry run", blocks=1)
            rows = min(ROUTING_TOKENS, tokens) / scoring.window
            parts["routing"] = (1 + recovers) * rows * (time.monotonic() - began)
            trained = [asked.stage if isinstance(asked, PruneRequest) else None, asked.recover]
            read = sum(calibration_size(stage.num_tokens) for stage in trained if stage is not None)
            parts["calibration"] = (len(DEFAULT_POINTS) + 2) * read * each
        return parts

    def _lora(self, blocks: TokenBlocks) -> float:
        """Say what stage 2 costs on the attached model, and return its seconds, the dense model's included."""
        stage, objective = self._request.recover, self._request.objective
        assert stage is not None
        if attachment(self._model).lora is None:
            add_lora(self._model, rank=stage.lora_rank, alpha=stage.lora_alpha, dropout=stage.lora_dropout)
        routers = stage.train_routers and attachment(self._model).plan.is_routed
        if not routers:
            objective = replace(objective, weight=0.0)
        if stage.distillation is not None:
            objective = replace(objective, distillation=stage.distillation)
        seconds = stage_seconds(self._model, blocks, objective, stage, routers=routers)
        return seconds * (1 + self._request.dense_baseline)


def check_fits(
    model: Any, stage: StageConfig, *, distils: bool, device: torch.device, dtype: str, may_shard: bool
) -> None:
    """Refuse a stage that the memory is too small for, before the base is loaded; the model has no weights.

    With `may_shard` the processes of the run may share the base. Raises TrainingError, which says what would fit.
    """
    world = num_processes()
    told: dict[str, Any] = {"distils": distils, "dtype": dtype, "world": world}
    require_room(_title(stage), model, stage, device, shards=world if may_shard else 1, on_gpus=True, **told)


def stage_seconds(
    model: Any, blocks: TokenBlocks, objective: ObjectiveConfig, stage: StageConfig, *, routers: bool
) -> float:
    """Print what a stage costs: tokens, memory, speed and hours, by a few of its steps; return its seconds.

    Where a step takes a CPU long, smaller ones are run, and count by their work.
    """
    device, title = next(model.parameters()).device, _title(stage)
    parallel = DataParallel.from_environment(device)
    say(
        f"\n{title}: {stage.steps:,} steps of {stage.batch_size} x {stage.sequence_length} tokens = "
        f"{stage.num_tokens:,}, the text {stage.num_tokens / blocks.num_tokens:.2f} times"
    )
    told: dict[str, Any] = {"distils": objective.distillation > 0, "world": parallel.world}
    say(f"memory   calculated: {needed(model, stage, **told)}")
    tried = replace(stage, steps=_STEPS, checkpoint_every=0)
    while device.type != "cuda" and step_flops(model, tried) > _MOST_FLOPS_ON_CPU:
        if tried.batch_size >= 2 * parallel.world:
            tried = replace(tried, batch_size=parallel.world, micro_batch_size=None)
        elif tried.sequence_length >= 128:
            tried = replace(tried, sequence_length=tried.sequence_length // 2)
        else:
            break
    source, times = blocks.cut(tried.sequence_length, seed=stage.seed), list[float]()

    def batch_at(step: int, **share: int) -> TokenBatch:
        # Each step begins by asking for its own.
        times.append(now(device))
        return source.batch_at(step, **share)

    clock: Any = SimpleNamespace(batch_at=batch_at)
    share = step_flops(model, tried) / step_flops(model, stage)
    loss = Objective(model, objective, parallel=parallel, fuse=stage.compile)
    options = StageOptions(title=f"{title}, tried", train_routers=routers)
    with saying_what_fits(title, model, stage, **told):
        outcome = Trainer(model, loss, clock, tried, options, parallel=parallel).train()
    first, *others = [end - begin for begin, end in pairwise([*times, now(device)])]
    if outcome.peak_memory_bytes is not None:
        size = micro_batch_size(stage, parallel.world)
        peak = outcome.peak_memory_bytes / 2**30
        say(f"         measured: {peak:.1f} GiB, {size} x {stage.sequence_length} tokens at a time")
    tried_seconds = sum(others) / len(others)
    each = tried_seconds / share
    # Compiling and imports take the same time whatever the size of a step.
    first += each - tried_seconds
    where = f"{parallel.world} x {device_name(model)}" if parallel.world > 1 else device_name(model)
    speed = f"{stage.batch_size * stage.sequence_length / each:,.0f} tokens/s"
    whole = timedelta(seconds=round(stage.steps * each))
    say(f"time     measured on {where}: {speed}, {whole} h:m:s; the first step takes {first:.1f} s")
    return first + (stage.steps - 1) * each


def _title(stage: StageConfig) -> str:
    return "stage 2" if isinstance(stage, RecoverConfig) else "stage 1"


def _say_in_all(parts: Mapping[str, float]) -> None:
    words = ", ".join(f"{name} {timedelta(seconds=round(seconds))}" for name, seconds in parts.items() if seconds)
    whole = timedelta(seconds=round(sum(parts.values())))
    say(f"\nin all   about {whole} h:m:s: {words}; report, loading and any fit of routers come on top")
