"""Routers trained inside transformers' Trainer, TRL's trainers, or any loop that differentiates the model's own loss.

    trainer = Trainer(model, args, train_dataset=..., callbacks=[wide.RouterCallback(sparsity=0.5)])

A loop of your own, as one with accelerate, calls `begin(model, steps=...)`, `step(number)` before each optimiser step,
`end()` and `calibrate()`.
"""

import base64
import dataclasses
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from wide.config import ObjectiveConfig, StageConfig
from wide.data.batches import TokenBatch
from wide.errors import ConfigError
from wide.models.adapter import ROUTER_FILE, restore_routers
from wide.models.adapter import save as save_adapter
from wide.models.attach import attachment
from wide.models.observe import observe
from wide.models.thresholds import forget_thresholds
from wide.training.inference_target import meet_target
from wide.training.modes import layers_run
from wide.training.objective import Objective
from wide.training.parallel import DataParallel
from wide.training.trainer import temperature

FOLDER = "wide"
"""The adapter in a checkpoint of a PEFT model, which holds LoRA alone."""
# Tokens that are kept for the calibration.
_KEPT = 65_536


class _Term:
    """The sparsity term of one forward: part of the loss that the model returns, if the loop differentiates that.

    `value` is the weighted distance, `alone` its share of a step where the loss is another, `refused` why that cannot
    be.
    """

    def __init__(self, value: Tensor, alone: float, refused: str) -> None:
        self.value, self.alone, self.refused = value, alone, refused
        self.has_gradient = False

    def arrives(self, _gradient: Tensor) -> None:
        self.has_gradient = True


