"""What a forward of the engine is given besides tokens and keys."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wide.inference.operators.table import OperatorTable
from wide.inference.reading.weights import LayerWeights, Sublayer

LayerMasks = Sequence[tuple[Tensor | None, Tensor | None]]
"""For each layer the attention mask and the FFN mask, bool [tokens, N_G]; None leaves the half to its router."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardOptions:
    """Options of a forward.

    Args:
        routed: Whether routers decide and operators skip; otherwise everything is dense and no router runs.
        table: Which operator skips at which size, in place of the decoder's own tables; None = those.
        forced: Masks that replace the routers' decisions; the routers run all the same, so that their time counts.
            Made with `force`.
        record: Filled with each layer's (attention, FFN) masks in use; None = not wanted.
    """

    routed: bool = True
    table: OperatorTable | None = None
    forced: LayerMasks | None = None
    record: list[tuple[Tensor | None, Tensor | None]] | None = None


def force(layers: Sequence[LayerWeights], masks: LayerMasks) -> LayerMasks:
    """Return masks with the always-executing groups that the engine's routers add."""
    return [
        (_extend(layer.attention, attention), _extend(layer.ffn, ffn))
        for layer, (attention, ffn) in zip(layers, masks, strict=True)
    ]


def _extend(part: Sublayer | None, mask: Tensor | None) -> Tensor | None:
    router = None if part is None else part.router
    if mask is None or router is None or router.extra == 0:
        return mask
    return torch.cat((mask, mask.new_ones(mask.shape[0], router.extra)), 1)
