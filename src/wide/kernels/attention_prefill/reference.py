"""Attention over many queries, of which each group of heads executes some: the oracle, in plain PyTorch.

Dims: B sequences, T_q queries, T_k keys, H_q query heads, H_k KV heads, N_G groups of query heads, d channels a head.
"""

import torch


def executed(index: torch.Tensor, counts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the mask that a per-sequence reordering stands for, bool [B, T, N_G]."""
    places = torch.arange(index.shape[2], device=index.device)
    # Entries beyond a count are unspecified: they are sent to an extra column that is cut off.
    rows = torch.where(places < counts.unsqueeze(-1), index, num_tokens).long()
    mask = torch.zeros(*counts.shape, num_tokens + 1, dtype=torch.bool, device=index.device)
    return mask.scatter_(2, rows, True)[..., :num_tokens].transpose(1, 2)


def attention_prefill_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    *,
    runs: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    zero_skipped: bool = True,
) -> torch.Tensor:
    """Attend with every head, then keep what executes and zero the rest; arguments as in `attention_prefill`."""
    del zero_skipped
    num_queries, num_keys, num_heads = q.shape[1], k.shape[1], q.shape[2]
    per_kv_head = num_heads // k.shape[2]
    keys = torch.arange(num_keys, device=q.device)
    positions = torch.arange(num_queries, device=q.device)[:, None] + (num_keys - num_queries)
    seen = keys <= positions  # [T_q, T_k]
    if runs is not None:
        seen = (keys >= runs[0][:, None]) & (keys < runs[1][:, None])
    # Places that no query sees may hold anything, and 0 * NaN is NaN.
    values = torch.where(seen.any(0)[:, None, None], v.float(), 0.0).repeat_interleave(per_kv_head, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float().repeat_interleave(per_kv_head, 2))
    scores = scores * (q.shape[3] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if window is not None:
        seen = seen & (keys > positions - window)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    # A query that sees no key attends to nothing.
    weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    mask = executed(index, counts, num_queries).repeat_interleave(num_heads // counts.shape[1], 2)
    return torch.where(mask.unsqueeze(-1), out, 0.0).to(q.dtype)
