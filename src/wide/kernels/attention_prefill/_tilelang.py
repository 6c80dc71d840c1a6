"""Prefill attention in TileLang: a block owns gathered queries of one unit of heads and streams the keys that they see.

Rows are tokens x heads of a unit, as in the Triton kernel. On sm_90 the compiler has four further warps load keys and
values by tensor-memory access.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from wide.kernels.attention_inputs import HeadUnits, score_factors
from wide.kernels.attention_prefill._triton import PrefillTile, chosen_tile
from wide.kernels.attention_prefill.op import BACKENDS, PrefillShape
from wide.kernels.device import HALF, device_facts, hopper_obstacle, tilelang_obstacle
from wide.kernels.dispatch import Candidate, require
from wide.kernels.native.launch import misaligned
from wide.kernels.native.tilelang import is_for_hopper, kernel, stages_ahead

_LOWEST = -1.0e30
_MOST_HEADS = 64
# Up to here a larger tile fits the registers of sm_90.
_MOST_CHANNELS = 128


def supports(shape: PrefillShape) -> str | None:
    """Return why no device runs a shape, or None."""
    if shape.dtype in HALF and shape.head_dim % 16 == 0 and shape.heads <= _MOST_HEADS:
        return None
    return (
        f"the kernel in TileLang takes half precision, head sizes that 16 divides and at most {_MOST_HEADS} query "
        f"heads of a KV head and group, got {shape.dtype}, head size {shape.head_dim} and {shape.heads} heads"
    )


def candidates(_: PrefillShape, device: torch.device, few: bool) -> Iterator[Candidate]:
    """Yield the default, on Hopper, where it is the fastest and one kernel compiles in seconds, among the first."""
    if not few or hopper_obstacle(device) is None:
        yield Candidate()
    if not few:
        yield Candidate(PrefillTile(128, 128, 8, 2))


@BACKENDS.register("tilelang", needs=tilelang_obstacle, supports=supports, candidates=candidates)
def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    *,
    runs: torch.Tensor | None,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    zero_skipped: bool,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `attention_prefill_reference` in one kernel (and a fill if `zero_skipped`).

    Of the tile, a `PrefillTile`, the first four fields count.
    """
    require(misaligned({"q": q, "k": k, "v": v}, ()))
    chosen = chosen_tile(tile, k, v)
    if not tile and device_facts(q.device).capability == 90 and q.shape[-1] <= _MOST_CHANNELS:
        # Three groups of warps have one to multiply while two look for maxima.
        chosen = PrefillTile(192, 96, 12, 2)
    num_heads, head_dim = q.shape[2:]
    units = HeadUnits(num_query_heads=num_heads, num_kv_heads=k.shape[2], num_groups=counts.shape[1])
    new = torch.zeros if zero_skipped else torch.empty
    out = new(q.shape, dtype=q.dtype, device=q.device)
    block_m = max(chosen.block_m, 1 << (units.heads_per_unit - 1).bit_length())
    run = kernel(
        make_attention_prefill,
        q.device,
        num_heads=num_heads,
        num_kv_heads=k.shape[2],
        num_units=units.num_units,
        num_groups=counts.shape[1],
        head_dim=head_dim,
        dtype=str(q.dtype).removeprefix("torch."),
        factors=score_factors(scale, soft_cap, head_dim),
        has=(runs is not None, soft_cap is not None),
        window=window or 0,
        # Warps share out whole fragments of rows.
        tile=(block_m, chosen.block_n, min(chosen.num_warps, block_m // 16), chosen.num_stages),
    )
    run(q, k, v, out, index, counts, index[0, :1] if runs is None else runs)
    return out


def make_attention_prefill(
    *,
    num_heads: int,
    num_kv_heads: int,
    num_units: int,
    num_groups: int,
    head_dim: int,
    dtype: str,
    factors: tuple[float, float, float],
    has: tuple[bool, bool],
    window: int,
    tile: tuple[int, int, int, int],
) -> Any:
    """Return the kernel; the numbers of sequences, queries and keys, and the strides, are not compiled in."""
    import tilelang.language as T

    block_m, block_n, num_warps, num_stages = tile
    batch, num_queries, num_keys = T.dynamic("batch"), T.dynamic("num_queries"), T.dynamic("num_keys")
    strides = [[T.dynamic(f"stride_{of}{i}", "int64") for i in range(3)] for of in "qkv"]
    heads = num_heads // num_units
    tokens = block_m // heads
    scale, cap_in, cap_out = factors
    has_runs, has_cap = has
    by_tma, ahead = is_for_hopper(), stages_ahead(num_stages)
    # Warps that load gather queries, too, each as many as the others: 4 more than 8 take half as many rows again.
    gathered = block_m * 3 // 2 if by_tma and num_warps == 8 else block_m
    policy = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def attention_prefill(
        Q: T.StridedTensor((batch, num_queries, num_heads, head_dim), (*strides[0], 1), dtype),
        K: T.StridedTensor((batch, num_keys, num_kv_heads, head_dim), (*strides[1], 1), dtype),
        V: T.StridedTensor((batch, num_keys, num_kv_heads, head_dim), (*strides[2], 1), dtype),
        OUT: T.Tensor((batch, num_queries, num_heads, head_dim), dtype),
        INDEX: T.Tensor((batch, num_groups, num_queries), "int32"),
        COUNTS: T.Tensor((batch, num_groups), "int32"),
        RUNS: T.Tensor((1 + has_runs, num_queries), "int32"),
    ):
        with T.Kernel(num_units, T.ceildiv(num_queries, tokens), batch, threads=32 * num_warps) as (unit, place, b):
            q = T.alloc_shared((block_m, head_dim), dtype)
            k = T.alloc_shared((block_n, head_dim), dtype)
            v = T.alloc_shared((block_n, head_dim), dtype)
            scores = T.alloc_fragment((block_m, block_n), "float32")
            weights = T.alloc_fragment((block_m, block_n), dtype)
            acc = T.alloc_fragment((block_m, head_dim), "float32")
            top = T.alloc_fragment((block_m,), "float32")
            before = T.alloc_fragment((block_m,), "float32")
            total = T.alloc_fragment((block_m,), "float32")
            added = T.alloc_fragment((block_m,), "float32")
            # Keys that a row sees: from the first to before the second.
            lows = T.alloc_fragment((block_m,), "int32")
            highs = T.alloc_fragment((block_m,), "int32")
            for i in (0, 1, 2):
                T.assume(strides[0][i] % 8 == 0)
                T.assume(strides[1][i] % 8 == 0)
                T.assume(strides[2][i] % 8 == 0)
            group = unit * num_groups // num_units
            kv_head = unit * num_kv_heads // num_units
            count = COUNTS[b, group]
            # The last tile of each unit comes first: longest first, and the empty ones last.
            first = (T.ceildiv(count, tokens) - 1 - place) * tokens
            if first >= 0:
                left = T.min(count - first, tokens)
                earliest = INDEX[b, group, first]
                latest = INDEX[b, group, first + left - 1]
                shift = num_keys - num_queries
                # Keys that some row sees, and that all do.
                begin = T.alloc_var("int32", 0)
                end = T.alloc_var("int32", 0)
                begin_full = T.alloc_var("int32", 0)
                end_full = T.alloc_var("int32", 0)
                if has_runs:
                    begin = RUNS[0, earliest]
                    begin_full = RUNS[0, latest]
                    end = RUNS[1, latest]
                    end_full = RUNS[1, earliest]
                else:
                    end = latest + shift + 1
                    end_full = earliest + shift + 1
                    if window:
                        begin = T.max(begin, end_full - window)
                        begin_full = T.max(begin_full, end - window)
                if by_tma:
                    T.annotate_producer_reg_dealloc(24)
                    T.annotate_consumer_reg_alloc(240 if num_warps <= 8 else 160)
                for i, j in T.Parallel(gathered, head_dim):
                    row = INDEX[b, group, first + T.min(i // heads, left - 1)]
                    if i < block_m:
                        q[i, j] = Q[b, row, unit * heads + i % heads, j]
                for i in T.Parallel(block_m):
                    token = INDEX[b, group, first + T.min(i // heads, left - 1)]
                    if has_runs:
                        lows[i] = RUNS[0, token]
                        highs[i] = RUNS[1, token]
                    else:
                        highs[i] = token + shift + 1
                        lows[i] = 0
                        if window:
                            lows[i] = T.max(lows[i], token + shift + 1 - window)
                T.fill(top, _LOWEST)
                T.clear(total)
                T.clear(acc)
                blocks = T.if_then_else(begin < end, T.ceildiv(end, block_n) - begin // block_n, 0)
                for step in T.Pipelined(blocks, num_stages=ahead):
                    n = (begin // block_n + step) * block_n
                    if by_tma:
                        T.copy(K[b, n : n + block_n, kv_head, :], k)
                    else:
                        for i, j in T.Parallel(block_n, head_dim):
                            k[i, j] = K[b, T.min(n + i, num_keys - 1), kv_head, j]
                    T.gemm(q, k, scores, transpose_B=True, policy=policy, clear_accum=True)
                    if has_cap:
                        for i, j in T.Parallel(block_m, block_n):
                            scores[i, j] = cap_out - 2.0 * cap_out / (T.exp2(scores[i, j] * cap_in) + 1.0)
                    if (n < begin_full) | (n + block_n > end_full):
                        for i, j in T.Parallel(block_m, block_n):
                            scores[i, j] = T.if_then_else(
                                (n + j >= lows[i]) & (n + j < highs[i]), scores[i, j], -T.infinity("float32")
                            )
                    T.copy(top, before)
                    T.reduce_max(scores, top, dim=1, clear=False)
                    for i, j in T.Parallel(block_m, block_n):
                        scores[i, j] = T.exp2(scores[i, j] * scale - top[i] * scale)
                    T.reduce_sum(scores, added, dim=1)
                    for i in T.Parallel(block_m):
                        before[i] = T.exp2((before[i] - top[i]) * scale)
                        total[i] = total[i] * before[i] + added[i]
                    for i, j in T.Parallel(block_m, head_dim):
                        acc[i, j] *= before[i]
                    T.copy(scores, weights)
                    # Places that hold no key of the tile may hold anything, and 0 * NaN is NaN.
                    if by_tma:
                        T.copy(V[b, n : n + block_n, kv_head, :], v)
                        if has_runs:
                            if (n < begin) | (n + block_n > end):
                                for i, j in T.Parallel(block_n, head_dim):
                                    v[i, j] = T.if_then_else((n + i >= begin) & (n + i < end), v[i, j], 0)
                    else:
                        for i, j in T.Parallel(block_n, head_dim):
                            v[i, j] = V[b, T.max(begin, T.min(n + i, end - 1)), kv_head, j]
                    T.gemm(weights, v, acc, policy=policy)
                for i, j in T.Parallel(block_m, head_dim):
                    acc[i, j] /= T.if_then_else(total[i] == 0, 1.0, total[i])
                # Every warp wrote its own rows of queries.
                T.copy(acc, q)
                for i, j in T.Parallel(block_m, head_dim):
                    if i // heads < left:
                        OUT[b, INDEX[b, group, first + i // heads], unit * heads + i % heads, j] = q[i, j]

    return attention_prefill
