"""Decode attention in TileLang: several blocks share the keys of a pair, and a second launch merges what they found.

Blocks of skipped (sequence, unit) pairs, and those for which a cache holds too few keys, end at once.
"""

from collections.abc import Sequence
from typing import Any

import tilelang.language as T
import torch

from benchmarks.languages.attention_decode._cute import num_splits
from wide.kernels.attention_decode._triton import DecodeTile, default_tile
from wide.kernels.attention_decode.op import BACKENDS, DecodeShape
from wide.kernels.attention_inputs import HeadUnits, score_factors
from wide.kernels.device import HALF, device_facts, tilelang_obstacle
from wide.kernels.dispatch import require
from wide.kernels.native.launch import misaligned
from wide.kernels.native.tilelang import kernel

# Rows of the smallest matrix fragment.
_MIN_ROWS = 16
_LOWEST = -1.0e30


def supports(shape: DecodeShape) -> str | None:
    """Return why no device runs a shape, or None."""
    if shape.dtype in HALF and shape.head_dim % 16 == 0 and not shape.is_paged:
        return None
    return (
        "the kernel in TileLang takes half precision, head sizes that 16 divides and caches without pages, got "
        f"{shape.dtype}, head size {shape.head_dim}{' and pages' if shape.is_paged else ''}"
    )


