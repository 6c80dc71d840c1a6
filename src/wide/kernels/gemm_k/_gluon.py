"""GEMM-K for Hopper: one warp group gathers pattern-sorted rows, the others multiply 64 of them each.

A tile of sorted rows runs the union of its rows' groups. Each consumer owns 64 rows and skips the groups that none of
these executes, so rows are padded in units of 64 while weights are shared by the whole tile. Tiles run by descending
cost, so that the last ones are short. A finished tile is stored, or reduced into a float32 slab of columns that stays
in the second-level cache; other consumers multiply meanwhile.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
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
from wide.kernels.reordering import PatternReordering

# Rows of one consumer: what one warp group's product instruction takes.
UNIT_ROWS = 64
# Reduction elements of a stage: one 128-byte line of bfloat16 per row.
BLOCK_K = 64
# How a finished tile reaches the output: stored in its type, or reduced into float32 in columns of a thread.
STORE, REDUCE_PAIRS, REDUCE_QUADS = 0, 1, 2
_COSTS = 9
# Every program that describes a tile of a single list reads all patterns: 64 KB.
_MAX_ROWS_READ = 2**14
_SLAB_ELEMENTS = 2**23


class Shape(NamedTuple):
    """What is compiled in.

    Args:
        block_n: Output columns of a tile.
        instruction_n: Columns of one product instruction.
        units: Consumers, 64 rows each.
        stages: Stages of the ring.
        consumer_registers: Of a thread of each consumer but the first, which takes what is left.
        producer_registers: Of a thread of the producer.
    """

    block_n: int
    instruction_n: int
    units: int
    stages: int
    consumer_registers: int
    producer_registers: int


def shape_for(units: int, block_n: int, stages: int) -> Shape:
    """Return the register split that compiles without spills for 2 or 3 consumers."""
    if units == 3:
        # 512 threads start with 128 registers each, too few for the accumulator of a 256-column instruction.
        return Shape(block_n, min(block_n, 128), 3, stages, 160, 32)
    return Shape(block_n, block_n, units, stages, 216, 72)


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
    """Run `gemm_k_reference`; `tile` is (units, block_n, stages, slab, writes)."""
    units, block_n, stages, slab, writes = tile
    num_rows, width = order.index.shape[1], weight.shape[0]
    work = describe(order, units)
    run = _Runner(h, weight, order, group_size, shape_for(units, block_n, stages), work)
    out = torch.empty(num_rows, width, dtype=out_dtype, device=h.device)
    if order.counts.numel() == 1 and order.keeps_empty:
        # One sort covers all groups: every row is in exactly one tile and is written once.
        run(out, 0, 0, width, STORE, bias)
        return out
    # Reductions are twice as fast into a sum that stays in the second-level cache.
    slab = min(slab or max(1, _SLAB_ELEMENTS // num_rows // block_n) * block_n, width)
    if out_dtype == torch.float32:
        out.zero_() if bias is None else out.copy_(bias.expand_as(out))
        for column in range(0, width, slab):
            run(out, column, column, min(slab, width - column), writes, None)
        return out
    # One float32 slab is reused for all columns, so that reductions stay in the second-level cache.
    total = torch.zeros(num_rows, slab, dtype=torch.float32, device=h.device)
    for column in range(0, width, slab):
        columns = min(slab, width - column)
        run(total, column, 0, columns, writes, None)
        drain(total[:, :columns], out, column, bias, clears=column + slab < width)
    return out


class Work(NamedTuple):
    """The tiles of a call by descending cost.

    Args:
        items: (row tile, unions of its units) of each tile, int32 [capacity, 2]; the row tile counts through all
            super-blocks, a union takes 8 bits.
        starts: Tiles in front of those of each cost, int32 [_COSTS + 1] by descending cost; the last is their number.
    """

    items: torch.Tensor
    num_items: torch.Tensor


def describe(order: PatternReordering, units: int) -> Work:
    """Return the tiles of `units` times 64 rows, those with many groups first; one launch or three, none waits."""
    num_blocks, num_rows = order.index.shape
    row_tiles = triton.cdiv(num_rows, units * UNIT_ROWS)
    capacity = num_blocks * row_tiles
    new: dict[str, Any] = {"dtype": torch.int32, "device": order.index.device}
    if num_blocks == 1 and num_rows <= _MAX_ROWS_READ:
        one = Work(torch.empty(capacity, 2, **new), torch.empty(1, **new))
        _one_list_kernel[(row_tiles,)](
            order.patterns, order.counts, one.items, one.num_items,
            UNITS=units, UNITS_PADDED=triton.next_power_of_2(units), TILES=triton.next_power_of_2(row_tiles),
            S=order.groups_per_block, num_warps=8,
        )  # fmt: skip
        return one
    unions = torch.empty(capacity, **new)
    places = torch.empty(capacity, **new)
    items = torch.empty(capacity, 2, **new)
    # How many tiles have each cost, then the number of all.
    found = torch.zeros(_COSTS + 1, **new)
    _unions_kernel[(row_tiles, num_blocks)](
        order.patterns, order.counts, unions, places, found, num_rows, row_tiles,
        UNITS=units, UNITS_PADDED=triton.next_power_of_2(units), S=order.groups_per_block, num_warps=1,
    )  # fmt: skip
    _items_kernel[(triton.cdiv(capacity, 128),)](unions, places, found, items, capacity, num_warps=4)
    return Work(items, found[_COSTS:])


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _number_of_groups(union, S: tl.constexpr):
    number = union * 0
    for bit in tl.static_range(S):
        number += (union >> bit) & 1
    return number


@triton.jit
def _one_list_kernel(
    PATTERNS, COUNTS, ITEMS, NUM_ITEMS,
    UNITS: tl.constexpr, UNITS_PADDED: tl.constexpr, TILES: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Find the place of one tile: every program looks at all tiles, so that nobody waits for another launch."""
    row_tile = tl.program_id(0)
    count = tl.load(COUNTS)
    ROWS: tl.constexpr = UNITS * 64
    tiles = tl.arange(0, TILES)
    rows = tl.arange(0, UNITS_PADDED * 64)
    places = tiles[:, None] * ROWS + rows[None, :]
    inside = (places < count) & (rows < ROWS)[None, :]
    union = tl.reduce(tl.load(PATTERNS + places, mask=inside, other=0), 1, _either)
    cost = tl.where(tiles * ROWS < count, _number_of_groups(union, S), -1)
    own = tl.sum(tl.where(tiles == row_tile, cost, 0), 0)
    place = tl.sum(((cost > own) | ((cost == own) & (tiles < row_tile))).to(tl.int32), 0)
    units = tl.arange(0, UNITS_PADDED)
    mine = row_tile * ROWS + units[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = (mine < count) & (units < UNITS)[:, None]
    unions = tl.reduce(tl.load(PATTERNS + mine, mask=inside, other=0), 1, _either)
    if own >= 0:
        tl.store(ITEMS + 2 * place, row_tile)
        tl.store(ITEMS + 2 * place + 1, tl.sum(unions << (8 * units), 0))
    if row_tile == 0:
        tl.store(NUM_ITEMS, (count + ROWS - 1) // ROWS)


@triton.jit(do_not_specialize=["M", "row_tiles"])
def _unions_kernel(
    PATTERNS, COUNTS, UNIONS, PLACES, FOUND, M, row_tiles,
    UNITS: tl.constexpr, UNITS_PADDED: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    row_tile = tl.program_id(0)
    block = tl.program_id(1)
    item = block * row_tiles + row_tile
    count = tl.load(COUNTS + block)
    if row_tile * (UNITS * 64) < count:
        units = tl.arange(0, UNITS_PADDED)
        places = row_tile * (UNITS * 64) + units[:, None] * 64 + tl.arange(0, 64)[None, :]
        inside = (places < count) & (units < UNITS)[:, None]
        pattern = tl.load(PATTERNS + block * M + places, mask=inside, other=0)
        union = tl.reduce(pattern, 1, _either)
        every = tl.reduce(union, 0, _either)
        cost = _number_of_groups(every, S)
        tl.store(UNIONS + item, tl.sum(union << (8 * units), 0))
        # Place among the tiles of the same cost; which comes first does not matter.
        place = tl.atomic_add(FOUND + cost, 1, sem="relaxed")
        tl.store(PLACES + item, cost * 16777216 + place)
        tl.atomic_add(FOUND + 9, 1, sem="relaxed")
    else:
        tl.store(PLACES + item, -1)


@triton.jit(do_not_specialize=["capacity"])
def _items_kernel(UNIONS, PLACES, FOUND, ITEMS, capacity):
    item = tl.program_id(0) * 128 + tl.arange(0, 128)
    packed = tl.load(PLACES + item, mask=item < capacity, other=-1)
    union = tl.load(UNIONS + item, mask=packed >= 0, other=0)
    cost = packed >> 24
    place = packed & 16777215
    for other in tl.static_range(9):
        found = tl.load(FOUND + other)
        place += tl.where(cost < other, found, 0)
    tl.store(ITEMS + 2 * place, item, mask=packed >= 0)
    tl.store(ITEMS + 2 * place + 1, union, mask=packed >= 0)


class _Runner(NamedTuple):
    """What all launches of one call share."""

    h: torch.Tensor
    weight: torch.Tensor
    order: PatternReordering
    group_size: int
    shape: Shape
    work: Work

    def __call__(
        self, out: torch.Tensor, column: int, out_column: int, columns: int, writes: int, bias: torch.Tensor | None
    ) -> None:
        """Launch the kernel for some columns: from `column` of the weights to `out_column` of `out`."""
        shape, order = self.shape, self.order
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        parts = columns // shape.block_n
        capacity = self.work.items.shape[0]
        num_rows = order.index.shape[1]
        _gemm_k_kernel[(min(capacity * parts, device_facts(out.device).num_sms),)](
            self.h,
            TensorDescriptor.from_tensor(self.weight, [shape.block_n, BLOCK_K], layout),
            out,
            self.weight if bias is None else bias,
            order.index,
            order.patterns,
            order.counts,
            self.work.items,
            self.work.num_items,
            num_rows,
            triton.cdiv(num_rows, UNIT_ROWS * shape.units),
            parts,
            column,
            out_column,
            self.h.stride(0),
            out.stride(0),
            S=order.groups_per_block,
            G=self.group_size,
            BLOCK_N=shape.block_n,
            INSTRUCTION_N=shape.instruction_n,
            UNITS=shape.units,
            STAGES=shape.stages,
            WRITES=writes,
            HAS_BIAS=bias is not None,
            CONSUMER_REGISTERS=shape.consumer_registers,
            PRODUCER_REGISTERS=shape.producer_registers,
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
    stride_h, S: gl.constexpr, G: gl.constexpr, BLOCK_N: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
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
        places = (tile % row_tiles) * (64 * UNITS) + lanes
        listed = block * M + places
        column = first_column + (item % parts) * BLOCK_N
        row0 = gl.load(INDEX + listed, mask=places < count, other=0) * stride_h
        row1 = gl.load(INDEX + listed + 64, mask=places + 64 < count, other=0) * stride_h
        pattern0 = gl.load(PATTERNS + listed, mask=places < count, other=0)
        pattern1 = gl.load(PATTERNS + listed + 64, mask=places + 64 < count, other=0)
        if UNITS == 3:
            row2 = gl.load(INDEX + listed + 128, mask=places + 128 < count, other=0) * stride_h
            pattern2 = gl.load(PATTERNS + listed + 128, mask=places + 128 < count, other=0)
        for member in range(S):
            if ((unions | (unions >> 8) | (unions >> 16)) >> member) & 1 != 0:
                channel = (block * S + member) * G
                for k in range(channel, channel + G, BLOCK_K):
                    mbarrier.wait(empty.index(stage), phase)
                    mbarrier.expect(full.index(stage), BLOCK_N * BLOCK_K * 2)
                    tma.async_copy_global_to_shared(W, [column, k], full.index(stage), b_ring.index(stage))
                    a = stage * UNITS
                    _copy_unit(a_ring.index(a), H + k, row0, pattern0, member, unions, ks)
                    _copy_unit(a_ring.index(a + 1), H + k, row1, pattern1, member, unions >> 8, ks)
                    if UNITS == 3:
                        _copy_unit(a_ring.index(a + 2), H + k, row2, pattern2, member, unions >> 16, ks)
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
    INSTRUCTION_N: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, WRITES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, INSTRUCTION_N, 16]
    )
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    num_items = gl.load(NUM_ITEMS) * parts
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = gl.load(ITEMS + 2 * (item // parts))
        unions = gl.load(ITEMS + 2 * (item // parts) + 1)
        every = (unions | (unions >> 8) | (unions >> 16)) & 255
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
                        total = warpgroup_mma(a_ring.index(stage * UNITS + UNIT), b, total, is_async=True)
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
        first = (tile % row_tiles) * (64 * UNITS) + UNIT * 64
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
    stride_h, stride_out, S: gl.constexpr, G: gl.constexpr, BLOCK_N: gl.constexpr, INSTRUCTION_N: gl.constexpr,
    UNITS: gl.constexpr, STAGES: gl.constexpr, WRITES: gl.constexpr, HAS_BIAS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_K: gl.constexpr = W.block_shape[1]
    a_ring = gl.allocate_shared_memory(W.dtype, [STAGES * UNITS, 64, BLOCK_K], W.layout)
    b_ring = gl.allocate_shared_memory(W.dtype, [STAGES, BLOCK_N, BLOCK_K], W.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Every producer thread arrives when its copies have landed, and once more with the bytes of the weights.
        mbarrier.init(full.index(stage), count=128 + 1)
        mbarrier.init(empty.index(stage), count=UNITS)
    if UNITS == 3:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (OUT, BIAS, INDEX, COUNTS, ITEMS, NUM_ITEMS, a_ring, b_ring, full, empty, M, row_tiles, parts,
                     first_column, first_out_column, stride_out, 0, S, G, BLOCK_N, INSTRUCTION_N, UNITS, STAGES, WRITES,
                     HAS_BIAS),
                ),
                (
                    _consume,
                    (OUT, BIAS, INDEX, COUNTS, ITEMS, NUM_ITEMS, a_ring, b_ring, full, empty, M, row_tiles, parts,
                     first_column, first_out_column, stride_out, 1, S, G, BLOCK_N, INSTRUCTION_N, UNITS, STAGES, WRITES,
                     HAS_BIAS),
                ),
                (
                    _consume,
                    (OUT, BIAS, INDEX, COUNTS, ITEMS, NUM_ITEMS, a_ring, b_ring, full, empty, M, row_tiles, parts,
                     first_column, first_out_column, stride_out, 2, S, G, BLOCK_N, INSTRUCTION_N, UNITS, STAGES, WRITES,
                     HAS_BIAS),
                ),
                (
                    _produce,
                    (H, W, INDEX, PATTERNS, COUNTS, ITEMS, NUM_ITEMS, a_ring, b_ring, full, empty, M, row_tiles, parts,
                     first_column, stride_h, S, G, BLOCK_N, UNITS, STAGES),
                ),
            ],
            [4, 4, 4],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (OUT, BIAS, INDEX, COUNTS, ITEMS, NUM_ITEMS, a_ring, b_ring, full, empty, M, row_tiles, parts,
                     first_column, first_out_column, stride_out, 0, S, G, BLOCK_N, INSTRUCTION_N, UNITS, STAGES, WRITES,
                     HAS_BIAS),
                ),
                (
                    _consume,
                    (OUT, BIAS, INDEX, COUNTS, ITEMS, NUM_ITEMS, a_ring, b_ring, full, empty, M, row_tiles, parts,
                     first_column, first_out_column, stride_out, 1, S, G, BLOCK_N, INSTRUCTION_N, UNITS, STAGES, WRITES,
                     HAS_BIAS),
                ),
                (
                    _produce,
                    (H, W, INDEX, PATTERNS, COUNTS, ITEMS, NUM_ITEMS, a_ring, b_ring, full, empty, M, row_tiles, parts,
                     first_column, stride_h, S, G, BLOCK_N, UNITS, STAGES),
                ),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
