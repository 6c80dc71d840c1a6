"""Runs a model one decoder layer after the other, on inputs that the layers before it, pruned already, really give.

The model's own forward is run just far enough to see with which arguments it calls its decoder layers (positions,
masks, rotary embeddings); from then on layers are called alone. No family is known by name.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from wide.errors import DataError
from wide.models.block_spec import BlockSpec
from wide.models.gates import hidden_of, input_of
from wide.models.having import having

Observer = Callable[[Tensor], None]
"""Receives the input of a module, `[..., C]` in the model's dtype, once per micro-batch."""


class _Stopped(Exception):  # noqa: N818 - it ends a forward on purpose and never leaves this file
    """Ends a forward once everything wanted has been seen."""


_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a decoder layer besides its hidden states."""


class LayerRunner:
    """Calibration windows, int64 `[N, T]` without padding, on their way through the decoder layers.

    `inputs` are those of the layer that is next, a tensor `[B, T, D]` in the model's dtype per micro-batch; what a
    method writes there is what the next layer reads. Raises DataError if there is no window.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, specs: Sequence[BlockSpec], ids: Tensor, *, batch_size: int) -> None:
        if not ids.numel():
            raise DataError(f"calibration needs at least one window of tokens, got ids of shape {tuple(ids.shape)}")
        self.specs = tuple(specs)
        self.num_tokens = ids.numel()
        self.inputs: list[Tensor] = []
        self._calls: list[list[_Call]] = []
        # What layer, argument and shape got first: what is equal in later micro-batches is held once.
        self._kept: dict[tuple[int, int, torch.Size], Tensor] = {}
        device = next(model.parameters()).device
        for chunk in ids.split(batch_size):
            self.inputs.append(self._embed(model, chunk.to(device)))

    def _embed(self, model: nn.Module, ids: Tensor) -> Tensor:
        """Return the input of the first layer, and note the arguments of all; only the first one is run for that."""
        first: list[Tensor] = []
        calls: list[_Call] = []
        outputs: list[Any] = []

        def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first.append(input_of(args, kwargs))
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            leaves, form = tree_flatten((args[1:], others))
            calls.append(tree_unflatten([self._once(len(calls), *leaf) for leaf in enumerate(leaves)], form))
            if len(calls) == len(self.specs):
                raise _Stopped

        with ExitStack() as hooks:
            for spec in self.specs:
                hooks.enter_context(spec.layer.register_forward_pre_hook(note, with_kwargs=True))
            for spec in self.specs[1:]:
                hooks.enter_context(having(spec.layer, forward=lambda *_args, **_kwargs: outputs[0]))
            hooks.enter_context(self.specs[0].layer.register_forward_hook(lambda *of: outputs.append(of[2])))
            _run_until_stopped(lambda: model(input_ids=ids, use_cache=False))
        self._calls.append(calls)
        return first[0]

    def _once(self, layer: int, place: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = self._kept.setdefault((layer, place, value.shape), value)
        return known if known.dtype == value.dtype and torch.equal(known, value) else value

    @torch.no_grad()
    def call(self, index: int, batch: int) -> Tensor:
        """Return the output of layer `index` on micro-batch `batch` of the current inputs, `[B, T, D]`."""
        hidden = self.inputs[batch]
        args, kwargs = self._calls[batch][index]
        return hidden_of(self.specs[index].layer(hidden, *args, **kwargs))

    @torch.no_grad()
    def input_inside(self, index: int, batch: int, module: nn.Module) -> Tensor:
        """Return what `module`, a part of layer `index`, reads on a micro-batch; nothing behind it is run."""
        seen: list[Tensor] = []

        def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
            seen.append(input_of(args, kwargs))
            raise _Stopped

        with module.register_forward_pre_hook(stop, with_kwargs=True):
            _run_until_stopped(lambda: self.call(index, batch))
        return seen[0]

    def observe(self, index: int, observers: Mapping[nn.Module, Observer]) -> None:
        """Run layer `index` on all micro-batches and show the inputs of modules inside it; outputs are dropped."""

        def show(observer: Observer, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Whatever the observer returns stays here: a hook that returns something replaces the arguments.
            observer(input_of(args, kwargs))

        with ExitStack() as hooks:
            for module, observer in observers.items():
                hooks.enter_context(module.register_forward_pre_hook(partial(show, observer), with_kwargs=True))
            for batch in range(len(self.inputs)):
                self.call(index, batch)

    def advance(self, index: int) -> None:
        """Run layer `index` on all micro-batches; its outputs become the inputs of the next layer."""
        for batch in range(len(self.inputs)):
            self.inputs[batch] = self.call(index, batch)


def _run_until_stopped(forward: Callable[[], object]) -> None:
    try:
        forward()
    except _Stopped:
        return
    raise AssertionError("the forward ended without reaching the module that was to stop it")


class EditedWeights(AbstractContextManager["EditedWeights"]):
    """Replaces weights of linear modules in place; leaving the `with` block restores all of them."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._originals: dict[nn.Linear, Tensor] = {}

    def __exit__(self, *_: object) -> None:
        self.restore()

    def name(self, linear: nn.Linear) -> str:
        """Return the weight's name in the model's state dict."""
        return self._names[id(linear.weight)]

    @torch.no_grad()
    def set(self, linear: nn.Linear, weight: Tensor) -> None:
        """Replace a weight by `[out, in]`, brought to the device and dtype of the module."""
        if linear not in self._originals:
            self._originals[linear] = linear.weight.detach().clone()
        linear.weight.copy_(weight, non_blocking=True)

    @torch.no_grad()
    def restore(self) -> None:
        """Bring every weight back."""
        for linear, weight in self._originals.items():
            linear.weight.copy_(weight)
        self._originals.clear()
