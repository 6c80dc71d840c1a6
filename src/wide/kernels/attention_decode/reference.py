"""Attention of one new token a sequence over a KV cache: the oracle, in plain PyTorch.

Dims: B sequences, T places in the cache, H_q query heads, H_k KV heads, N_G groups of query heads, d channels a head.
"""

import torch


def attention_decode_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    starts: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend with every head, then zero what is skipped; arguments as in `attention_decode`."""
    num_heads = q.shape[1]
    if pages is not None:
        # Entries beyond a length may hold anything; what they point at is hidden below.
        owned = pages.long().clamp(0, k.shape[0] - 1)
        k, v = (part[owned].flatten(1, 2) for part in (k, v))
    per_kv_head = num_heads // k.shape[2]
    places = torch.arange(k.shape[1], device=q.device)
    seen = places < lengths[:, None]  # [B, T]
    if starts is not None:
        seen = seen & (places >= starts[:, None])
    if window is not None:
        seen = seen & (places >= lengths[:, None] - window)
    # Places that hold no key may hold anything, and 0 * NaN is NaN.
    values = torch.where(seen[:, :, None, None], v.float(), 0.0).repeat_interleave(per_kv_head, 2)
    scores = torch.einsum("bhd,bthd->bht", q.float(), k.float().repeat_interleave(per_kv_head, 2))
    scores = scores * (q.shape[2] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), dim=-1)
    weights = weights.masked_fill(~seen.any(1)[:, None, None], 0.0)
    out = torch.einsum("bht,bthd->bhd", weights, values)
    if mask is not None:
        out = torch.where(mask.repeat_interleave(num_heads // mask.shape[1], 1)[..., None], out, 0.0)
    return out.to(q.dtype)
