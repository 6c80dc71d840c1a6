"""Rotary position embedding that also fills the KV cache: the oracle, in plain PyTorch."""

import torch


def rope_to_cache_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Round where transformers rounds; arguments as in `rope_to_cache`. Skipped heads are turned all the same."""
    del mask
    batch, length = q.shape[:2]
    places = positions.long()[:, None] + torch.arange(length, device=q.device)
    c, s = cos[places].unsqueeze(2), sin[places].unsqueeze(2)
    rows = torch.arange(batch, device=q.device)[:, None].expand_as(places)
    k_cache[rows, places] = _rotate(_norm(k, k_norm, eps), c, s)
    v_cache[rows, places] = v
    return _rotate(_norm(q, q_norm, eps), c, s)


def _norm(heads: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return heads
    wide = heads.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(heads.dtype)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin
