"""Zeros in the channels of skipped groups: the oracle, in plain PyTorch."""

import torch


def clear_skipped_reference(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values` with skipped groups at zero, leaving the original as it is; arguments as in `clear_skipped`."""
    grouped = values.unflatten(-1, (mask.shape[-1], -1))
    # Selected, not multiplied: skipped channels may hold anything, and 0 * NaN is NaN.
    return torch.where(mask.unsqueeze(-1), grouped, 0).flatten(-2)
