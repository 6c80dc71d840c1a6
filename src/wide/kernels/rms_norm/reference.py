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
    """Round where transformers' LlamaRMSNorm (or Gemma's, with `unit_offset`) rounds; arguments as in `rms_norm`.

    Without an addend the first result is empty: an operator's output must not alias its input.
    """
    total = x if addend is None else x + addend
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (scaled * (1.0 + weight.float())).to(x.dtype) if unit_offset else weight * scaled.to(x.dtype)
    return (x.new_empty(0) if addend is None else total), normed
