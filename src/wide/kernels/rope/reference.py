"""Rotary position embedding that also fills the KV cache: the oracle, in plain PyTorch."""

import torch

from wide.kernels.rms_norm.reference import rms_norm_reference


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
    places: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    interleaved: bool = False,
) -> torch.Tensor:
    """Round where transformers rounds; arguments as in `rope_to_cache`. Skipped heads are turned all the same."""
    del mask
    batch, length = q.shape[:2]
    angles = positions.long()[:, None] + torch.arange(length, device=q.device)
    c, s = cos[angles].unsqueeze(2), sin[angles].unsqueeze(2)
    rows = torch.arange(batch, device=q.device)[:, None].expand_as(angles)
    if places is not None:
        rows, angles = torch.zeros_like(rows), places.view(batch, length)
    k_cache[rows, angles] = rotate(_norm(k, k_norm, eps, unit_offset), c, s, interleaved=interleaved)
    v_cache[rows, angles] = v
    return rotate(_norm(q, q_norm, eps, unit_offset), c, s, interleaved=interleaved)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Return heads [..., d] with their first r channels turned by cosines [..., r], in whose dtype that is computed.

    Interleaved pairs are two neighbours, not channels i and i + r / 2.
    """
    width = cos.shape[-1]
    if width == 0:
        return heads.clone()
    turned, rest = heads[..., :width], heads[..., width:]
    if interleaved:
        turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    first, second = turned.chunk(2, -1)
    turned = (turned * cos + torch.cat((-second, first), -1) * sin).to(heads.dtype)
    if interleaved:
        turned = turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat((turned, rest), -1)


def _norm(heads: torch.Tensor, weight: torch.Tensor | None, eps: float, unit_offset: bool) -> torch.Tensor:
    if weight is None:
        return heads
    return rms_norm_reference(heads, weight, eps=eps, unit_offset=unit_offset)[1]
