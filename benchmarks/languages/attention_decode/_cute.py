"""Decode attention on CuTe (attention_decode_cute.cu): blocks share out the keys of a pair, a second launch merges."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.languages.cute import CuteTile, cute_obstacle, cute_tile, function
from wide.kernels.attention_decode.op import BACKENDS, DecodeShape
from wide.kernels.attention_inputs import HeadUnits, score_factors
from wide.kernels.device import HALF, device_facts
from wide.kernels.dispatch import require
from wide.kernels.native.launch import misaligned

SOURCE = Path(__file__).with_name("attention_decode_cute.cu")
_WARPS, _WIDE_HEAD, _MIN_BLOCKS, _STAGES = 4, 128, 2, 2
_HEAD_DIMS, _MOST_HEADS, _BLOCKS_PER_SM = (64, 96, 128, 256), 16, 4


def variant(tile: CuteTile, dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """Return what is compiled in for a shape.

    Args:
        tile: How it loads; it has one level.
        dtype: Of queries, keys and values.
        head_dim: d.
    """
    # Threads share lines of 8 elements evenly.
    fewest = head_dim // 8 // math.gcd(head_dim // 8, 32)
    warps = fewest * max(1, (_WARPS if head_dim <= _WIDE_HEAD else _WARPS // 2) // fewest)
    return {
        "FLOAT16": int(dtype == torch.float16),
        "HEAD_DIM": head_dim,
        "WARPS": warps,
        "STAGES": tile.num_stages or _STAGES,
    }


def num_splits(num_blocks: int, num_pairs: int, most: int) -> int:
    """Return into how many parts the keys of a pair are cut: a power of two, so that few kernels are compiled.

    Args:
        num_blocks: That keep a device busy.
        num_pairs: Sequences times head units.
        most: Parts that a full cache is worth.
    """
    return 1 << (min(max(1, num_blocks // num_pairs), max(1, most)) - 1).bit_length()


def supports(shape: DecodeShape) -> str | None:
    """Return why no device runs a shape, or None."""
    if shape.dtype in HALF and shape.head_dim in _HEAD_DIMS and shape.heads <= _MOST_HEADS:
        return None
    return (
        f"the kernel on CuTe takes half precision, head sizes of {_HEAD_DIMS} and at most {_MOST_HEADS} query heads of "
        f"a KV head and group, got {shape.dtype}, head size {shape.head_dim} and {shape.heads} heads"
    )


@BACKENDS.register("cute", needs=cute_obstacle, supports=supports)
def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    starts: torch.Tensor | None,
    pages: torch.Tensor | None,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `attention_decode_reference` in two kernels; the tile is a `CuteTile` of level 0."""
    require(misaligned({"q": q, "k": k, "v": v}, ()))
    chosen = cute_tile(tile, (0,), CuteTile(0))
    num_blocks = device_facts(q.device).num_sms * _BLOCKS_PER_SM
    batch, num_heads, head_dim = q.shape
    num_groups = 1 if mask is None else mask.shape[1]
    units = HeadUnits(num_query_heads=num_heads, num_kv_heads=k.shape[2], num_groups=num_groups)
    compiled = variant(chosen, q.dtype, head_dim)
    room = k.shape[1] if pages is None else k.shape[1] * pages.shape[1]
    splits = num_splits(num_blocks, batch * units.num_units, room // (16 * compiled["WARPS"] * _MIN_BLOCKS))
    new: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    found = torch.empty(batch, num_heads, splits, head_dim, **new)
    heights = torch.empty(batch, num_heads, splits, 2, **new)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    factors = score_factors(scale, soft_cap, head_dim)
    run = function(SOURCE, q.device, **compiled)
    tensors = q, k, v, lengths, mask, starts, pages, found, heights, out
    run(*tensors, units.num_units, splits, window or 0, soft_cap is not None, *factors)
    return out