@BACKENDS.register("tilelang", needs=tilelang_obstacle, supports=supports)
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
    """Run `attention_decode_reference`; of the tile, a `DecodeTile`, keys, least steps, programs and warps count."""
    del pages
    require(misaligned({"q": q, "k": k, "v": v}, ()))
    facts = device_facts(q.device)
    chosen = DecodeTile(*tile) if tile else default_tile(facts, q.shape[-1], q.shape[0] * k.shape[2])
    if not tile:
        # Blocks keep to one pair: those of skipped pairs end at once, so that more of them fill the device.
        chosen = chosen._replace(programs_per_sm=4 * chosen.programs_per_sm)
    num_blocks = facts.num_sms * chosen.programs_per_sm
    batch, num_heads, head_dim = q.shape
    num_groups = 1 if mask is None else mask.shape[1]
    units = HeadUnits(num_query_heads=num_heads, num_kv_heads=k.shape[2], num_groups=num_groups)
    splits = num_splits(num_blocks, batch * units.num_units, k.shape[1] // (chosen.block_n * chosen.min_blocks))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    new: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    found = torch.empty(batch, num_heads, splits, head_dim, **new)
    heights = torch.empty(batch, num_heads, splits, 2, **new)
    shape = {
        "num_heads": num_heads,
        "num_units": units.num_units,
        "num_groups": num_groups,
        "head_dim": head_dim,
        "splits": splits,
        "dtype": str(q.dtype).removeprefix("torch."),
    }
    run = kernel(
        make_attention_decode,
        q.device,
        num_kv_heads=k.shape[2],
        # A cache has room for all places from its beginning.
        room=k.shape[1],
        strides=(q.stride(), k.stride(), v.stride()),
        factors=score_factors(scale, soft_cap, head_dim),
        has=(starts is not None, mask is not None, soft_cap is not None),
        window=window or 0,
        tile=(chosen.block_n, chosen.num_warps),
        **shape,
    )
    raw = lengths.view(torch.uint8).view(batch, -1)[:, :1] if mask is None else mask.view(torch.uint8)
    run(q, k, v, lengths, lengths if starts is None else starts, raw.contiguous(), found, heights)
    kernel(make_merge, q.device, **shape)(found, heights, out)
    return out


def make_attention_decode(
    *,
    num_heads: int,
    num_kv_heads: int,
    room: int,
    num_units: int,
    num_groups: int,
    head_dim: int,
    splits: int,
    dtype: str,
    strides: tuple[tuple[int, ...], ...],
    factors: tuple[float, float, float],
    has: tuple[bool, bool, bool],
    window: int,
    tile: tuple[int, int],
) -> Any:
    """Return the kernel that leaves sums, maxima and weights of each part; the number of sequences varies."""
    block_n, num_warps = tile
    batch = T.dynamic("batch")
    heads = num_heads // num_units
    rows = max(_MIN_ROWS, 1 << (heads - 1).bit_length())
    scale, cap_in, cap_out = factors
    has_starts, has_mask, has_cap = has
    policy = T.GemmWarpPolicy.FullCol

    @T.prim_func
    def attention_decode(
        Q: T.StridedTensor((batch, num_heads, head_dim), strides[0], dtype),
        K: T.StridedTensor((batch, room, num_kv_heads, head_dim), strides[1], dtype),
        V: T.StridedTensor((batch, room, num_kv_heads, head_dim), strides[2], dtype),
        LENGTHS: T.Tensor((batch,), "int32"),
        STARTS: T.Tensor((batch,), "int32"),
        MASK: T.Tensor((batch, num_groups), "uint8"),
        FOUND: T.Tensor((batch, num_heads, splits, head_dim), "float32"),
        HEIGHTS: T.Tensor((batch, num_heads, splits, 2), "float32"),
    ):
        with T.Kernel(splits, num_units, batch, threads=32 * num_warps) as (split, unit, b):
            q = T.alloc_shared((rows, head_dim), dtype)
            k = T.alloc_shared((block_n, head_dim), dtype)
            v = T.alloc_shared((block_n, head_dim), dtype)
            weights = T.alloc_shared((rows, block_n), dtype)
            scores = T.alloc_fragment((rows, block_n), "float32")
            acc = T.alloc_fragment((rows, head_dim), "float32")
            top = T.alloc_fragment((rows,), "float32")
            before = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            added = T.alloc_fragment((rows,), "float32")
            kv_head = unit * num_kv_heads // num_units
            high = LENGTHS[b]
            low = STARTS[b] if has_starts else 0
            if window:
                low = T.max(low, high - window)
            blocks = T.max(T.ceildiv(high, block_n) - low // block_n, 0)
            if has_mask:
                blocks = T.if_then_else(MASK[b, unit * num_groups // num_units] != 0, blocks, 0)
            share = T.ceildiv(blocks, splits)
            begin = T.min(split * share, blocks)
            number = T.min(share, blocks - begin)
            T.fill(top, _LOWEST)
            T.clear(total)
            T.clear(acc)
            if number > 0:
                for i, j in T.Parallel(rows, head_dim):
                    q[i, j] = T.if_then_else(i < heads, Q[b, unit * heads + T.min(i, heads - 1), j], 0)
                # Rows are too few for the compiler to split threads, see `stages_ahead`.
                for step in T.Pipelined(number, num_stages=1):
                    n = (low // block_n + begin + step) * block_n
                    # Places that hold no key may hold anything: the nearest that does stands in.
                    for i, j in T.Parallel(block_n, head_dim):
                        k[i, j] = K[b, T.max(low, T.min(n + i, high - 1)), kv_head, j]
                    for i, j in T.Parallel(block_n, head_dim):
                        v[i, j] = V[b, T.max(low, T.min(n + i, high - 1)), kv_head, j]
                    T.clear(scores)
                    T.gemm(q, k, scores, transpose_B=True, policy=policy)
                    T.copy(top, before)
                    for i, j in T.Parallel(rows, block_n):
                        if has_cap:
                            scores[i, j] = cap_out - 2.0 * cap_out / (T.exp2(scores[i, j] * cap_in) + 1.0)
                    for i, j in T.Parallel(rows, block_n):
                        scores[i, j] = T.if_then_else(
                            (n + j >= low) & (n + j < high), scores[i, j] * scale, -T.infinity("float32")
                        )
                    T.reduce_max(scores, top, dim=1, clear=False)
                    for i, j in T.Parallel(rows, block_n):
                        scores[i, j] = T.exp2(scores[i, j] - top[i])
                    T.reduce_sum(scores, added, dim=1)
                    for i in T.Parallel(rows):
                        before[i] = T.exp2(before[i] - top[i])
                        total[i] = total[i] * before[i] + added[i]
                    for i, j in T.Parallel(rows, head_dim):
                        acc[i, j] *= before[i]
                    T.copy(scores, weights)
                    T.gemm(weights, v, acc, policy=policy)
                for i, j in T.Parallel(rows, head_dim):
                    if i < heads:
                        FOUND[b, unit * heads + i, split, j] = acc[i, j]
            for i in T.Parallel(rows):
                if i < heads:
                    HEIGHTS[b, unit * heads + i, split, 0] = top[i]
                    HEIGHTS[b, unit * heads + i, split, 1] = total[i]

    return attention_decode


def make_merge(*, num_heads: int, num_units: int, num_groups: int, head_dim: int, splits: int, dtype: str) -> Any:
    """Return the kernel that merges the parts of each head; one without any gets zeros."""
    batch = T.dynamic("batch")

    @T.prim_func
    def merge(
        FOUND: T.Tensor((batch, num_heads, splits, head_dim), "float32"),
        HEIGHTS: T.Tensor((batch, num_heads, splits, 2), "float32"),
        OUT: T.Tensor((batch, num_heads, head_dim), dtype),
    ):
        with T.Kernel(num_heads, batch, threads=128) as (head, b):
            acc = T.alloc_fragment((head_dim,), "float32")
            top = T.alloc_var("float32", _LOWEST)
            total = T.alloc_var("float32", 0.0)
            T.clear(acc)
            for split in T.serial(splits):
                top = T.max(top, HEIGHTS[b, head, split, 0])
            for split in T.serial(splits):
                # What was not written may hold anything.
                if HEIGHTS[b, head, split, 1] > 0:
                    total += HEIGHTS[b, head, split, 1] * T.exp2(HEIGHTS[b, head, split, 0] - top)
                    for i in T.Parallel(head_dim):
                        acc[i] += FOUND[b, head, split, i] * T.exp2(HEIGHTS[b, head, split, 0] - top)
            for i in T.Parallel(head_dim):
                OUT[b, head, i] = acc[i] / T.if_then_else(total == 0, 1.0, total)

    return merge
