"""Base weights that a static method replaces, and the originals beside them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from wide.errors import ShapeError
from wide.models.sharding import require_unsharded


class ReplacedWeights:
    """Puts other values into base parameters and keeps the originals, bit for bit, on the side.

    The parameters themselves stay the same objects, under LoRA's wrappers too.

    Args:
        model: The base model, nothing attached yet.
        weights: New values by name in the model's state dict, any float dtype; cast to the parameter's.

    Raises:
        ShapeError: If a name is unknown, a shape differs, a value is not finite, or of tied parameters only one is
            named or they are given different values.
        UnsupportedModelError: If the model is sharded.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Check everything, then replace."""
        require_unsharded(model, "replacing base weights")
        by_name = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = {name: _fitting(name, by_name, value) for name, value in weights.items()}
        _refuse_half_of_a_tie(by_name, weights)
        # Tied parameters are one object, replaced once. Copies, because merging LoRA writes into them.
        self._others = {
            parameter: weights[name].detach().to(device=parameter.device, dtype=parameter.dtype, copy=True)
            for name, parameter in self._parameters.items()
        }
        self._is_dense = True
        self._swap()

    def values(self) -> dict[str, Tensor]:
        """Return copies of the weights that replace, by name, on the CPU."""
        with self.showing(is_dense=False):
            return {name: parameter.detach().cpu().clone() for name, parameter in self._parameters.items()}

    def __contains__(self, parameter: object) -> bool:
        """Return whether a parameter is replaced."""
        return parameter in self._others

    def zeros(self) -> dict[nn.Parameter, Tensor]:
        """Return where each replaced parameter holds zeros, bool of its shape."""
        with self.showing(is_dense=False):
            return {parameter: parameter.detach() == 0 for parameter in self._others}

    def zero_counts(self) -> dict[nn.Parameter, int]:
        """Return how many zeros each replaced parameter holds."""
        with self.showing(is_dense=False):
            return {parameter: int((parameter.detach() == 0).sum()) for parameter in self._others}

    def restore(self) -> None:
        """Put the originals back for good."""
        if not self._is_dense:
            self._swap()
        # A block that still runs with the originals must not swap them away at its end.
        self._others = {}

    @contextmanager
    def showing(self, *, is_dense: bool) -> Iterator[None]:
        """Run with the originals inside the block, or with what replaces them."""
        before = self._is_dense
        if before != is_dense:
            self._swap()
        try:
            yield
        finally:
            if self._is_dense != before:
                self._swap()

    def _swap(self) -> None:
        for parameter, other in self._others.items():
            # The model may have moved, or changed its dtype, since this tensor was in use.
            moved = other.to(device=parameter.device, dtype=parameter.dtype)
            self._others[parameter] = parameter.data
            parameter.data = moved.contiguous()
        self._is_dense = not self._is_dense


def _fitting(name: str, by_name: Mapping[str, nn.Parameter], value: Tensor) -> nn.Parameter:
    parameter = by_name.get(name)
    if parameter is None:
        raise ShapeError(
            f"weights name {name!r}, which is no parameter of this model; names are those of its state dict"
        )
    if value.shape != parameter.shape:
        raise ShapeError(f"the weight {name} has shape {tuple(value.shape)}, the model needs {tuple(parameter.shape)}")
    if not (value.is_floating_point() and parameter.is_floating_point()):
        raise ShapeError(
            f"the weight {name} is {value.dtype}, the model's {parameter.dtype}; only floating-point weights can be "
            "replaced: load the model unquantised"
        )
    if not value.is_meta and not torch.isfinite(value).all():
        raise ShapeError(f"the weight {name} holds values that are not finite")
    return parameter


def _refuse_half_of_a_tie(by_name: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    for name in weights:
        for other, parameter in by_name.items():
            if other == name or parameter is not by_name[name]:
                continue
            if other not in weights or not torch.equal(weights[other], weights[name]):
                raise ShapeError(
                    f"{name} is tied to {other}, so replacing one alone changes both; give both the same values, or "
                    "untie them first"
                )
