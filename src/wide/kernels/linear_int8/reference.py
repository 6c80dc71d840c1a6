"""Products of int8 weights in plain PyTorch, and rows in int8."""

import torch

from wide.kernels.gemm_mn.reference import activate
from wide.kernels.int8 import LARGEST, LEAST, rotated


def expand_int8_reference(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return weight times scale; arguments as in `expand_int8`."""
    return (weight * scale[:, None]).to(dtype)


def quantise_rows_reference(
    x: torch.Tensor, mask: torch.Tensor | None, rotation: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row by its largest value that counts; arguments as in `quantise_rows`."""
    values = x.float()
    if mask is not None:
        values = torch.where(mask.repeat_interleave(x.shape[1] // mask.shape[1], 1), values, 0.0)
    values = rotated(values, rotation)
    peak = values.abs().amax(1).clamp_min(LARGEST * LEAST)
    # A division of tensors is exact on every device; one of a number multiplies by the inverse.
    factor = torch.full_like(peak, LARGEST) / peak
    return (values * factor[:, None]).round_().to(torch.int8), peak * (1 / LARGEST)


def linear_int8_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    gate: str | None = None,
) -> torch.Tensor:
    """Multiply in float32; arguments as in `linear_int8`."""
    product = x.float() @ weight.float().t() * scale
    product = product if x_scale is None else product * x_scale[:, None]
    product = product if bias is None else product + bias.float()
    if gate is not None:
        first, second = product.chunk(2, 1)
        product = activate(first, gate) * second
    return product.to(dtype or x.dtype)
