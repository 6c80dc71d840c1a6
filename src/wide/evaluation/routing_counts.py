"""Counts of one half-layer's routing decisions, from which rates, correlations and stability follow."""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LAG = 16
"""Furthest token that a decision is compared with, in tokens."""
MAX_DISTANCE = 32
"""Furthest neighbours whose correlation is averaged, in groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """How two binary variables went together, for several pairs of variables at once.

    Args:
        total: Observations of each pair, float64.
        first: Of those, the first variable was True.
        second: Of those, the second variable was True.
        both: Of those, both were True.
    """

    total: Tensor
    first: Tensor
    second: Tensor
    both: Tensor

    def phi(self) -> Tensor:
        """Return the phi coefficients in [-1, 1], NaN where a variable never changes."""
        covariance = self.total * self.both - self.first * self.second
        spread = self.first * (self.total - self.first) * self.second * (self.total - self.second)
        return torch.where(spread > 0, covariance / spread.clamp(min=1).sqrt(), torch.nan)

    def same(self) -> Tensor:
        """Return the share of observations in which the two are equal."""
        return (self.total - self.first - self.second + 2 * self.both) / self.total

    def same_by_chance(self) -> Tensor:
        """Return the share that would be equal if the two were independent, at the same rates."""
        first, second = self.first / self.total, self.second / self.total
        return first * second + (1 - first) * (1 - second)


class HalfCounter:
    """Sums over the masks of one half-layer, on their device, exact.

    Args:
        num_groups: Groups of the half, N_G.
        device: Of the masks.
    """

    def __init__(self, num_groups: int, device: torch.device) -> None:
        """Start at zero."""
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._together = torch.zeros(num_groups, num_groups, dtype=torch.int64, device=device)
        self._lags = torch.zeros(MAX_LAG, 3, num_groups, dtype=torch.int64, device=device)
        self._pairs = torch.zeros(MAX_LAG, dtype=torch.int64, device=device)

    def add(self, mask: Tensor, valid: Tensor) -> None:
        """Count one forward.

        Args:
            mask: bool `[B, T, N_G]`.
            valid: bool `[B, T]`, False for padding.
        """
        executed = mask & valid.unsqueeze(-1)
        flat = executed.flatten(0, 1).float()
        # Sums of zeros and ones are exact in float32 up to 2^24 tokens of one forward.
        self._together += (flat.t() @ flat).round().long()
        self._tokens += valid.sum()
        for lag in range(1, min(MAX_LAG, mask.shape[1] - 1) + 1):
            known = valid[:, lag:] & valid[:, :-lag]
            earlier, later = executed[:, :-lag] & known.unsqueeze(-1), executed[:, lag:] & known.unsqueeze(-1)
            sums = [part.sum((0, 1)) for part in (earlier, later, earlier & later)]
            self._lags[lag - 1] += torch.stack(sums)
            self._pairs[lag - 1] += known.sum()

    def rates(self) -> Tensor:
        """Return the share of tokens that execute each group, float64 `[N_G]` on the CPU."""
        return self._together.diagonal().cpu().double() / int(self._tokens)

    def between_groups(self) -> Pairs:
        """Return how each two groups go together in a token, `[N_G, N_G]`."""
        together = self._together.cpu().double()
        single = together.diagonal()
        total = torch.full_like(together, int(self._tokens))
        return Pairs(
            total=total,
            first=single[:, None].expand_as(together),
            second=single.expand_as(together),
            both=together,
        )

    def between_tokens(self) -> Pairs:
        """Return how a group's decisions at 1 to `MAX_LAG` tokens' distance go together, `[lags seen, N_G]`."""
        pairs = self._pairs.cpu().double()
        sums = self._lags.cpu().double()[pairs > 0]
        total = pairs[pairs > 0].unsqueeze(-1).expand(-1, sums.shape[-1])
        return Pairs(total=total, first=sums[:, 0], second=sums[:, 1], both=sums[:, 2])


def mean_by_distance(matrix: Tensor) -> list[float | None]:
    """Return the mean of a square matrix's entries at |i - j| = 1, 2, ... up to `MAX_DISTANCE`.

    Args:
        matrix: `[N_G, N_G]`, NaN where not defined.

    Returns:
        One value per distance, None where no entry is defined.
    """
    last = min(MAX_DISTANCE, matrix.shape[0] - 1)
    return [mean_of_defined(matrix.diagonal(distance)) for distance in range(1, last + 1)]


def mean_of_defined(values: Tensor) -> float | None:
    """Return the mean of what is not NaN, None if nothing is left."""
    defined = values[~values.isnan()]
    return float(defined.mean()) if defined.numel() else None
