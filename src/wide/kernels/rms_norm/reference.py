"""Residual addition and RMSNorm: the oracle, in plain PyTorch."""

import torch


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round where transformers' LlamaRMSNorm (or Gemma's, with `unit_offset`) rounds; arguments as in `rms_norm`."""
    total = x if addend is None else x + addend
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return total, (scaled * (1.0 + weight.float())).to(x.dtype)
    return total, weight * scaled.to(x.dtype)
