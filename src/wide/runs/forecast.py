"""What a run would cost: memory by calculation, time by a few steps on this machine."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import yaml

from wide.config import ObjectiveConfig, RecoverConfig, StageConfig
from wide.data.batches import BatchSource, TokenBatch, TokenBlocks
from wide.models.attach import attachment
from wide.models.observe import now
from wide.models.pretrained import device_name
from wide.runs.process import num_processes, say
from wide.training.memory import needed, require_room, saying_what_fits, step_flops
from wide.training.objective import Objective
from wide.training.parallel import DataParallel
from wide.training.progress_log import StageOptions
from wide.training.trainer import Trainer, micro_batch_size

_STEPS = 3
# A step that would take a CPU minutes is tried with fewer and shorter sequences.
_MOST_FLOPS_ON_CPU = 1e12


class _Clocked:
    """A source of batches that notes when each step asks for its own."""

    def __init__(self, source: BatchSource, device: torch.device) -> None:
        self._source, self._device = source, device
        self.times: list[float] = []

    def batch_at(self, step: int, *, batch_size: int, rank: int = 0, world: int = 1) -> TokenBatch:
        self.note()
        return self._source.batch_at(step, batch_size=batch_size, rank=rank, world=world)

    def note(self) -> None:
        self.times.append(now(self._device))


def say_settings(settings: Mapping[str, Any]) -> None:
    """Print the resolved settings as the run would save them."""
    say(f"settings\n{yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)}")


def say_groups(model: Any) -> None:
    """Print what the layers of an attached model run, each kind once."""
    for line in attachment(model).plan.in_words():
        say(f"groups   {line}")


def check_fits(
    model: Any, stage: StageConfig, *, distils: bool, device: torch.device, dtype: str, may_shard: bool
) -> None:
    """Refuse a stage that the memory is too small for, before the base is loaded.

    Args:
        model: Without weights.
        distils: Whether the loss compares with the dense model.
        may_shard: Whether the processes of the run may share the base.

    Raises:
        TrainingError: If it does not fit; the message says what would.
    """
    world = num_processes()
    told: dict[str, Any] = {"distils": distils, "dtype": dtype, "world": world}
    require_room(_title(stage), model, stage, device, shards=world if may_shard else 1, on_gpus=True, **told)


def forecast(
    model: Any, blocks: TokenBlocks, objective: ObjectiveConfig, stage: StageConfig, *, routers: bool
) -> float:
    """Print what a stage costs: tokens, memory, speed and hours, by a few of its steps; return its seconds.

    Where a step takes a CPU long, smaller ones are run, and count by their work.

    Args:
        model: As the stage would find it; what is trained of it is changed.
    """
    device, title = next(model.parameters()).device, _title(stage)
    parallel = DataParallel.from_environment(device)
    tokens = stage.steps * stage.batch_size * stage.sequence_length
    read = tokens / (len(blocks) * blocks.sequence_length)
    say(
        f"\n{title}: {stage.steps:,} steps of {stage.batch_size} x {stage.sequence_length} tokens = "
        f"{tokens:,}, the text {read:.2f} times"
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
    clock = _Clocked(blocks.cut(tried.sequence_length, seed=stage.seed), device)
    share = step_flops(model, tried) / step_flops(model, stage)
    loss = Objective(model, objective, parallel=parallel, fuse=stage.compile)
    options = StageOptions(title=f"{title}, tried", train_routers=routers)
    with saying_what_fits(title, model, stage, **told):
        outcome = Trainer(model, loss, clock, tried, options, parallel=parallel).train()
    clock.note()
    first, *others = [end - begin for begin, end in zip(clock.times, clock.times[1:], strict=False)]
    if outcome.peak_memory_bytes is not None:
        size = micro_batch_size(stage, parallel.world)
        peak = outcome.peak_memory_bytes / 2**30
        say(f"         measured: {peak:.1f} GiB, {size} x {stage.sequence_length} tokens at a time")
    each = sum(others) / len(others)
    seconds = each / share
    # Compiling and imports take the same time whatever the size of a step.
    first += seconds - each
    where = f"{parallel.world} x {device_name(model)}" if parallel.world > 1 else device_name(model)
    say(f"time     measured on {where}: {_speed(stage, seconds)}; the first step takes {first:.1f} s")
    return first + (stage.steps - 1) * seconds


def _speed(stage: StageConfig, seconds: float) -> str:
    speed = stage.batch_size * stage.sequence_length / seconds
    return f"{speed:,.0f} tokens/s, {timedelta(seconds=round(stage.steps * seconds))} h:m:s"


def _title(stage: StageConfig) -> str:
    return "stage 2" if isinstance(stage, RecoverConfig) else "stage 1"
