"""Routers: the oracle, in plain PyTorch."""

import torch

from wide.kernels.rms_norm.reference import rms_norm_reference


def margins(x: torch.Tensor, down: torch.Tensor, difference: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
    """Return execute logit minus skip logit, float32 [M, N_G].

    Args:
        x: Rows, [M, D], of the dtype of `down`.
        down: Bottleneck matrix, [r, D] in float32, or [2 * r, D] in half precision: two parts, whose sum it is.
        difference: Execute row minus skip row of the second matrix, float32 [N_G, r].
        offset: Execute bias minus skip bias, float32 [N_G]; None without bias.
    """
    rank = difference.shape[1]
    whole = down.float().view(-1, rank, down.shape[1]).sum(0)
    found = x.float() @ whole.t() @ difference.t()
    return found if offset is None else found + offset


def route_reference(
    x: torch.Tensor, down: torch.Tensor, difference: torch.Tensor, offset: torch.Tensor | None, *, threshold: float
) -> torch.Tensor:
    """Return which rows execute which groups: those whose margin reaches the threshold, bool [M, N_G].

    Args:
        x: As of `margins`.
        down: As of `margins`.
        difference: As of `margins`.
        offset: As of `margins`.
        threshold: In logits.
    """
    return margins(x, down, difference, offset) >= threshold


def norm_route_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    down: torch.Tensor,
    difference: torch.Tensor,
    offset: torch.Tensor | None,
    *,
    addend: torch.Tensor | None,
    threshold: float,
    eps: float,
    unit_offset: bool,
    reads_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, then decide; arguments as in `norm_route`."""
    total, normed = rms_norm_reference(x, weight, addend=addend, eps=eps, unit_offset=unit_offset)
    mask = route_reference(total if reads_residual else normed, down, difference, offset, threshold=threshold)
    return total, normed, mask
