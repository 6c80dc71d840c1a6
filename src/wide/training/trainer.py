"""The loop of both stages: batches by step, accumulation, clipping, AdamW, checkpoints.

Nothing is read back from the device during a step; losses are looked at every few steps and before each checkpoint.
Every micro-batch seeds its own noise from (seed, step, its first sequence), so a resumed run repeats the interrupted
one bit for bit (CPU). Another number of processes draws the same noise, where micro-batches stay the same; the sparsity
term is of those that run at once, so that near the target it differs by more than rounding.
"""

import hashlib
import math
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wide.config import StageConfig
from wide.data.batches import BatchSource
from wide.errors import ConfigError, TrainingError
from wide.models.attach import attachment
from wide.models.observe import own_randomness
from wide.models.pretrained import device_name
from wide.models.thresholds import forget_thresholds
from wide.training.checkpoint import CheckpointFolder, restore
from wide.training.modes import trainable_parameters, training_mode
from wide.training.objective import Objective, target_labels
from wide.training.parallel import DataParallel
from wide.training.progress_log import ProgressLog, StageOptions
from wide.training.token_loss import num_targets

# Looking at losses makes the host wait for the device.
_LOOK_EVERY = 10
# Means of ten losses so many nats above the lowest so far are more than noise, where so much of the target is skipped.
_MUCH_HIGHER, _NEAR = 0.5, 0.9
# Names in records of what the objective measures; rates are averaged over a step's micro-batches, losses are
# contributions to the step already.
_LOSSES = ("loss", "lm_loss", "distillation")
_RATES = {"sparsity": "sparsity.mean", "attention": "sparsity.attention", "ffn": "sparsity.ffn"}
_NAMES = (*_LOSSES, *_RATES.values(), "gradient_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a finished run was like; tokens and their rate are those of all processes.

    Args:
        seconds: Wall time of training, over all parts of a resumed run.
        seconds_before: What of it the earlier parts took, up to the checkpoint that the run was resumed from.
        tokens_per_second: Over the part that the last process ran that ran a step.
        peak_memory_bytes: Of this device (CUDA only, else None).
        last: Means over the last steps that were looked at, by name.
    """

    steps: int
    tokens: int
    seconds: float
    seconds_before: float
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    last: dict[str, float]


class Trainer:
    """Trains the routers and LoRA of an attached model, whose base is frozen for the duration.

    Raises ConfigError if the batch cannot be shared, or nothing is trainable.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        source: BatchSource,
        stage: StageConfig,
        options: StageOptions,
        *,
        parallel: DataParallel | None = None,
    ) -> None:
        self._model, self._objective, self._source = model, objective, source
        self._stage, self._options = stage, options
        self._parallel = parallel or DataParallel()
        self._micro_size = micro_batch_size(stage, self._parallel.world)
        self._parameters = trainable_parameters(model, routers=options.train_routers)
        if not self._parameters:
            raise ConfigError("nothing is trainable: this model has no LoRA and its routers are frozen")
        self._device = next(iter(self._parameters.values())).device
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=stage.learning_rate,
            betas=(0.9, stage.adam_beta2),
            weight_decay=stage.weight_decay,
            fused=self._device.type == "cuda",
        )
        self._checkpoints = None
        if options.output is not None:
            path, key = options.output / "checkpoints", options.fingerprint
            self._checkpoints = CheckpointFolder(path, fingerprint=key, facts=options.facts)
        # Per step not looked at yet: (step, schedule values, measured values on the device).
        self._unread: list[tuple[int, dict[str, float], Tensor]] = []
        # What the outcome tells of the last process that ran a step.
        self._measured: dict[str, Any] = {"tokens": 0, "tokens_per_second": None, "peak_memory_bytes": None, "last": {}}
        # Of the last step, as a number: a scalar on the device cannot be read back after the device has failed.
        self._heat = attachment(model).control.sampling.temperature
        # What a compiled graph reads: a number would be a constant of it, and it would be compiled again in each step;
        # a scalar at another place, and its CUDA graphs would be captured again.
        self._scalar = torch.empty((), device=self._device) if stage.compile else None
        self._timer = _Timer()
        self._lowest, self._recent = math.inf, deque[float](maxlen=_LOOK_EVERY)

    def train(self) -> Outcome:
        """Run all steps that are left and return what the run was like.

        Raises:
            TrainingError: If a loss is not finite, or a checkpoint cannot be written.
            ConfigError: If the checkpoint to resume from belongs to another run.
            KeyboardInterrupt: After Ctrl-C or SIGTERM, when the step was finished and a checkpoint written.
        """
        self._parallel.broadcast(self._parameters.values())
        first = self._resume()
        options, stage = self._options, self._stage
        if options.train_routers:
            # Not before: what is refused above leaves the model as it is.
            forget_thresholds(self._model)
        log = ProgressLog(
            options,
            steps=stage.steps,
            first_step=first,
            device=device_name(self._model),
            silent=not self._parallel.is_first,
        )
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        failed = True
        try:
            with (
                training_mode(
                    self._model,
                    routers=options.train_routers,
                    gradient_checkpointing=stage.gradient_checkpointing,
                    compile=stage.compile,
                ),
                own_randomness(self._device),
                _stopping_later() as stop,
            ):
                for step in range(first, stage.steps):
                    self._step(step)
                    self._after(step, log, stop)
                # Also what came while the last checkpoint was written.
                if self._parallel.any(stop.is_set()):
                    raise KeyboardInterrupt(f"stopped after step {stage.steps} of {stage.steps}")
            failed = False
        finally:
            attachment(self._model).control.sampling.temperature = self._heat
            log.close(failed=failed)
        before = self._timer.seconds_before
        seconds = self._timer.seconds if stage.steps > first else before
        return Outcome(steps=stage.steps, seconds=seconds, seconds_before=before, **self._measured)

    def _resume(self) -> int:
        if self._checkpoints is None:
            return 0
        if self._parallel.is_first:
            self._checkpoints.remove_unfinished()
        self._parallel.barrier()
        found = self._checkpoints.latest() if self._options.resume else None
        step = 0 if found is None else found.step
        if self._parallel.any(step != self._parallel.agree(step)):
            raise TrainingError(
                f"the processes find different checkpoints in {self._checkpoints.path} (step {step} here); the output "
                "must be a folder that all of them see, also from other nodes"
            )
        if found is None:
            return 0
        restore(found, self._parameters, self._optimizer)
        self._timer.seconds_before = found.seconds
        # Checkpoints of earlier versions do not count them.
        each = self._source.batch_at(0, batch_size=self._stage.batch_size).input_ids.numel()
        self._measured |= {"tokens": found.step * each} | found.measured
        self._timer.tokens = self._timer.tokens_before = self._timer.counted = self._measured["tokens"]
        return found.step

    def _step(self, step: int) -> None:
        stage, parallel, sampling = self._stage, self._parallel, attachment(self._model).control.sampling
        schedule = self._schedule(step)
        self._heat = schedule["temperature"]
        sampling.temperature = self._heat if self._scalar is None else self._scalar.fill_(self._heat)
        batch = self._source.batch_at(step, batch_size=stage.batch_size, rank=parallel.rank, world=parallel.world)
        self._timer.tokens += batch.input_ids.numel() * parallel.world
        parts = batch.split(self._micro_size)
        # Counted on the CPU, where the batch still is: asking the device would wait for it.
        targets = parallel.sum(torch.full((), float(num_targets(target_labels(batch))), device=self._device))
        self._optimizer.zero_grad(set_to_none=True)
        measured = torch.zeros(len(_NAMES), device=self._device)
        first = parallel.rank * len(batch.input_ids)
        for index, part in enumerate(parts):
            noise = f"{stage.seed} {step} {first + index * self._micro_size}"
            torch.manual_seed(int.from_bytes(hashlib.sha256(noise.encode()).digest()[:7]))
            padded = not bool(part.valid.all())
            loss, found = self._objective(
                part.to(self._device), targets_in_step=targets, micro_batches=len(parts), padded=padded
            )
            torch.autograd.backward(loss)
            losses = [getattr(found, name) for name in _LOSSES]
            measured[:-1] += torch.stack([*losses, *(getattr(found, name) / len(parts) for name in _RATES)])
        parallel.average_gradients(self._parameters.values())
        measured[-1] = nn.utils.clip_grad_norm_(self._parameters.values(), stage.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = schedule["learning_rate"]
        self._optimizer.step()
        self._unread.append((step, schedule, measured))

    def _schedule(self, step: int) -> dict[str, float]:
        stage = self._stage
        heat = temperature(step, steps=stage.steps, start=stage.temperature_start, end=stage.temperature_end)
        return {
            "temperature": heat if self._options.anneal else stage.temperature_end,
            "learning_rate": learning_rate(step, steps=stage.steps, peak=stage.learning_rate, warmup=stage.warmup),
            "sparsity.target": self._objective.config.sparsity,
        }

    def _after(self, step: int, log: ProgressLog, requested: threading.Event) -> None:
        done, every = step + 1, self._stage.checkpoint_every
        is_last = done == self._stage.steps
        due = is_last or (every > 0 and done % every == 0)
        stop = not is_last and self._parallel.any(requested.is_set())
        if due or stop or done % _LOOK_EVERY == 0:
            log.add(self._look())
        if due or stop:
            self._write(done)
        if stop:
            raise KeyboardInterrupt(f"stopped after step {done} of {self._stage.steps}")

    def _look(self) -> list[tuple[int, dict[str, float]]]:
        """Fetch what was measured since the last look, and refuse what is not finite."""
        values = torch.stack([measured for _, _, measured in self._unread]).cpu()
        speed = self._timer.lap()
        points = []
        for (step, schedule, _), row in zip(self._unread, values.tolist(), strict=True):
            if not all(math.isfinite(value) for value in row):
                raise TrainingError(self._not_finite(step, row))
            points.append((step, dict(zip(_NAMES, row, strict=True)) | schedule | {"tokens_per_second": speed}))
        names = points[-1][1]
        cuda = self._device.type == "cuda"
        self._measured = {
            "tokens": self._timer.tokens,
            "tokens_per_second": self._timer.speed,
            "peak_memory_bytes": torch.cuda.max_memory_allocated(self._device) if cuda else None,
            "last": {name: sum(point[name] for _, point in points) / len(points) for name in names},
        }
        self._unread.clear()
        for point in points:
            self._compare(*point)
        return points

    def _compare(self, step: int, found: dict[str, float]) -> None:
        """Warn, once, of a loss that has risen at the target: routers that lost a group that matters rarely recover."""
        if found["sparsity.mean"] < _NEAR * found["sparsity.target"]:
            self._recent.clear()
        self._recent.append(found["lm_loss"])
        if len(self._recent) < _LOOK_EVERY or not self._parallel.is_first:
            return
        loss = sum(self._recent) / _LOOK_EVERY
        if loss > self._lowest + _MUCH_HIGHER:
            warnings.warn(
                f"{self._options.title}, step {step}: the loss has risen from {self._lowest:.2f} to {loss:.2f}, and "
                f"rarely falls as low again; try another seed (now {self._stage.seed})",
                stacklevel=2,
            )
            self._lowest = math.nan  # Stays so: nothing is higher.
        self._lowest = min(self._lowest, loss)

    def _not_finite(self, step: int, row: list[float]) -> str:
        folder = self._checkpoints
        kept = "no checkpoints are kept without an output folder" if folder is None else folder.describe_last()
        found = dict(zip(_NAMES, row, strict=True))
        what = ", ".join(f"{name} = {value}" for name, value in found.items() if not math.isfinite(value))
        return (
            f"{self._options.title}, step {step}: {what}, so training stopped; {kept}. Try a lower learning_rate (now "
            f"{self._stage.learning_rate:g}), a smaller max_grad_norm, or a bfloat16 or float32 base instead of float16"
        )

    def _write(self, done: int) -> None:
        if self._checkpoints is None:
            return
        failed: TrainingError | None = None
        if self._parallel.is_first:
            try:
                seconds, measured = self._timer.seconds, self._measured
                self._checkpoints.write(done, self._parameters, self._optimizer, seconds=seconds, measured=measured)
            except TrainingError as error:
                failed = error
        # The first process alone writes, and all stop with it.
        reason = self._parallel.agree(None if failed is None else str(failed))
        if reason is not None:
            raise TrainingError(reason) from failed


class _Timer:
    """Wall time and tokens; laps end where the host has waited for the device."""

    def __init__(self) -> None:
        self.seconds_before = 0.0
        self._start = self._lap = time.perf_counter()
        # Of all parts of the run, of the earlier ones, and at the end of the last lap.
        self.tokens = self.tokens_before = self.counted = 0

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self._start

    @property
    def speed(self) -> float:
        return (self.counted - self.tokens_before) / max(self._lap - self._start, 1e-9)

    def lap(self) -> float:
        now = time.perf_counter()
        speed = (self.tokens - self.counted) / max(now - self._lap, 1e-9)
        self._lap, self.counted = now, self.tokens
        return speed


def learning_rate(step: int, *, steps: int, peak: float, warmup: float) -> float:
    """Return the learning rate: linear warm-up to the peak over that share of the steps, then a cosine towards 0."""
    rising = round(warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))


