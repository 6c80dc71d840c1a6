"""Causal prefill attention for Hopper: one warp loads keys and values, two warpgroups take turns on the tensor cores.

A program owns 128 rows (tokens x heads of one unit, gathered as in the Triton kernel), each consumer warpgroup 64 of
them. Keys are taken from the last block to the first, so that the blocks that need an element-wise mask come first. In
step i a consumer starts the scores of block i and the output of block i - 1 and computes the softmax of block i while
the second product runs; with `TAKES_TURNS` the other warpgroup's products fill the tensor cores in the meantime.
"""

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wide.kernels.attention_inputs import HeadUnits, score_factors
from wide.kernels.attention_prefill.tiles import HopperTile

_BLOCK_M = 128
_BAND = 16


@gluon.jit
def _load_keys_and_values(
    K,
    V,
    k_tiles,
    v_tiles,
    k_full,
    v_full,
    k_empty,
    v_empty,
    b,
    kv_head,
    num_blocks,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    for i in range(num_blocks):
        stage = i % STAGES
        turn = (i // STAGES) & 1
        n = (num_blocks - 1 - i) * BLOCK_N
        mbarrier.wait(k_empty.index(stage), turn ^ 1)
        mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
        tma.async_copy_global_to_shared(K, [b, n, kv_head, 0], k_full.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_empty.index(stage), turn ^ 1)
        mbarrier.expect(v_full.index(stage), BLOCK_N * D * 2)
        tma.async_copy_global_to_shared(V, [b, n, kv_head, 0], v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def _matrix(tiles, stage, BLOCK_N: gl.constexpr, D: gl.constexpr):
    return tiles.index(stage).reshape([BLOCK_N, D])


@gluon.jit
def _weigh(
    scores, row_max, row_sum, position, n, scale, BLOCK_N: gl.constexpr, MASKED: gl.constexpr, MMA: gl.constexpr
):
    """Return exp2 of the scaled scores, the new maxima and sums, and the factor that earlier sums take."""
    if MASKED:
        columns = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, MMA))
        seen = gl.expand_dims(columns, 0) <= gl.expand_dims(position, 1)
        scores = gl.where(seen, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - gl.expand_dims(new_max, 1))
    correction = gl.exp2(row_max - new_max)
    row_sum = row_sum * correction + gl.sum(weights, 1)
    return weights, new_max, row_sum, correction


@gluon.jit
def _step(
    i,
    q_tile,
    k_tiles,
    v_tiles,
    k_full,
    v_full,
    k_empty,
    v_empty,
    turns,
    weights,
    acc,
    row_max,
    row_sum,
    position,
    num_blocks,
    scale,
    WHICH: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
    MMA: gl.constexpr,
    OPERAND: gl.constexpr,
):
    stage = i % STAGES
    before = (i - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    if TAKES_TURNS:
        mbarrier.wait(turns.index(WHICH), ((i - 1) & 1) ^ (1 - WHICH))
    nothing = gl.zeros([64, BLOCK_N], gl.float32, layout=MMA)
    keys = _matrix(k_tiles, stage, BLOCK_N, D).permute([1, 0])
    scores = warpgroup_mma(q_tile, keys, nothing, use_acc=False, is_async=True)
    acc = warpgroup_mma(weights, _matrix(v_tiles, before, BLOCK_N, D), acc, is_async=True)
    if TAKES_TURNS:
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
    scores = warpgroup_mma_wait(1, (scores,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    n = (num_blocks - 1 - i) * BLOCK_N
    fresh, row_max, row_sum, correction = _weigh(scores, row_max, row_sum, position, n, scale, BLOCK_N, MASKED, MMA)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(correction, gl.SliceLayout(1, OPERAND.parent)), 1)
    weights = gl.convert_layout(fresh.to(weights.dtype), OPERAND)
    return weights, acc, row_max, row_sum


@gluon.jit
def _consume(
    Q,
    OUT,
    places,
    left,
    shift,
    k_tiles,
    v_tiles,
    q_tiles,
    k_full,
    v_full,
    k_empty,
    v_empty,
    turns,
    stride_qt,
    stride_qh,
    out_stride_t,
    first_head,
    num_blocks,
    scale,
    WHICH: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    MMA_OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA_OUT, k_width=2)
    GLOBAL: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = Q.dtype.element_ty
    if num_blocks > 0:
        rows = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, GLOBAL))
        is_row = rows // HEADS < left
        token = gl.load(places + rows // HEADS, mask=is_row, other=0).to(gl.int64)
        channels = gl.arange(0, D, layout=gl.SliceLayout(0, GLOBAL))
        head = first_head + rows % HEADS
        at = gl.expand_dims(token * stride_qt + head * stride_qh, 1) + gl.expand_dims(channels, 0)
        q = gl.load(Q + at, mask=gl.expand_dims(is_row, 1), other=0.0)
        q_tile = q_tiles.index(WHICH)
        q_tile.store(q)
        fence_async_shared()

        own = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
        position = gl.load(places + own // HEADS, mask=own // HEADS < left, other=-(1 << 30)) + shift
        first = gl.load(places + gl.minimum(WHICH * 64 // HEADS, left - 1)) + shift
        # Blocks whose every key is seen by every row of this warpgroup.
        num_masked = gl.minimum(gl.maximum(num_blocks - (first + 1) // BLOCK_N, 1), num_blocks)

        row_max = gl.full([64], -1.0e30, gl.float32, layout=gl.SliceLayout(1, MMA))
        row_sum = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, MMA))
        acc = gl.zeros([64, D], gl.float32, layout=MMA_OUT)
        nothing = gl.zeros([64, BLOCK_N], gl.float32, layout=MMA)
        mbarrier.wait(k_full.index(0), 0)
        keys = _matrix(k_tiles, 0, BLOCK_N, D).permute([1, 0])
        scores = warpgroup_mma(q_tile, keys, nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, (scores,))
        mbarrier.arrive(k_empty.index(0), count=1)
        fresh, row_max, row_sum, _ = _weigh(
            scores, row_max, row_sum, position, (num_blocks - 1) * BLOCK_N, scale, BLOCK_N, True, MMA
        )
        weights = gl.convert_layout(fresh.to(dtype), OPERAND)
        for i in range(1, num_masked):
            weights, acc, row_max, row_sum = _step(
                i, q_tile, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty, turns, weights, acc, row_max, row_sum,
                position, num_blocks, scale, WHICH, BLOCK_N, D, STAGES, True, TAKES_TURNS, MMA, OPERAND,
            )  # fmt: skip
        for i in range(num_masked, num_blocks):
            weights, acc, row_max, row_sum = _step(
                i, q_tile, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty, turns, weights, acc, row_max, row_sum,
                position, num_blocks, scale, WHICH, BLOCK_N, D, STAGES, False, TAKES_TURNS, MMA, OPERAND,
            )  # fmt: skip
        last = num_blocks - 1
        mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
        acc = warpgroup_mma(weights, _matrix(v_tiles, last % STAGES, BLOCK_N, D), acc, is_async=True)
        acc = warpgroup_mma_wait(0, (acc,))
        divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
        acc = acc / gl.expand_dims(gl.convert_layout(divisor, gl.SliceLayout(1, MMA_OUT)), 1)
        result = gl.convert_layout(acc.to(dtype), GLOBAL)
        to = gl.expand_dims(token * out_stride_t + head * D, 1) + gl.expand_dims(channels, 0)
        gl.store(OUT + to, result, mask=gl.expand_dims(is_row, 1))


@gluon.jit
def _attention_prefill(
    Q,
    K,
    V,
    OUT,
    INDEX,
    COUNTS,
    stride_qb,
    stride_qt,
    stride_qh,
    T_q,
    T_k,
    batch,
    max_tiles,
    band,
    scale,
    NUM_UNITS: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    TAKES_TURNS: gl.constexpr,
):
    # Within a band of units, the last tile of each comes first: longest first, and the empty ones last.
    pid = gl.program_id(0)
    in_band = pid % (max_tiles * band)
    pair = pid // (max_tiles * band) * band + in_band % band
    TOKENS: gl.constexpr = BLOCK_M // HEADS
    exists = pair < batch * NUM_UNITS
    b = pair // NUM_UNITS
    unit = pair % NUM_UNITS
    column = b * NUM_GROUPS + unit * NUM_GROUPS // NUM_UNITS
    kv_head = unit * NUM_KV_HEADS // NUM_UNITS
    count = gl.load(COUNTS + column, mask=exists, other=0)
    tile = gl.cdiv(count, TOKENS) - 1 - in_band // band
    places = INDEX + column.to(gl.int64) * T_q + tile * TOKENS
    left = gl.minimum(count - tile * TOKENS, TOKENS)
    shift = T_k - T_q
    last = gl.load(places + left - 1, mask=tile >= 0, other=0) + shift
    num_blocks = last // BLOCK_N + 1
    num_blocks = gl.where(tile >= 0, num_blocks, 0)

    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], Q.dtype.element_ty)
    q_tiles = gl.allocate_shared_memory(Q.dtype.element_ty, [2, 64, D], q_layout)
    k_tiles = gl.allocate_shared_memory(Q.dtype.element_ty, [STAGES, 1, BLOCK_N, 1, D], K.layout)
    v_tiles = gl.allocate_shared_memory(Q.dtype.element_ty, [STAGES, 1, BLOCK_N, 1, D], V.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_empty.index(s), count=2)
    turns = k_full
    if TAKES_TURNS:
        # Only then: barriers that nobody uses would share their memory with what the compiler hands to the workers.
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(2):
            mbarrier.init(turns.index(s), count=1)
    q_base = Q + b.to(gl.int64) * stride_qb
    out_stride_t = NUM_UNITS * HEADS * D
    out_base = OUT + b.to(gl.int64) * T_q * out_stride_t
    first_head = unit * HEADS
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_base, out_base, places, left, shift, k_tiles, v_tiles, q_tiles, k_full, v_full, k_empty, v_empty,
                    turns, stride_qt, stride_qh, out_stride_t, first_head, num_blocks, scale, 0, HEADS, BLOCK_N, D,
                    STAGES, TAKES_TURNS,
                ),
            ),
            (
                _consume,
                (
                    q_base, out_base, places, left, shift, k_tiles, v_tiles, q_tiles, k_full, v_full, k_empty, v_empty,
                    turns, stride_qt, stride_qh, out_stride_t, first_head, num_blocks, scale, 1, HEADS, BLOCK_N, D,
                    STAGES, TAKES_TURNS,
                ),
            ),
            (
                _load_keys_and_values,
                (K, V, k_tiles, v_tiles, k_full, v_full, k_empty, v_empty, b, kv_head, num_blocks, BLOCK_N, D, STAGES),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    *,
    tile: HopperTile,
    scale: float | None,
    zero_skipped: bool,
) -> torch.Tensor:
    """Run `attention_prefill_reference` in one kernel (and a fill if `zero_skipped`)."""
    batch, num_queries, num_heads, head_dim = q.shape
    units = HeadUnits(num_query_heads=num_heads, num_kv_heads=k.shape[2], num_groups=counts.shape[1])
    new = torch.zeros if zero_skipped else torch.empty
    out = new(q.shape, dtype=q.dtype, device=q.device)
    max_tiles = triton.cdiv(num_queries, _BLOCK_M // units.heads_per_unit)
    num_pairs = batch * units.num_units
    band = min(num_pairs, _BAND)
    _attention_prefill[(triton.cdiv(num_pairs, band) * band * max_tiles,)](
        q,
        _descriptor(k, tile.block_n),
        _descriptor(v, tile.block_n),
        out,
        index,
        counts,
        *q.stride()[:3],
        num_queries,
        k.shape[1],
        batch,
        max_tiles,
        band,
        score_factors(scale, None, head_dim)[0],
        NUM_UNITS=units.num_units,
        NUM_GROUPS=units.num_groups,
        NUM_KV_HEADS=units.num_kv_heads,
        HEADS=units.heads_per_unit,
        D=head_dim,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=tile.block_n,
        STAGES=tile.num_stages,
        TAKES_TURNS=bool(tile.takes_turns),
        num_warps=4,
    )
    return out


def _descriptor(tensor: torch.Tensor, block_n: int) -> Any:
    block = [1, block_n, 1, tensor.shape[3]]
    types = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    layout = gl.NVMMASharedLayout.get_default_for(block, types[tensor.dtype])
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)
