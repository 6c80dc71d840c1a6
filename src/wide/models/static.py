"""What runs the same for every token: constant scales of heads and channels, and half-layers that are left out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wide.models.router import RoutingControl


class StaticGate(nn.Module):
    """Multiplies the units of one half-layer by constants, at the places where routers' masks enter.

    `scale` is a parameter without gradient. A method that learns scales switches its gradient on (or puts another
    parameter in its place) and may set `transform`, which then maps the scales to the factors that are applied.

    Args:
        scale: A factor per unit `[units]`; kept as float32.
        control: Shared by all gates and routers of the model.
        layer_index: Decoder layer, from 0.
        half: 'attention' or 'ffn'.
        device: Where the scales live.
    """

    def __init__(
        self,
        scale: Tensor,
        *,
        control: RoutingControl,
        layer_index: int,
        half: str,
        device: torch.device | None = None,
    ) -> None:
        """Copy the scales."""
        super().__init__()
        values = scale.detach().to(device=device, dtype=torch.float32, copy=True)
        self.scale = nn.Parameter(values, requires_grad=False)
        self.transform: Callable[[Tensor], Tensor] | None = None
        self.control = control
        self.layer_index = layer_index
        self.half_layer = half
        self.mask: Tensor | None = None

    def factors(self) -> Tensor:
        """Return what the units are multiplied by, float32 `[units]`, with gradient where `scale` has one."""
        scale = self.scale.float()
        return scale if self.transform is None else self.transform(scale)

    def prepare(self, _hidden: Tensor) -> None:
        """Keep the factors until they are taken."""
        self.mask = self.factors() if self.control.enabled else None

    def take(self) -> Tensor | None:
        """Hand the pending factors over, once."""
        mask, self.mask = self.mask, None
        return mask


class SkipOutput:
    """A forward hook on a sub-layer: its output is zero.

    The sub-layer runs all the same, so that caches keep the length of the sequence.

    Args:
        control: Shared by all gates and routers of the model.
    """

    def __init__(self, control: RoutingControl) -> None:
        """Follow this control."""
        self.control = control

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Return zeros in the place of the hidden states."""
        return output if not self.control.enabled else with_hidden(output, torch.zeros_like(hidden_of(output)))


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states of a sub-layer's output, which may carry attention weights as well."""
    hidden = output[0] if isinstance(output, tuple) else output
    assert isinstance(hidden, Tensor)
    return hidden


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """Return a sub-layer's output with other hidden states."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