def temperature(step: int, *, steps: int, start: float, end: float) -> float:
    """Return the Gumbel-softmax temperature: linear from `start` at the first step to `end` at the last.

    Source: paper, section 4.1 (5 to 0.5).
    """
    return start + (end - start) * step / max(steps - 1, 1)


def micro_batch_size(stage: StageConfig, world: int) -> int:
    """Return the sequences per forward of one process.

    Raises ConfigError if the batch cannot be shared among the processes, or their share not cut into micro-batches.
    """
    share, left = divmod(stage.batch_size, world)
    if left or not share:
        raise ConfigError(
            f"batch_size {stage.batch_size} cannot be shared by {world} processes; choose a multiple of {world}"
        )
    size = stage.micro_batch_size or share
    # A batch that is shared by many processes may leave each less than one forward takes.
    if size > stage.batch_size or share % (size := min(size, share)):
        raise ConfigError(
            f"micro_batch_size {size} does not divide the {share} sequences of each process; choose a divisor"
        )
    return size


@contextmanager
def _stopping_later() -> Iterator[threading.Event]:
    """Let the first Ctrl-C or SIGTERM only set the event; a second one acts as it used to."""
    requested = threading.Event()
    before: dict[signal.Signals, Any] = {}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(_number: int, _frame: object) -> None:
        requested.set()
        put_back()

    # Python allows handlers in the main thread only.
    if threading.current_thread() is threading.main_thread():
        before |= {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested
    finally:
        put_back()
