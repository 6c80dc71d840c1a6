"""Routing decisions of one forward pass, as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(kw_only=True, slots=True)
class LayerRouting:
    """Which groups each token executes in one decoder layer.

    Masks are `[B, T, N_G]`, True (or 1.0 in training) where the group executes; None where a sublayer is not routed.
    Margins are `[B, T, N_G]`, float32: execute logit minus skip logit.
    """

    attention: Tensor | None = None
    ffn: Tensor | None = None
    attention_margin: Tensor | None = None
    ffn_margin: Tensor | None = None

    def __repr__(self) -> str:
        told = (
            f"{name} {list(mask.shape)}, {mask.float().mean().item():.0%} executed"
            for name, mask in (("attention", self.attention), ("ffn", self.ffn))
            if mask is not None
        )
        return f"LayerRouting({'; '.join(told)})"


Routing = Sequence[LayerRouting]
"""One entry per decoder layer, first layer first."""
