"""Routing decisions of a whole evaluation, kept bit by bit, to be compared with those of another path."""

from typing import Any

import numpy as np
from torch import Tensor, nn

from wide.errors import EvaluationError
from wide.evaluation.inference import SkipMeter


class RoutingTape(SkipMeter):
    """Counts what is skipped and keeps every decision on the host, eight to a byte.

    Args:
        model: An attached model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Start empty."""
        super().__init__(model)
        self._bits: list[Any] = []
        self._decisions = 0

    def add(self, valid: Tensor) -> None:
        """Keep the latest forward's decisions on valid tokens, bool `[B, T]`."""
        super().add(valid)
        for layer in self._routing:
            for mask in (layer.attention, layer.ffn):
                if mask is None:
                    continue
                chosen = mask.bool()[valid]
                self._bits.append(np.packbits(chosen.cpu().numpy()))
                self._decisions += chosen.numel()

    def flip_rate(self, other: "RoutingTape") -> float:
        """Return the share of decisions that differ from those of another run over the same tokens.

        Raises:
            EvaluationError: If the two did not see the same number of decisions.
        """
        sizes = [[len(bits) for bits in tape._bits] for tape in (self, other)]
        if sizes[0] != sizes[1]:
            raise EvaluationError("the two runs routed different tokens or groups; compare runs over the same text")
        flipped = sum(
            int(np.unpackbits(ours ^ theirs).sum()) for ours, theirs in zip(self._bits, other._bits, strict=True)
        )
        return flipped / self._decisions if self._decisions else 0.0
