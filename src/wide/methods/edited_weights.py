"""Weights of a live model that a method replaces while it decides, and that come back bit for bit."""

from collections.abc import Mapping
from types import TracebackType

import torch
from torch import Tensor, nn

from wide.errors import UnsupportedModelError


class EditedWeights:
    """Replaces weights of linear modules in place; leaving the `with` block restores all of them.

    Args:
        model: The model that owns the modules.
    """

    def __init__(self, model: nn.Module) -> None:
        """Look up the names of the model's parameters."""
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._originals: dict[nn.Linear, Tensor] = {}

    def __enter__(self) -> "EditedWeights":
        """Nothing is replaced yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Restore every weight."""
        self.restore()

    def linear(self, module: nn.Module | None, where: str) -> nn.Linear:
        """Return the module as a linear layer whose weight can be replaced.

        Raises:
            UnsupportedModelError: If it is quantised, wrapped by LoRA, or no linear layer at all.
        """
        if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
            raise UnsupportedModelError(
                f"{where} is a {type(module).__name__}; this method rewrites weights and needs a plain nn.Linear of a "
                "floating-point dtype: load the model unquantised and merge LoRA first"
            )
        return module

    def name(self, linear: nn.Linear) -> str:
        """Return the weight's name in the model's state dict."""
        return self._names[id(linear.weight)]

    def original(self, linear: nn.Linear) -> Tensor:
        """Return the weight as it was found, `[out, in]`."""
        return self._originals.get(linear, linear.weight.detach())

    @torch.no_grad()
    def set(self, linear: nn.Linear, weight: Tensor) -> None:
        """Replace a weight.

        Args:
            linear: A module of the model.
            weight: `[out, in]`; brought to the device and dtype of the module.
        """
        if linear not in self._originals:
            self._originals[linear] = linear.weight.detach().clone()
        linear.weight.copy_(weight, non_blocking=True)

    @torch.no_grad()
    def restore(self) -> None:
        """Bring every weight back."""
        for linear, weight in self._originals.items():
            linear.weight.copy_(weight)
        self._originals.clear()

    def replaced(self) -> Mapping[str, Tensor]:
        """Return copies of the weights that are replaced now, by name, on the CPU in the model's dtype."""
        return {self.name(linear): linear.weight.detach().cpu().clone() for linear in self._originals}
