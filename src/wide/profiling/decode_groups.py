"""Decode attention over the size of attention groups, from one query head to all of them.

A group of fewer heads than share a KV head splits that head's work: keys and values are then read once for each
executing group of it, which is what the paper calls the step from multi-head to GQA-packed attention. Beside it runs
the way out: read a KV head for all its query heads if any of them executes.

Source: paper, appendix on decoding and attention groups.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from wide.kernels.attention_decode import attention_decode
from wide.profiling.races import COLD_BYTES, HEAD_DIM, KV_HEADS, QUERY_HEADS, Call, Race, half_mask, normal, sdpa_step

GROUP_HEADS = (1, 2, 4, 8, 16, 32)
"""Query heads of a group."""
_SHAPES = ((32, 4096), (8, 32768))


def group_races(*, quick: bool, only: tuple[int, float] | None = None) -> Iterator[Race]:
    """Time decode attention over full caches under random masks of groups of 1 to 32 query heads.

    Args:
        quick: One shape instead of two.
        only: Group size, which does not matter here, and share that executes, instead of 0.5.
    """
    active = 0.5 if only is None else only[1]
    for batch, length in _SHAPES[:1] if quick else _SHAPES:
        # One more copy than fits the cache, whatever share of it a mask leaves.
        copies = 1 + math.ceil(COLD_BYTES / (2 * batch * KV_HEADS * length * HEAD_DIM * 2 * active))
        caches = [normal(2, batch, KV_HEADS, length, HEAD_DIM) for _ in range(copies)]
        q = normal(batch, QUERY_HEADS, HEAD_DIM)
        for heads in GROUP_HEADS:
            yield group_race(q, caches, heads, active, half_mask(batch, QUERY_HEADS // heads, active=active))


def group_race(
    q: torch.Tensor,
    caches: Sequence[torch.Tensor],
    heads: int,
    active: float,
    mask: torch.Tensor,
    *,
    backend: str = "triton",
) -> Race:
    """Return the race of one group size.

    Args:
        q: Queries, [B, H_q, d].
        caches: Copies of keys and values, [2, B, H_k, T, d].
        heads: Query heads of a group.
        active: Share of (sequence, group) pairs that execute.
        mask: True = execute, bool [B, H_q / heads].
        backend: Of the operator.
    """
    batch, num_heads, head_dim = q.shape
    kv_heads, length = caches[0].shape[2:4]
    views = [tuple(part.transpose(1, 2) for part in cache) for cache in caches]
    lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    executes = mask.repeat_interleave(heads, 1)
    needed = executes.view(batch, kv_heads, -1).any(2)

    def ours(chosen: torch.Tensor | None) -> list[Call]:
        return [partial(attention_decode, q, k, v, lengths, chosen, backend=backend) for k, v in views]

    def dense(library: str) -> list[Call]:
        return [partial(sdpa_step, library, q, cache[0], cache[1]) for cache in caches]

    candidates: dict[str, Sequence[Call]] = {"dense operator": ours(None), "operator": ours(mask)}
    if q.is_cuda:
        candidates |= {"dense cudnn": dense("cudnn"), "dense flash": dense("flash")}
    if heads < num_heads // kv_heads:
        candidates["operator, whole KV heads"] = ours(needed)
    union = needed.float().mean().item()
    return Race(
        name=f"decode_groups G={heads * head_dim} B={batch} T={length} p={active}",
        candidates=candidates,
        wanted=ours(None)[0],
        executes=executes,
        flop=0.0,
        bytes_moved=union * batch * kv_heads * 2 * length * head_dim * q.element_size(),
        facts={
            "batch": batch,
            "length": length,
            "active": active,
            "group_size": heads * head_dim,
            "group_heads": heads,
            "union": union,
        },
    )
