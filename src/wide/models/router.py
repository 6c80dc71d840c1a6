"""The bottleneck router: hidden states to per-group decisions (paper, section 3.1)."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from wide.errors import ShapeError
from wide.plan import Routed
from wide.routing import LayerRouting

EXECUTE, SKIP = 0, 1


class Prefill(NamedTuple):
    """What the coming forward over several tokens stands on.

    Args:
        past: Tokens in the cache before it.
        starts: First real token of each left-padded sequence, int32 `[B]`; None without padding.
    """

    past: int
    starts: Tensor | None


class RoutingControl:
    """What all routers of one model share: mode, temperature, forced masks and the observer of the next forward.

    The trainer and the context managers of `wide.models.observe` write it; nothing counts steps inside a forward,
    because gradient checkpointing runs forwards twice.

    Args:
        num_layers: Decoder layers of the model.
    """

    def __init__(self, num_layers: int) -> None:
        """Start enabled, at temperature 1, observed by nobody."""
        self.num_layers = num_layers
        self.enabled = True
        self.temperature = 1.0
        self.observed: list[LayerRouting] | None = None
        self.keep_history = False
        self.forced: list[LayerRouting] | None = None
        self.forced_position: dict[tuple[int, str], int] = {}
        self.prefill: Prefill | None = None


class Router(nn.Module):
    """Decides for each token which groups of one half-layer execute.

        R = reshape(X W1 W2), class 0 executes, class 1 skips

    Parameters are float32 whatever the base model's dtype. In training mode the mask is a hard Gumbel-softmax sample
    with straight-through gradient; in evaluation mode it is `margin >= threshold`, and a threshold of 0 is the
    paper's argmax with ties executing.

    Args:
        hidden_size: Channels of the input, D.
        routed: Groups, rank and options.
        control: Shared by all routers of the model.
        layer_index: Decoder layer, from 0.
        half: 'attention' or 'ffn'.
        device: Where the parameters live.

    While a model is optimised, `fused` of an attention router is the layer's fused execution, which takes the mask in
    place of the gate.

    Source: paper, section 3.1 (routing components); initialisation: Kaiming-uniform with gain 1 on both matrices.
    """

    def __init__(
        self,
        hidden_size: int,
        routed: Routed,
        *,
        control: RoutingControl,
        layer_index: int,
        half: str,
        device: torch.device | None = None,
    ) -> None:
        """Allocate and initialise the two matrices."""
        super().__init__()
        num_groups = routed.grouping.num_groups
        self.num_groups = num_groups
        self.layer_index = layer_index
        self.half_layer = half
        self.reads_residual = routed.router_input == "residual"
        self.down = nn.Parameter(torch.empty(routed.rank, hidden_size, dtype=torch.float32, device=device))
        self.up = nn.Parameter(torch.empty(2 * num_groups, routed.rank, dtype=torch.float32, device=device))
        self.bias = (
            nn.Parameter(torch.empty(2 * num_groups, dtype=torch.float32, device=device)) if routed.bias else None
        )
        self.threshold = 0.0
        self.control = control
        self.residual: Tensor | None = None
        self.mask: Tensor | None = None
        self.fused: Any = None
        self.reset_parameters()

    def reset_parameters(self, execute_bias: float = 0.0) -> None:
        """Draw new weights; `execute_bias` is the initial margin in logits (needs a bias)."""
        with torch.no_grad():
            for weight in (self.down, self.up):
                bound = math.sqrt(3.0 / weight.shape[1])
                weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.zero_()
                self.bias.view(self.num_groups, 2)[:, EXECUTE] = execute_bias

    def logits(self, hidden: Tensor) -> Tensor:
        """Return router logits `[..., N_G, 2]`, float32, from hidden states `[..., D]` of any dtype."""
        with torch.autocast(hidden.device.type, enabled=False):
            bottleneck = functional.linear(hidden.float(), self.down.float())
            logits = functional.linear(bottleneck, self.up.float(), None if self.bias is None else self.bias.float())
        return logits.unflatten(-1, (self.num_groups, 2))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the mask `[..., N_G]` for hidden states `[..., D]`: float32 in training, bool in evaluation."""
        logits = self.logits(hidden)
        margin = logits[..., EXECUTE] - logits[..., SKIP]
        if self.control.forced is not None:
            mask = self._forced_mask(margin)
        elif self.training:
            mask = functional.gumbel_softmax(logits, tau=self.control.temperature, hard=True)[..., EXECUTE]
        else:
            mask = margin >= self.threshold
        if self.control.observed is not None:
            self._observe(self.control.observed[self.layer_index], mask, margin)
        return mask

    def route(self, hidden: Tensor) -> None:
        """Decide for the coming sub-layer and keep the mask until a gate takes it."""
        if not self.control.enabled:
            self.mask = None
            return
        if self.reads_residual and self.residual is not None:
            hidden, self.residual = self.residual, None
        self.mask = self(hidden)

    def take(self) -> Tensor | None:
        """Hand the pending mask to the gate, once."""
        mask, self.mask = self.mask, None
        return mask

    def _forced_mask(self, margin: Tensor) -> Tensor:
        assert self.control.forced is not None
        mask = getattr(self.control.forced[self.layer_index], self.half_layer)
        if mask is None:
            return margin >= self.threshold
        key = (self.layer_index, self.half_layer)
        start = self.control.forced_position.get(key, 0)
        length = margin.shape[-2]
        piece = mask[:, start : start + length]
        if piece.shape != margin.shape:
            raise ShapeError(
                f"forced {self.half_layer} mask of layer {self.layer_index} has shape {tuple(mask.shape)}, used up to "
                f"position {start}; this forward needs {tuple(margin.shape)} [batch, tokens, groups]"
            )
        self.control.forced_position[key] = start + length
        return piece.to(device=margin.device, dtype=margin.dtype if self.training else torch.bool)

    def _observe(self, layer: LayerRouting, mask: Tensor, margin: Tensor) -> None:
        half = self.half_layer
        for name, value in ((half, mask), (f"{half}_margin", margin)):
            earlier = getattr(layer, name) if self.control.keep_history else None
            setattr(layer, name, value if earlier is None else torch.cat([earlier, value], dim=-2))