class _Carried(torch.autograd.Function):
    """Lets the term's gradient begin in the backward of the states that every loss depends on.

    By then the backward has passed the loss that the model returned, if the loop differentiates it.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, value: Tensor, term: _Term) -> Tensor:
        ctx.term = term
        return states.view_as(states)

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        term = ctx.term
        if term.has_gradient:
            return gradient, None, None
        if term.refused:
            raise ConfigError(term.refused)
        return gradient, torch.full_like(term.value, term.alone), None


class RouterCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Adds the sparsity term to the loss, and anneals the routers.

    The loss that the model returns includes the term. If a trainer computes its own loss, as TRL's do, the gradient
    still includes the term, but the logged loss does not.

    The callback does not freeze the base: call `requires_grad_(False)` before the Trainer is made, or the base is
    trained, too. At the end thresholds are calibrated on the last batches, so that inference meets the target, before
    the last checkpoint is written (with `metric_for_best_model`, of PEFT models only). The
    Trainer's checkpoints are full checkpoints. Those of a PEFT model hold LoRA, and in `wide/` the routers as an
    adapter for `wide.load`. In a loop of your own, for example with accelerate::

        routers = wide.RouterCallback(sparsity=0.5)
        routers.begin(model, steps=1000)
        for step, batch in enumerate(loader):
            routers.step(step)
            model(**batch).loss.backward()      # with the sparsity term
            ...
        routers.end()
        routers.calibrate()                     # so that inference meets the target; the Trainer does it by itself

    Args:
        sparsity: Wanted share of skipped work in [0, 1).
        objective: Measure and weight in full, instead of `sparsity`; its distillation is not for these loops. As
            a dictionary where the Trainer makes the callback again.
        temperatures: Of the Gumbel-softmax, at the first and last step.

    Raises:
        ConfigError: If both are given, or distillation is asked for.

    Source: paper, section 3.2 (router training).
    """

    def __init__(
        self,
        sparsity: float | None = None,
        *,
        objective: ObjectiveConfig | dict[str, Any] | None = None,
        temperatures: tuple[float, float] = (StageConfig().temperature_start, StageConfig().temperature_end),
    ) -> None:
        if isinstance(objective, dict):
            objective = ObjectiveConfig(**objective)
        if objective is not None and (sparsity is not None or objective.distillation):
            raise ConfigError("give sparsity= or objective=, not both, and no distillation: the loss is the loop's own")
        self.objective = objective or ObjectiveConfig(sparsity=0.5 if sparsity is None else sparsity)
        self.temperatures = temperatures
        self.measured: Tensor | None = None
        self._open = ExitStack()
        self._has_resumed = self._is_calibrated = False
        self._refused = ""
        self._batches = deque[TokenBatch]()

    def begin(self, model: Any, *, steps: int, micro_batches: int = 1, loss_is_multiplied: bool = False) -> None:
        """Let the loss of an attached model (or PEFT's wrapper around one) hold the sparsity term from now on.

        Args:
            steps: Optimiser steps of the whole training.
            micro_batches: Forwards in a step; matters where the loss is divided by `num_items_in_batch`, or made of
                something else than the loss that the model returns.
            loss_is_multiplied: Whether the loop multiplies such a loss by the number of processes.

        Raises:
            NotAttachedError: If the model has no plan.
            ConfigError: If no router is trainable.
            UnsupportedModelError: If routers are offloaded.
        """
        model = _inner(model)
        state = attachment(model)
        if not any(parameter.requires_grad for router in state.routers() for parameter in router.parameters()):
            raise ConfigError("no router of this model is trainable; set requires_grad of their parameters")
        parallel = DataParallel.from_environment(next(model.parameters()).device)
        # It refuses, too; what is in force is left alone until then.
        term = Objective(model, self.objective, parallel=parallel)
        self.end()
        if state.loop is not None:  # Since a training that was interrupted: its term would be in the loss, too.
            state.loop.end()
        self._model, self._parallel, self._term = model, parallel, term
        state.loop = self
        self._open.callback(setattr, state, "loop", None)
        forget_thresholds(model)
        self._steps = steps
        self._term_now: _Term | None = None
        self._batches.clear()
        self._is_calibrated = False
        self._micro_batches, self._times = micro_batches, self._parallel.world if loss_is_multiplied else 1
        # Checkpointing that the loop has switched on may lose the gradient of masks; this is on instead.
        self._open.enter_context(layers_run(model))
        self._open.enter_context(observe(model))
        decoder = getattr(model, "base_model", model)
        for module, hook in ((decoder, self._carry_term), (model, self._add_term)):
            self._open.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        self.step(0)

    def step(self, step: int, *, micro_batches: int | None = None) -> None:
        """Set the temperature of an optimiser step, counted from 0.

        `micro_batches` are the forwards in it, where they are fewer than `begin` was told.
        """
        self._forwards = micro_batches or self._micro_batches
        start, end = self.temperatures
        heat = temperature(step, steps=self._steps, start=start, end=end)
        attachment(self._model).control.sampling.temperature = heat

    def end(self) -> None:
        """Leave the loss as it was."""
        self._open.close()

    def calibrate(self) -> None:
        """Calibrate thresholds on the last batches, as `wide.prune` does, and note what was asked and measured."""
        if not self._batches:
            return
        found = meet_target(self._model, list(self._batches), self.objective, adjust=True, parallel=self._parallel)
        asked = dataclasses.asdict(self.objective)
        attachment(self._model).note("prune", {"objective": asked, "steps": self._steps, "inference": found})
        self._is_calibrated = True

    def _carry_term(self, decoder: nn.Module, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> Any:
        """Take the term of a forward, and let the decoder's states `[B, T, D]` carry its gradient."""
        self._term_now = None
        if not (decoder.training and torch.is_grad_enabled()):
            return None
        ids = given.get("input_ids", args[0] if args else None)
        if ids is None:
            named = ", ".join(sorted(key for key, value in given.items() if value is not None))
            raise ConfigError(f"RouterCallback needs input_ids [B, T]; the model was called with {named}")
        mask = given.get("attention_mask")
        valid = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.dim() != 2 else mask.bool()
        # Of this forward: the loop may watch it, too, as with `capture_routing`.
        distance, self.measured = self._term.distance(attachment(self._model).control.observed or [], valid)
        self._term_now = _Term(self.objective.weight * distance, 1 / self._forwards, self._refused)
        self._keep(TokenBatch(input_ids=ids, labels=ids, valid=valid))
        carry: Any = _Carried.apply
        states = carry(output[0], self._term_now.value, self._term_now)
        if isinstance(output, tuple):
            return (states, *output[1:])
        output.last_hidden_state = states
        return output

    def _add_term(self, _model: nn.Module, _args: tuple[Any, ...], given: dict[str, Any], output: Any) -> Any:
        term = self._term_now
        if term is None or getattr(output, "loss", None) is None:
            return None
        # A loss that was divided by the tokens of the whole step is not divided by its forwards any more.
        shares = self._forwards * self._times if given.get("num_items_in_batch") is not None else 1
        output.loss = output.loss + term.value / shares
        output.loss.register_hook(term.arrives)
        return output

    def _keep(self, batch: TokenBatch) -> None:
        self._batches.append(batch)
        while sum(kept.input_ids.numel() for kept in self._batches) > _KEPT and len(self._batches) > 1:
            self._batches.popleft()

    def state(self) -> dict[str, Any]:
        """Return what the Trainer keeps in `trainer_state.json`: settings, and the tokens to calibrate on."""
        tensors = {
            f"{place}.{name}": getattr(batch, name).cpu()
            for place, batch in enumerate(self._batches)
            for name in ("input_ids", "valid")
        }
        settings = {"objective": dataclasses.asdict(self.objective), "temperatures": self.temperatures}
        return {"args": settings, "attributes": {"tokens": base64.b64encode(save(tensors)).decode()}}

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Make routers trainable, which PEFT froze with the rest, before the optimiser is made."""
        inner = _inner(model)
        for router in attachment(inner).routers():
            router.requires_grad_(True)
        if inner is model:
            return
        # Only PEFT is told where LoRA is loaded from: to go on, wherever that lies, or as the best at the end.
        load_lora = model.load_adapter

        def load_adapter(folder: Any, *args: Any, **given: Any) -> Any:
            found = load_lora(folder, *args, **given)
            # Of several adapters, those that have names lie in folders of their own.
            for beside in (Path(folder) / FOLDER / ROUTER_FILE, Path(folder).parent / FOLDER / ROUTER_FILE):
                if beside.is_file():
                    restore_routers(inner, load_file(beside))
                    self._has_resumed = True
                    break
            return found

        model.load_adapter = load_adapter

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begin."""
        if args.n_gpu > 1:
            raise ConfigError(
                f"one process drives {args.n_gpu} GPUs, which copies the model; use torchrun or accelerate"
            )
        inner = _inner(model)
        if attachment(inner).lora is not None and not attachment(inner).lora.merged:
            raise ConfigError("the Trainer cannot save LoRA of wide.recover; merge it, or put LoRA on with PEFT")
        if inner is not model and state.global_step and not self._has_resumed:
            raise ConfigError(
                f"the checkpoint of step {state.global_step} has no routers beside LoRA ({FOLDER}/{ROUTER_FILE}); "
                "resume from one that this callback wrote"
            )
        multiplied = bool(args.average_tokens_across_devices)
        micro_batches = args.gradient_accumulation_steps
        if args.fp16:
            self._refused = (
                "this trainer makes a loss of its own, and fp16 scales it by a factor that the sparsity term does not "
                "know; train in bf16 or float32"
            )
        self.begin(model, steps=state.max_steps, micro_batches=micro_batches, loss_is_multiplied=multiplied)
        saved = (state.stateful_callbacks or {}).get(type(self).__name__)
        if state.global_step and isinstance(saved, dict):
            # What was read before the checkpoint counts in the calibration, too.
            tensors = load(base64.b64decode(saved["attributes"]["tokens"]))
            for place in range(len(tensors) // 2):
                ids, valid = (tensors[f"{place}.{name}"].to(inner.device) for name in ("input_ids", "valid"))
                self._keep(TokenBatch(input_ids=ids, labels=ids, valid=valid))

    def on_step_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Go on with the schedules."""
        every = args.gradient_accumulation_steps
        try:
            batches = len(train_dataloader)
        except TypeError:
            # A stream; its end is not known before.
            batches = every
        # The last step of an epoch has what is left.
        is_last = (state.global_step + 1) % -(-batches // every) == 0
        self.step(state.global_step, micro_batches=batches % every if is_last else None)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Log the skip rate of the last forward."""
        if self.measured is not None and logs is not None and "loss" in logs:
            logs["sparsity"] = state.log_history[-1]["sparsity"] = float(self.measured)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Calibrate before the Trainer writes its last checkpoint."""
        # Where evaluations choose the best step, the last one must not have thresholds that the others lack.
        if control.should_training_stop and not args.metric_for_best_model:
            self._finish()

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Write the routers beside PEFT's files, calibrated if no step follows."""
        if _inner(model) is model:
            return
        if control.should_training_stop:
            self._finish()
        if state.is_world_process_zero:
            # What PEFT trains of the base itself (modules_to_save) lies in its own files.
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER
            save_adapter(_inner(model), folder, ignore_base_changes=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End, and calibrate."""
        # By now the model may be the best one, of an earlier step.
        self._is_calibrated &= not args.load_best_model_at_end
        self._finish()

    def _finish(self) -> None:
        self.end()
        if not self._is_calibrated:
            self.calibrate()


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
