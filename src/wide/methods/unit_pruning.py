"""Prunes units (heads, channels) of one output projection at the least output error, to any number of removed units.

Source: Li et al., "Týr-the-Pruner: Structural Pruning LLMs via Global Sparsity Distribution Optimization", NeurIPS
2025; the three scores are the released code's, the paper's and the exact one.
"""

from typing import Literal

import torch
from torch import Tensor

from wide.methods.second_order import (
    curvature_of_units,
    damped,
    inverse,
    remove_rows,
    restricted_least_squares,
)

Score = Literal["reference_signed", "paper_abs", "exact_obs"]


def unit_scores(score: Score, inverse_gram: Tensor, rows: Tensor, moments: Tensor, unit_size: int) -> Tensor:
    """Return how much each unit matters; the least goes first.

    Args:
        score: 'exact_obs' is the loss increase of removing the unit, `1/2 tr(B_g^T (H^-1_gg)^-1 B_g)`;
            'reference_signed' is `<B_g, G_g>` plus that; 'paper_abs' is `|<B_p, G_p>| + |B_p|^2 / (2 H^-1_pp)` per
            channel p, averaged over the unit.
        inverse_gram: `H^-1` of the channels that are left, `[C, C]`.
        rows: Their weights B, `[C, M]`.
        moments: Their rows of `G = H B` of the unpruned matrix, `[C, M]`.
        unit_size: Channels in a unit.

    Returns:
        `[C / unit_size]`.
    """
    if score == "paper_abs":
        first = (rows * moments).sum(1).abs()
        return (first + curvature_of_units(inverse_gram, rows, 1) / 2).unflatten(0, (-1, unit_size)).mean(1)
    second = curvature_of_units(inverse_gram, rows, unit_size) / 2
    if score == "exact_obs":
        return second
    return (rows * moments).sum(1).unflatten(0, (-1, unit_size)).sum(1) + second


class UnitPruner:
    """One output projection with the second moments of its inputs, factored once for all levels of sparsity.

    Args:
        weight: `[out, in]`, any floating dtype; what is computed has the dtype of `gram`.
        gram: Sum of `x^T x` over the inputs, `[in, in]`, float32 or float64.
        unit_size: Consecutive input channels in a unit; divides `in`.
        damping: Share of the mean diagonal added to the diagonal.

    Raises:
        ConfigError: If the inputs' products are singular despite the damping.
    """

    def __init__(self, weight: Tensor, gram: Tensor, *, unit_size: int, damping: float) -> None:
        """Factor the inputs' products."""
        self._weight = weight
        self._unit_size = unit_size
        rows = weight.detach().T.to(gram.dtype)
        self._rows = torch.where(gram.diagonal().unsqueeze(1) == 0, 0.0, rows)
        self._gram = damped(gram, damping)
        self._inverse = inverse(self._gram)
        self._moments = self._gram @ self._rows

    @property
    def num_units(self) -> int:
        """Units of the projection."""
        return len(self._rows) // self._unit_size

    def prune(self, removed: int, *, rounds: int, score: Score) -> tuple[Tensor, Tensor]:
        """Remove units; the others take over what they can, by restricted least squares.

        Args:
            removed: Units to remove, in [0, num_units].
            rounds: Times the units are ranked anew on the way.
            score: How they are ranked.

        Returns:
            The weight `[out, in]` in its own dtype with zero columns, and which units are kept, bool `[units]`.
        """
        kept = torch.ones(self.num_units, dtype=torch.bool, device=self._rows.device)
        if removed == 0:
            return self._weight.detach().clone(), kept
        if removed == self.num_units:
            return torch.zeros_like(self._weight), ~kept
        inverse_gram, rows = self._inverse, self._rows
        rounds = min(rounds, removed)
        for number in range(rounds):
            count = removed * (number + 1) // rounds - removed * number // rounds
            moments = self._moments[self._channels(kept)]
            scores = unit_scores(score, inverse_gram, rows, moments, self._unit_size)
            going = torch.zeros_like(scores, dtype=torch.bool)
            going[scores.argsort(stable=True)[:count]] = True
            kept[kept.nonzero().squeeze(1)[going]] = False
            if number + 1 < rounds:
                inverse_gram, rows = remove_rows(inverse_gram, rows, self._channels(going))
        channels = self._channels(kept)
        result = torch.zeros_like(self._rows)
        result[channels] = restricted_least_squares(self._gram, self._moments, channels)
        return result.T.to(self._weight.dtype).contiguous(), kept

    def _channels(self, units: Tensor) -> Tensor:
        return units.repeat_interleave(self._unit_size)
