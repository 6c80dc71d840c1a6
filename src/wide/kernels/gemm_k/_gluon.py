"""GEMM-K for Hopper: one warp group gathers pattern-sorted rows, the others multiply 64 of them each.

A tile of sorted rows runs the union of its rows' groups. Each consumer owns 64 rows and skips the groups that none of
these executes, so rows are padded in units of 64 while weights are shared by the whole tile. Tiles run by descending
cost, so that the last ones are short. A finished tile is stored, or reduced into a float32 slab of columns that stays
in the second-level cache; the other consumer multiplies meanwhile.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wide.kernels.device import device_facts
from wide.kernels.gemm_k._drain import drain
from wide.kernels.gemm_k.tile_list._triton import UNIT_ROWS, Work, describe
from wide.kernels.gemm_k.tiles import STORE, HopperKTile
from wide.kernels.reordering import PatternReordering

# Consumers of a program, 64 rows each: what one warp group's product instruction takes.
_UNITS = 2
# Of a thread; without spills, and what the launch's 168 for each of 384 threads allow.
_CONSUMER_REGISTERS = gl.constexpr(216)
_PRODUCER_REGISTERS = gl.constexpr(72)
# Reduction elements of a stage: one 128-byte line of bfloat16 per row.
BLOCK_K = 64
# Elements of the slab that is swept at a time unless the tile says so: 32 MB of float32.
_SLAB_ELEMENTS = 2**23


def gemm_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: tuple[int, ...],
) -> torch.Tensor:
    """Run `gemm_k_reference`; `tile` is a `HopperKTile`."""
    chosen = HopperKTile(*tile)
    num_rows, width = order.index.shape[1], weight.shape[0]
    stored = order.counts.numel() == 1 and order.keeps_empty
    writes = STORE if stored else chosen.writes
    run = _Runner(h, weight, order, group_size, chosen, describe(order, _UNITS), writes)
    out = torch.empty(num_rows, width, dtype=out_dtype, device=h.device)
    if stored:
        # One sort covers all groups: every row is in exactly one tile and is written once.
        run(out, 0, 0, width, bias)
        return out
    slab = min(chosen.slab or max(1, _SLAB_ELEMENTS // num_rows // chosen.block_n) * chosen.block_n, width)
    if out_dtype == torch.float32:
        out.zero_() if bias is None else out.copy_(bias.expand_as(out))
        for column in range(0, width, slab):
            run(out, column, column, min(slab, width - column), None)
        return out
    # One float32 slab is reused for all columns, so that reductions stay in the second-level cache.
    total = torch.zeros(num_rows, slab, dtype=torch.float32, device=h.device)
    for column in range(0, width, slab):
        columns = min(slab, width - column)
        run(total, column, 0, columns, None)
        drain(total[:, :columns], out, column, bias, clears=column + slab < width)
    return out


class _Runner(NamedTuple):
    """What all launches of one call share."""

    h: torch.Tensor
    weight: torch.Tensor
    order: PatternReordering
    group_size: int
    tile: HopperKTile
    work: Work
    writes: int

    def __call__(
        self, out: torch.Tensor, column: int, out_column: int, columns: int, bias: torch.Tensor | None
    ) -> None:
        """Launch the kernel for some columns: from `column` of the weights to `out_column` of `out`."""
        tile, order = self.tile, self.order
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        parts = columns // tile.block_n
        capacity = self.work.items.shape[0]
        num_rows = order.index.shape[1]
        _gemm_k_kernel[(min(capacity * parts, device_facts(out.device).num_sms),)](
            self.h,
            TensorDescriptor.from_tensor(self.weight, [tile.block_n, BLOCK_K], layout),
            out,
            self.weight if bias is None else bias,
            order.index,
            order.patterns,
            order.counts,
            self.work.items,
            self.work.num_items,
            num_rows,
            triton.cdiv(num_rows, UNIT_ROWS * _UNITS),
            parts,
            column,
            out_column,
            self.h.stride(0),
            out.stride(0),
            S=order.groups_per_block,
            G=self.group_size,
            BLOCK_N=tile.block_n,
            STAGES=tile.num_stages,
            WRITES=self.writes,
            HAS_BIAS=bias is not None,
            num_warps=4,
        )


@gluon.jit
def _copy_unit(
    a, source, offsets, pattern, member, union, ks,
):  # fmt: skip
    # Rows that do not execute the group read nothing and leave zeros.
    if (union >> member) & 1 != 0:
        executes = gl.expand_dims((pattern >> member) & 1, 1) + gl.expand_dims(ks * 0, 0)
        places = gl.expand_dims(offsets, 1) + gl.expand_dims(ks, 0)
        async_copy.async_copy_global_to_shared(a, source + places, mask=executes != 0)


@gluon.jit
def _produce(
    H, W, INDEX, PATTERNS, COUNTS, ITEMS, NUM_ITEMS, a_ring, b_ring, full, empty, M, row_tiles, parts, first_column,
    stride_h, S: gl.constexpr, G: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # Eight lanes copy the 128 bytes of a row.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    lanes = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    ks = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    num_items = gl.load(NUM_ITEMS) * parts
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = gl.load(ITEMS + 2 * (item // parts))
        unions = gl.load(ITEMS + 2 * (item // parts) + 1)
        block = tile // row_tiles
        count = gl.load(COUNTS + block)
        places = (tile % row_tiles) * 128 + lanes
        listed = block * M + places
        column = first_column + (item % parts) * BLOCK_N
        row0 = gl.load(INDEX + listed, mask=places < count, other=0) * stride_h
        row1 = gl.load(INDEX + listed + 64, mask=places + 64 < count, other=0) * stride_h
        pattern0 = gl.load(PATTERNS + listed, mask=places < count, other=0)
        pattern1 = gl.load(PATTERNS + listed + 64, mask=places + 64 < count, other=0)
        for member in range(S):
            if ((unions | (unions >> 8)) >> member) & 1 != 0:
                channel = (block * S + member) * G
                for k in range(channel, channel + G, BLOCK_K):
                    mbarrier.wait(empty.index(stage), phase)
                    mbarrier.expect(full.index(stage), BLOCK_N * BLOCK_K * 2)
                    tma.async_copy_global_to_shared(W, [column, k], full.index(stage), b_ring.index(stage))
                    a = stage * 2
                    _copy_unit(a_ring.index(a), H + k, row0, pattern0, member, unions, ks)
                    _copy_unit(a_ring.index(a + 1), H + k, row1, pattern1, member, unions >> 8, ks)
                    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                    stage += 1
                    if stage == STAGES:
                        stage = 0
                        phase ^= 1


@gluon.jit
def _write(
    OUT, BIAS, values, INDEX, block, first, count, M, column, out_column, stride_out, piece: gl.constexpr,
    WRITES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = values.shape[1]
    quads: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if HAS_BIAS:
        bias = gl.load(
            BIAS + column + piece * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, values.type.layout))
        )
        values += gl.expand_dims(bias.to(gl.float32), 0)
    finished = values.to(OUT.dtype.element_ty)
    if WRITES == 0:
        if OUT.dtype.element_ty.primitive_bitwidth == 16:
            finished = gl.convert_layout(finished, wide)
    elif WRITES == 2:
        finished = gl.convert_layout(finished, quads)
    stored: gl.constexpr = finished.type.layout
    places = first + gl.arange(0, 64, layout=gl.SliceLayout(1, stored))
    rows = gl.load(INDEX + block * M + places, mask=places < count, other=0)
    targets = rows.to(gl.int64) * stride_out + (out_column + piece * WIDTH)
    out = OUT + gl.expand_dims(targets, 1) + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, stored)), 0)
    inside = gl.expand_dims(places < count, 1)
    if WRITES == 0:
        gl.store(out, finished, mask=inside)
    else:
        gl.atomic_add(out, finished, mask=inside, sem="relaxed")


@gluon.jit
def _halves(values):
    ROWS: gl.constexpr = values.shape[0]
    HALF: gl.constexpr = values.shape[1] // 2
    # A thread holds columns of both halves, so that cutting moves nothing.
    return values.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    # Computed afresh in every step: the compiler takes a variable that equals `stage` when a loop starts, and is set to
    # it inside, for one that never changes.
    before = stage - 1
    if stage == 0:
        before = STAGES - 1
    return before


@gluon.jit
def _consume(
    OUT, BIAS, INDEX, COUNTS, ITEMS, NUM_ITEMS, a_ring, b_ring, full, empty, M, row_tiles, parts, first_column,
    first_out_column, stride_out, UNIT: gl.constexpr, S: gl.constexpr, G: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, WRITES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    num_items = gl.load(NUM_ITEMS) * parts
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = gl.load(ITEMS + 2 * (item // parts))
        unions = gl.load(ITEMS + 2 * (item // parts) + 1)
        every = (unions | (unions >> 8)) & 255
        mine = (unions >> (8 * UNIT)) & 255
        total = gl.zeros((64, BLOCK_N), gl.float32, layout=mma)
        for member in range(S):
            if (every >> member) & 1 != 0:
                if (mine >> member) & 1 != 0:
                    for k in range(0, G, BLOCK_K):
                        mbarrier.wait(full.index(stage), phase)
                        # Rows arrive through the generic proxy, the product reads through the asynchronous one.
                        fence_async_shared()
                        b = b_ring.index(stage).permute([1, 0])
                        total = warpgroup_mma(a_ring.index(stage * 2 + UNIT), b, total, is_async=True)
                        total = warpgroup_mma_wait(1, (total,))
                        # The step before is done: its stage may be filled again.
                        mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1, pred=k > 0)
                        stage += 1
                        if stage == STAGES:
                            stage = 0
                            phase ^= 1
                    total = warpgroup_mma_wait(0, (total,))
                    mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1)
                else:
                    for _ in range(0, G, BLOCK_K):
                        mbarrier.wait(full.index(stage), phase)
                        mbarrier.arrive(empty.index(stage), count=1)
                        stage += 1
                        if stage == STAGES:
                            stage = 0
                            phase ^= 1
        block = tile // row_tiles
        first = (tile % row_tiles) * 128 + UNIT * 64
        count = gl.load(COUNTS + block)
        part = (item % parts) * BLOCK_N
        if first < count:
            left, right = _halves(total)
            piece0, piece1 = _halves(left)
            piece2, piece3 = _halves(right)
            column = first_column + part
            target = first_out_column + part
            _write(OUT, BIAS, piece0, INDEX, block, first, count, M, column, target, stride_out, 0, WRITES, HAS_BIAS)
            _write(OUT, BIAS, piece1, INDEX, block, first, count, M, column, target, stride_out, 1, WRITES, HAS_BIAS)
            _write(OUT, BIAS, piece2, INDEX, block, first, count, M, column, target, stride_out, 2, WRITES, HAS_BIAS)
            _write(OUT, BIAS, piece3, INDEX, block, first, count, M, column, target, stride_out, 3, WRITES, HAS_BIAS)


# One compilation serves all numbers of rows; strides keep what their divisibility tells.
@gluon.jit(do_not_specialize=["M", "row_tiles", "parts", "first_column"])
def _gemm_k_kernel(
    H, W, OUT, BIAS, INDEX, PATTERNS, COUNTS, ITEMS, NUM_ITEMS, M, row_tiles, parts, first_column, first_out_column,
    stride_h, stride_out, S: gl.constexpr, G: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    WRITES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    BLOCK_K: gl.constexpr = W.block_shape[1]
    a_ring = gl.allocate_shared_memory(W.dtype, [STAGES * 2, 64, BLOCK_K], W.layout)
    b_ring = gl.allocate_shared_memory(W.dtype, [STAGES, BLOCK_N, BLOCK_K], W.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Every producer thread arrives when its copies have landed, and once more with the bytes of the weights.
        mbarrier.init(full.index(stage), count=128 + 1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (
                _consume,
                (OUT, BIAS, INDEX, COUNTS, ITEMS, NUM_ITEMS, a_ring, b_ring, full, empty, M, row_tiles, parts,
                 first_column, first_out_column, stride_out, 0, S, G, BLOCK_N, STAGES, WRITES, HAS_BIAS),
            ),
            (
                _consume,
                (OUT, BIAS, INDEX, COUNTS, ITEMS, NUM_ITEMS, a_ring, b_ring, full, empty, M, row_tiles, parts,
                 first_column, first_out_column, stride_out, 1, S, G, BLOCK_N, STAGES, WRITES, HAS_BIAS),
            ),
            (
                _produce,
                (H, W, INDEX, PATTERNS, COUNTS, ITEMS, NUM_ITEMS, a_ring, b_ring, full, empty, M, row_tiles, parts,
                 first_column, stride_h, S, G, BLOCK_N, STAGES),
            ),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip
