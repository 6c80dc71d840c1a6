"""GEMMs of one to four rows, as they occur in decoding: the oracle, in plain PyTorch."""

import torch
from torch.nn.functional import linear

from wide.kernels.gemm_mn.reference import activate


def gemv_mn_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    up_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str = "none",
    zero_skipped: bool = True,
    scale: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute every channel, then keep what executes and zero the rest; arguments as in `gemv_mn`."""
    del zero_skipped
    values = activate(_product(x, weight, bias, scale), activation)
    if up_weight is not None:
        values = values * _product(x, up_weight, up_bias, up_scale)
    if mask is not None:
        values = torch.where(mask.repeat_interleave(weight.shape[0] // mask.shape[1], 1), values, 0.0)
    return values.to(x.dtype)


def gemv_k_reference(
    h: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Zero what is skipped, then multiply by every channel; arguments as in `gemv_k`."""
    # Skipped channels may hold anything, and 0 * NaN is NaN.
    executes = mask.repeat_interleave(h.shape[1] // mask.shape[1], 1)
    return _product(torch.where(executes, h, 0.0), weight, bias, scale).to(h.dtype)


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None
) -> torch.Tensor:
    product = linear(x.float(), weight.float())
    product = product if scale is None else product * scale
    return product if bias is None else product + bias.float()
