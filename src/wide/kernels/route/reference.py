"""Routers: the oracle, in plain PyTorch."""

import torch

from wide.kernels.rms_norm.reference import rms_norm_reference
from wide.kernels.route.weights import RouteWeights


def margins(x: torch.Tensor, weights: RouteWeights) -> torch.Tensor:
    """Return execute logit minus skip logit, float32 [M, N_G], of rows [M, D]."""
    down, difference, offset, _ = weights
    whole = down.float().view(-1, difference.shape[1], down.shape[1]).sum(0)
    found = x.float() @ whole.t() @ difference.t()
    return found if offset is None else found + offset


def route_reference(
    x: torch.Tensor,
    weights: RouteWeights,
    *,
    overlaps: bool = False,
    padding: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return which rows execute which groups, bool [M, N_G]; arguments as in `route`."""
    del overlaps
    mask = margins(x, weights) >= 0
    real = torch.ones(len(x), dtype=torch.bool, device=x.device) if padding is None else ~padding
    mask &= real[:, None]
    if counts is not None:
        counts += torch.stack((mask.sum(), real.sum()))
    return mask


def norm_route_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    weights: RouteWeights,
    *,
    addend: torch.Tensor | None,
    eps: float,
    unit_offset: bool,
    reads_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, then decide; arguments as in `norm_route`."""
    total, normed = rms_norm_reference(x, weight, addend=addend, eps=eps, unit_offset=unit_offset)
    summed = x if addend is None else total
    return total, normed, route_reference(summed if reads_residual else normed, weights)
