"""What the routers of a model decide while it is judged: masks by sublayer, and a tape that compares two runs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from wide.errors import EvaluationError
from wide.models.cost import SkipCounter
from wide.routing import Routing

HALVES = ("attention", "ffn")


def masks_of(routing: Routing) -> Iterator[tuple[int, str, Tensor]]:
    """Yield layer, 'attention' or 'ffn', and bool mask `[B, T, N_G]` of each routed sublayer."""
    for layer, found in enumerate(routing):
        for half in HALVES:
            mask = getattr(found, half)
            if mask is not None:
                yield layer, half, mask.bool()


class RoutingTape(SkipCounter):
    """Counts what is skipped and keeps every decision on the host, eight to a byte, to compare two runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._bits: list[Any] = []
        self._decisions = 0

    def add(self, routing: Routing, valid: Tensor | None = None) -> None:
        """Keep a forward's decisions on valid tokens, bool `[B, T]`, too."""
        super().add(routing, valid)
        for _, _, mask in masks_of(routing):
            chosen = mask if valid is None else mask[valid]
            self._bits.append(np.packbits(chosen.cpu().numpy()))
            self._decisions += chosen.numel()

    def flip_rate(self, other: "RoutingTape") -> float:
        """Return the share of decisions that differ from those of another run over the same tokens.

        Raises EvaluationError if the two did not see the same number of decisions.
        """
        if [len(bits) for bits in self._bits] != [len(bits) for bits in other._bits]:
            raise EvaluationError("the two runs routed different tokens or groups; compare runs over the same text")
        pairs = zip(self._bits, other._bits, strict=True)
        flipped = sum(int(np.unpackbits(ours ^ theirs).sum()) for ours, theirs in pairs)
        return flipped / self._decisions if self._decisions else 0.0
