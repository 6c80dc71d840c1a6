"""Second-order pruning of a linear map: the curvature of its squared output error, and what follows from it.

For `y = x B` with inputs x, removing rows of B changes the outputs by `tr(dB^T H dB)` with the Gram matrix `H = sum x^T
x`. All functions compute in the dtype of what they are given, float32 or float64.
"""

import torch
from torch import Tensor

from wide.errors import ConfigError


class GramAccumulator:
    """Sums `x^T x` over all tokens: `matrix` `[C, C]` in `dtype`."""

    def __init__(self, width: int, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.matrix = torch.zeros(width, width, device=device, dtype=dtype)

    def add(self, inputs: Tensor) -> None:
        """Add tokens `[..., C]` of any floating dtype."""
        flat = inputs.detach().flatten(0, -2).to(self.matrix.dtype)
        self.matrix.addmm_(flat.T, flat)


def damped(gram: Tensor, share: float) -> Tensor:
    """Return `gram` `[C, C]` with `share` of its mean diagonal added to the diagonal."""
    result = gram.clone()
    result.diagonal().add_(share * gram.diagonal().mean())
    return result


def cholesky_factor(matrix: Tensor) -> Tensor:
    """Return the lower Cholesky factor of `matrix` `[..., C, C]`.

    Raises ConfigError if it is not positive definite, which more damping or more calibration text cures.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed.any()):
        raise ConfigError(
            f"a matrix of input products of size {matrix.shape[-1]} is not positive definite in {matrix.dtype}; raise "
            "the method's damping (0.01 is usual) or give more calibration text"
        )
    return factor


def inverse(gram: Tensor) -> Tensor:
    """Return the inverse of a positive definite `[C, C]`; raises ConfigError if it is not."""
    return torch.cholesky_inverse(cholesky_factor(gram))


def curvature_of_units(inverse_gram: Tensor, weights: Tensor, unit_size: int) -> Tensor:
    """Return `tr(B_g^T (H^-1_gg)^-1 B_g)` of every unit g, `[C / unit_size]`: twice the least error of its removal.

    `inverse_gram` is `H^-1`, `[C, C]`, and `weights` B, `[C, M]`; a unit is `unit_size` consecutive rows.
    """
    if unit_size == 1:
        return weights.square().sum(1) / inverse_gram.diagonal()
    units = len(weights) // unit_size
    grid = inverse_gram.reshape(units, unit_size, units, unit_size)
    own = grid.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    rows = weights.reshape(units, unit_size, -1)
    return (rows * torch.cholesky_solve(rows, cholesky_factor(own))).sum((1, 2))


def remove_rows(inverse_gram: Tensor, weights: Tensor, removed: Tensor) -> tuple[Tensor, Tensor]:
    """Remove rows (True in bool `[C]`) at the least output error: the others take over what they can.

    Of the inverse Gram matrix `[C, C]` and the weights `[C, M]`, return those of the kept rows, `[C', C']` and `[C',
    M]`.
    """
    kept = ~removed
    own = cholesky_factor(inverse_gram[removed][:, removed])
    cross = inverse_gram[kept][:, removed]
    both = torch.cholesky_solve(torch.cat([weights[removed], cross.T], dim=1), own)
    takeover, overlap = both.split([weights.shape[1], len(cross)], dim=1)
    return inverse_gram[kept][:, kept] - cross @ overlap, weights[kept] - cross @ takeover


def restricted_least_squares(gram: Tensor, moments: Tensor, kept: Tensor) -> Tensor:
    """Return the weights of the kept rows that come closest to the outputs of all rows, `H_kk^-1 G_k`, `[C', M]`.

    `gram` is H, `[C, C]`, and `moments` `G = H B` with the weights B of all rows, `[C, M]`; `kept` is bool `[C]`.
    """
    return torch.cholesky_solve(moments[kept], cholesky_factor(gram[kept][:, kept]))


def unit_scores(inverse_gram: Tensor, rows: Tensor, moments: Tensor, unit_size: int) -> Tensor:
    """Return how much each unit matters, `[C / unit_size]`; the least goes first.

    It is `<B_g, G_g> + 1/2 tr(B_g^T (H^-1_gg)^-1 B_g)`, the first-order plus the second-order term of the released
    code; the paper takes the first one absolute. `H^-1` is of the channels that are left, `[C, C]`, as are the rows of
    B and of `G = H B` of the unpruned matrix, `[C, M]`.
    """
    second = curvature_of_units(inverse_gram, rows, unit_size) / 2
    return (rows * moments).sum(1).unflatten(0, (-1, unit_size)).sum(1) + second


class UnitPruner:
    """One output projection with the second moments of its inputs, factored once for all levels of sparsity.

    Args:
        weight: `[out, in]`, any floating dtype; what is computed has the dtype of `gram`.
        gram: Sum of `x^T x` over the inputs, `[in, in]`, float32 or float64.
        unit_size: Consecutive input channels in a unit (a head, a channel); divides `in`.
        damping: Share of the mean diagonal added to the diagonal.
    """

    def __init__(self, weight: Tensor, gram: Tensor, *, unit_size: int, damping: float) -> None:
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

    def prune(self, removed: int, *, rounds: int) -> tuple[Tensor, Tensor]:
        """Remove units, ranked anew in each round; the others take over what they can, by restricted least squares.

        Return the weight `[out, in]` in its own dtype with zero columns, and which units are kept, bool `[units]`.
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
            scores = unit_scores(inverse_gram, rows, moments, self._unit_size)
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
