"""Base weights that a static method replaces, and the originals beside them."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from wide.errors import ShapeError
from wide.models.pretrained import require_in_memory
from wide.models.router import RoutingControl
from wide.models.sharding import require_unsharded


class ReplacedWeights:
    """Puts other values into base parameters and keeps the originals, bit for bit, on the side.

    The parameters themselves stay the same objects, under LoRA's wrappers too. `weights` are new values by name in the
    model's state dict, cast to the parameter's dtype; `control` says in which threads the originals compute. Raises
    ShapeError if a name is unknown, a shape differs, a value is not finite, or of tied parameters only one is named or
    they are given different values; UnsupportedModelError if the model is sharded or offloaded.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor], control: RoutingControl) -> None:
        require_unsharded(model, "replacing base weights")
        require_in_memory(model, "replacing base weights")
        by_name = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = {name: _fitting(name, by_name, value) for name, value in weights.items()}
        _refuse_half_of_a_tie(by_name, weights)
        self._control = control
        # Tied parameters are one object.
        self._originals = {parameter: parameter.data for parameter in self._parameters.values()}
        for name, parameter in self._parameters.items():
            # Copies, because merging LoRA writes into them.
            value = weights[name].detach().to(device=parameter.device, dtype=parameter.dtype, copy=True)
            parameter.data = value.contiguous()

    def wrap(self, model: nn.Module) -> list[nn.Module]:
        """Let modules compute with their originals in threads that run the dense model; return those modules."""
        having = [each for each in model.modules() if any(p in self for p in each.parameters(recurse=False))]
        for module in having:
            vars(module)["forward"] = partial(self._forward, module)
        return having

    def values(self) -> dict[str, Tensor]:
        """Return copies of the weights that replace, by name, on the CPU."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self._parameters.items()}

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._originals

    def restore(self) -> None:
        """Put the originals back for good."""
        for parameter in self._originals:
            parameter.data = self._original(parameter)

    def _original(self, parameter: nn.Parameter) -> Tensor:
        # The model may have moved, or changed its dtype, since this tensor was in use.
        found = self._originals[parameter].to(device=parameter.device, dtype=parameter.dtype)
        self._originals[parameter] = found
        return found

    def _forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._control.enabled:
            return type(module).forward(module, *args, **kwargs)
        # Other threads may be computing with the module's own weights, so a shallow copy has the originals.
        dense: Any = copy.copy(module)
        own = dict(module.named_parameters(recurse=False))
        vars(dense)["_parameters"] = module._parameters | {
            name: self._original(parameter) for name, parameter in own.items() if parameter in self
        }
        device = next(iter(own.values())).device
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        return type(module).forward(dense, *args, **kwargs)


def _fitting(name: str, by_name: Mapping[str, nn.Parameter], value: Tensor) -> nn.Parameter:
    parameter = by_name.get(name)
    if parameter is None:
        raise ShapeError(
            f"weights name {name!r}, which is no parameter of this model; names are those of its state dict"
        )
    if value.shape != parameter.shape:
        raise ShapeError(f"the weight {name} has shape {tuple(value.shape)}, the model needs {tuple(parameter.shape)}")
    if not (value.is_floating_point() and parameter.is_floating_point()):
        raise ShapeError(f"{name} is {value.dtype}, the model's {parameter.dtype}; wanted floating-point ones")
    if not value.is_meta and not torch.isfinite(value).all():
        raise ShapeError(f"the weight {name} holds values that are not finite")
    return parameter


def _refuse_half_of_a_tie(by_name: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    for name in weights:
        for other, parameter in by_name.items():
            if other == name or parameter is not by_name[name]:
                continue
            if other not in weights or not torch.equal(weights[other], weights[name]):
                raise ShapeError(f"{name} is tied to {other}, so both change; give both the same values, or untie them")
