"""GEMM-K in Triton: tiles of pattern-sorted rows run the union of their groups, then write or reduce once.

Programs of one launch never wait for each other: everything that must be finished first (zeros, the reductions of a
slab) is an earlier launch on the same stream. The end of the file describes tiles for the
kernels that store each row once.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from wide.kernels.device import device_facts, triton_obstacle
from wide.kernels.dispatch import Candidate, largest_tile, require
from wide.kernels.gemm_k.op import BACKENDS, KShape
from wide.kernels.reordering import BLOCK_M, PATTERN_GROUPS, PatternReordering, RowReordering

# Shared memory through which a finished tile is rearranged for wide writes; larger tiles leave in pieces.
_REARRANGED_BYTES = 32768


class KTile(NamedTuple):
    """How one program is cut.

    The rows of a tile come from `PatternReordering.block_m`.

    Args:
        block_n: Output columns of a tile; divides the output width.
        block_k: Reduction elements of a pipeline stage; divides the group size.
        ctas_per_sm: Programs launched per multiprocessor; two hide one's epilogue behind the other's products.
        weights_by: 0 pointers, 1 tensor-memory access (sm_90 and newer). Where rows of weights are not a multiple of 16
            bytes apart, as that access wants, 1 means 0: tiles of tables and of `wide tune` may come from other
            shapes, and their other fields still hold.
        slab: Output columns swept at a time, a multiple of block_n; 0 means all.
        run: Neighbouring tiles of a row that one program computes in one loop, loading the next while it writes this;
            cut to what divides the tiles in a slab.
    """

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    ctas_per_sm: int = 1
    weights_by: int = 0
    slab: int = 0
    run: int = 1


# Rows of a tile, and the tile.
_TILES = (
    (64, KTile(128, 64, 3, 4, 2, 1, run=4)),
    (64, KTile(128, 64, 3, 4, 3, 1)),
    (64, KTile(128, 64, 4, 4, 2, 1)),
    (64, KTile(256, 64, 4, 4, 1, 1)),
    (64, KTile(256, 64, 2, 4, 2, 1)),
    (128, KTile(128, 64, 3, 4, 2, 1, run=4)),
    (128, KTile(128, 64, 3, 4, 2, 1)),
    (128, KTile(256, 64, 3, 8, 1, 1, run=4)),
    (128, KTile(256, 64, 4, 8, 1, 1)),
)
# Groups in a super-block that are worth trying, by channels of a group.
_SUPER_BLOCKS = {128: (8, 6, 4), 256: (4, 5, 3), 512: (4, 8)}


def default_tile(device: torch.device, shape: KShape, block_m: int) -> KTile:
    """Return a tile that fits the device; measured tables replace it."""
    facts = device_facts(device)
    block_k = largest_tile(shape.group_size, 128 // shape.dtype.itemsize)
    block_n = largest_tile(shape.width, 128)
    # Half of the cache holds a float32 slab; the rest is for weights and rows.
    columns = facts.l2_bytes // 2 // (4 * max(1, shape.num_rows))
    slab = 0 if columns >= shape.width else max(block_n, columns // block_n * block_n)
    if facts.capability in (90, 100, 103):
        # Later than sm_90 sums of int8 stay in registers.
        has_few_sums = block_m * block_n <= 128 * (64 if shape.dtype == torch.int8 and facts.capability != 90 else 128)
        return KTile(block_n, block_k, 3, 4 if has_few_sums else 8, 2, 1, slab, 4)
    if facts.capability in (89, 120):
        block_k = min(block_k, 64 // shape.dtype.itemsize)
    return KTile(block_n, block_k, 3, 8 if block_m >= 128 else 4, 1, 0, slab)


def supports(shape: KShape) -> str | None:
    """Return why no device runs a shape, or None."""
    least = 32 if shape.dtype == torch.int8 else 16
    if shape.group_size % least == 0 and shape.width % 16 == 0:
        return None
    return (
        f"the kernels want groups that are multiples of {least} and a width that is one of 16, got groups of "
        f"{shape.group_size} and a width of {shape.width}"
    )


def candidates(shape: KShape, device: torch.device, few: bool) -> Iterator[Candidate]:
    """Yield the default tile and, unless few are wanted, those worth trying, over super-blocks of some sizes."""
    default = default_tile(device, shape, BLOCK_M)
    tiles = [(BLOCK_M, default)]
    for block_m, tile in () if few else _TILES:
        if shape.dtype == torch.int8:
            # A stage has as many bytes.
            tile = tile._replace(block_k=2 * tile.block_k)
        if shape.width % tile.block_n == 0 and shape.group_size % tile.block_k == 0:
            tiles.append((block_m, tile._replace(slab=default.slab // tile.block_n * tile.block_n)))
    blocks = (PATTERN_GROUPS,) if shape.num_groups <= PATTERN_GROUPS else _SUPER_BLOCKS.get(shape.group_size, (8, 4))
    for block in blocks[:1] if few else blocks:
        for block_m, tile in tiles:
            yield Candidate(tile, block_m, block)


def fitted_tile(tile: Sequence[int] | None, device: torch.device, shape: KShape, block_m: int, **default: int) -> KTile:
    """Return the given tile, or the device's default with some fields replaced.

    Raises UnfitError if it does not fit the shape.
    """
    chosen = KTile(*tile) if tile else default_tile(device, shape, block_m)._replace(**default)
    fit = shape.group_size % chosen.block_k == 0 and shape.width % chosen.block_n == 0
    if not fit or chosen.slab % chosen.block_n or min(block_m, chosen.block_n, chosen.block_k) < 16:
        require(
            f"{chosen} with block_m={block_m} does not work for groups of {shape.group_size} and a width of "
            f"{shape.width}; the kernels want multiples of 16; leave the tile out"
        )
    return chosen


@BACKENDS.register("triton", needs=triton_obstacle, supports=supports, candidates=candidates)
def gemm_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `gemm_k_reference`; the tile is a `KTile`."""
    shape = KShape(h.dtype, h.shape[0], h.shape[1] // group_size, group_size, weight.shape[0])
    chosen = fitted_tile(tile, h.device, shape, order.block_m)
    if weight.stride(0) * weight.element_size() % 16:
        chosen = chosen._replace(weights_by=0)
    num_rows, width = order.index.shape[1], weight.shape[0]
    out = h.new_empty(num_rows, width, dtype=dtype or h.dtype)
    block_n, block_k, tma = chosen.block_n, chosen.block_k, chosen.weights_by == 1
    pieces = triton.cdiv(order.block_m * block_n * 4, _REARRANGED_BYTES)

    def launch(into: torch.Tensor, column: int, num_columns: int, bias: torch.Tensor | None, *, reduces: bool) -> None:
        parts = num_columns // block_n
        # The last slab may be narrower: its run must divide it too.
        run = math.gcd(parts, chosen.run)
        grid = (min(order.tiles.shape[0] * parts // run, chosen.ctas_per_sm * device_facts(h.device).num_sms),)
        _gemm_k_kernel[grid](
            h, TensorDescriptor.from_tensor(weight, [block_n, block_k]) if tma else weight, into, bias, order.index,
            order.patterns, order.counts, order.tiles, order.num_tiles, x_scale, scale,
            num_rows, parts // run, column,
            h.stride(0), weight.stride(0), into.stride(0),
            S=order.groups_per_block, G=group_size, BLOCK_M=order.block_m, BLOCK_N=block_n, BLOCK_K=block_k, RUN=run,
            PIECES=min(4, pieces), REDUCES=reduces, BY_TMA=tma,
            PRECISION="ieee" if h.dtype == torch.float32 else "tf32",
            num_stages=chosen.num_stages, num_warps=chosen.num_warps,
        )  # fmt: skip

    if order.counts.numel() == 1 and order.keeps_empty:
        # One sort covers all groups: every row is in exactly one tile and is written once.
        launch(out, 0, width, bias, reduces=False)
        return out
    slab = min(chosen.slab or width, width)
    # One float32 slab is reused for all columns, so that reductions stay in the second-level cache.
    total = torch.zeros(num_rows, slab, dtype=torch.float32, device=h.device)
    for column in range(0, width, slab):
        columns = min(slab, width - column)
        launch(total, column, columns, None, reduces=True)
        _drain(total[:, :columns], out, column, bias, clears=column + slab < width)
    return out


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _union_of(pattern, S: tl.constexpr):
    # Four bits for each group of the union, so that the product loop finds its group without a load.
    union = tl.reduce(pattern, 0, _either)
    groups = 0
    num_groups = 0
    for bit in tl.static_range(S):
        executes = (union >> bit) & 1
        groups |= (bit * executes) << (4 * num_groups)
        num_groups += executes
    return groups, num_groups


@triton.jit
def _write(
    OUT, BIAS, values, targets, inside, column, first,
    REDUCES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    channels = first + tl.arange(0, WIDTH)
    out = OUT + targets[:, None] + channels[None, :]
    if REDUCES:
        tl.atomic_add(out, values, mask=inside[:, None], sem="relaxed")
    else:
        if BIAS is not None:
            values += tl.load(BIAS + column + channels).to(tl.float32)[None, :]
        tl.store(out, values.to(OUT.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _halves(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return values.reshape(ROWS, 2, WIDTH // 2).permute(0, 2, 1).split()


@triton.jit
def _write_tile(
    OUT, BIAS, total, targets, inside, column, REDUCES: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    # A thread holds columns of every piece, so that cutting a tile moves nothing.
    if PIECES == 1:
        _write(OUT, BIAS, total, targets, inside, column, 0, REDUCES, WIDTH)
    else:
        HALF: tl.constexpr = WIDTH // 2
        left, right = _halves(total, ROWS, WIDTH)
        if PIECES == 2:
            _write(OUT, BIAS, left, targets, inside, column, 0, REDUCES, HALF)
            _write(OUT, BIAS, right, targets, inside, column, HALF, REDUCES, HALF)
        else:
            QUARTER: tl.constexpr = WIDTH // 4
            first, second = _halves(left, ROWS, HALF)
            third, fourth = _halves(right, ROWS, HALF)
            _write(OUT, BIAS, first, targets, inside, column, 0, REDUCES, QUARTER)
            _write(OUT, BIAS, second, targets, inside, column, QUARTER, REDUCES, QUARTER)
            _write(OUT, BIAS, third, targets, inside, column, HALF, REDUCES, QUARTER)
            _write(OUT, BIAS, fourth, targets, inside, column, HALF + QUARTER, REDUCES, QUARTER)


@triton.jit
def _scaled(total, row_scale, SCALE, column, BLOCK_N: tl.constexpr):
    if SCALE is not None:
        factor = tl.load(SCALE + column + tl.arange(0, BLOCK_N))
        total = total.to(tl.float32) * row_scale[:, None] * factor[None, :]
    return total


@triton.jit(do_not_specialize=["M"])
def _gemm_k_kernel(
    H, W, OUT, BIAS, INDEX, PATTERNS, COUNTS, TILES, NUM_TILES, X_SCALE, SCALE,
    M, runs, first_column,
    stride_h, stride_w, stride_out,
    S: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    RUN: tl.constexpr, PIECES: tl.constexpr, REDUCES: tl.constexpr, BY_TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    SUM: tl.constexpr = tl.int32 if X_SCALE is not None else tl.float32
    STEPS: tl.constexpr = G // BLOCK_K
    ks = tl.arange(0, BLOCK_K)
    channels = tl.arange(0, BLOCK_N)
    num_items = tl.load(NUM_TILES) * runs
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        block = tl.load(TILES + 2 * (item // runs))
        row_tile = tl.load(TILES + 2 * (item // runs) + 1)
        count = tl.load(COUNTS + block)
        places = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = places < count
        listed = block * M + places
        rows = tl.load(INDEX + listed, mask=inside, other=0).to(tl.int64)
        pattern = tl.load(PATTERNS + listed, mask=inside, other=0)
        groups, num_groups = _union_of(pattern, S)
        wide_pattern = tl.broadcast_to(pattern[:, None], (BLOCK_M, BLOCK_K))
        first_channel = block * (S * G)
        h_places = H + rows[:, None] * stride_h + ks[None, :] + first_channel
        # A tile without any group still writes its zeros: it multiplies nothing but masked rows.
        num_steps = tl.maximum(num_groups, 1) * STEPS
        part = (item % runs) * (RUN * BLOCK_N)
        step = 0
        total = tl.zeros((BLOCK_M, BLOCK_N), SUM)
        row_scale = rows
        if X_SCALE is not None:
            row_scale = tl.load(X_SCALE + rows, mask=inside, other=0.0)
        # One loop over all column parts: the loads of the next part run while this one is written.
        for _ in range(0, num_steps * RUN):
            member = (groups >> (4 * (step // STEPS))) & 15
            channel = (step % STEPS) * BLOCK_K
            column = first_column + part
            a = tl.load(h_places + (member * G + channel), mask=((wide_pattern >> member) & 1) != 0, other=0)
            if BY_TMA:
                b = W.load([column, first_channel + member * G + channel])
            else:
                w_places = W + (column + channels).to(tl.int64)[:, None] * stride_w
                b = tl.load(w_places + (first_channel + member * G + channel + ks)[None, :])
            total = tl.dot(a, b.T, total, input_precision=PRECISION, out_dtype=SUM)
            step += 1
            if RUN > 1:
                ends = step == num_steps
                if ends:
                    targets = rows * stride_out + part
                    _write_tile(
                        OUT, BIAS, _scaled(total, row_scale, SCALE, column, BLOCK_N), targets, inside, column,
                        REDUCES, BLOCK_M, BLOCK_N, PIECES,
                    )  # fmt: skip
                    total = tl.zeros((BLOCK_M, BLOCK_N), SUM)
                step = tl.where(ends, 0, step)
                part = tl.where(ends, part + BLOCK_N, part)
        if RUN == 1:
            targets = rows * stride_out + part
            column = first_column + part
            _write_tile(
                OUT, BIAS, _scaled(total, row_scale, SCALE, column, BLOCK_N), targets, inside, column,
                REDUCES, BLOCK_M, BLOCK_N, PIECES,
            )  # fmt: skip


def _drain(total: torch.Tensor, out: torch.Tensor, column: int, bias: torch.Tensor | None, *, clears: bool) -> None:
    """Write float32 columns (plus bias) to columns of `out` from `column` on; optionally leave zeros behind."""
    num_rows, num_columns = total.shape
    block = min(1024, triton.next_power_of_2(num_columns))
    grid = (triton.cdiv(num_rows, 4), triton.cdiv(num_columns, block))
    _drain_kernel[grid](
        total, out, bias,
        num_rows, num_columns, column,
        total.stride(0), out.stride(0),
        CLEARS=clears, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _drain_kernel(
    TOTAL, OUT, BIAS,
    M, N, first_column,
    stride_total, stride_out,
    CLEARS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * 4 + tl.arange(0, 4)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    places = TOTAL + rows.to(tl.int64)[:, None] * stride_total + columns[None, :]
    values = tl.load(places, mask=inside, other=0.0)
    if CLEARS:
        # The compiler may give load and store different threads: without this, one clears what another has yet to read.
        tl.debug_barrier()
        tl.store(places, tl.zeros_like(values), mask=inside)
    if BIAS is not None:
        values += tl.load(BIAS + first_column + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out = OUT + rows.to(tl.int64)[:, None] * stride_out + (first_column + columns)[None, :]
    tl.store(out, values.to(OUT.dtype.element_ty), mask=inside)


# Rows of one consumer, what one warp group's product instruction takes, and consumers of a tile.
_UNIT_ROWS, _UNITS = 64, 2
_COSTS = 9
# Every program that describes a tile of a single list reads all patterns: 64 KB.
_MAX_ROWS_READ = 2**14


def in_one_order(order: PatternReordering | RowReordering) -> RowReordering:
    """Return a sort by patterns of one super-block that keeps empty rows as an order of rows with one word of groups.

    In one launch or three, none of which waits.
    """
    if isinstance(order, RowReordering):
        return order
    num_rows = order.index.shape[1]
    row_tiles = triton.cdiv(num_rows, _UNITS * _UNIT_ROWS)
    new: dict[str, Any] = {"dtype": torch.int32, "device": order.index.device}
    unions = torch.empty(_UNITS * row_tiles, 1, **new)
    items = torch.empty(row_tiles, **new)
    shape = {"UNITS": _UNITS, "S": order.groups_per_block}
    if num_rows <= _MAX_ROWS_READ:
        tiles = triton.next_power_of_2(row_tiles)
        _one_list_kernel[(row_tiles,)](order.patterns, unions, items, num_rows, TILES=tiles, **shape, num_warps=8)
        return RowReordering(order.index[0], order.patterns, unions, items)
    places = torch.empty(row_tiles, **new)
    # How many tiles have each cost.
    found = torch.zeros(_COSTS, **new)
    _unions_kernel[(row_tiles,)](order.patterns, unions, places, found, num_rows, **shape, num_warps=1)
    _items_kernel[(triton.cdiv(row_tiles, 128),)](places, found, items, row_tiles, num_warps=4)
    return RowReordering(order.index[0], order.patterns, unions, items)


@triton.jit
def _number_of_groups(union, S: tl.constexpr):
    number = union * 0
    for bit in tl.static_range(S):
        number += (union >> bit) & 1
    return number


@triton.jit
def _union_of_units(PATTERNS, UNIONS, row_tile, num_rows, UNITS: tl.constexpr):
    """Store what each unit of a tile executes, and return what the tile does."""
    units = tl.arange(0, UNITS)
    places = row_tile * (UNITS * 64) + units[:, None] * 64 + tl.arange(0, 64)[None, :]
    union = tl.reduce(tl.load(PATTERNS + places, mask=places < num_rows, other=0), 1, _either)
    tl.store(UNIONS + row_tile * UNITS + units, union)
    return tl.reduce(union, 0, _either)


@triton.jit(do_not_specialize=["num_rows"])
def _one_list_kernel(PATTERNS, UNIONS, ITEMS, num_rows, UNITS: tl.constexpr, TILES: tl.constexpr, S: tl.constexpr):
    """Find the place of one tile: every program looks at all tiles, so that nobody waits for another launch."""
    row_tile = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    places = tiles[:, None] * (UNITS * 64) + tl.arange(0, UNITS * 64)[None, :]
    union = tl.reduce(tl.load(PATTERNS + places, mask=places < num_rows, other=0), 1, _either)
    cost = tl.where(tiles * (UNITS * 64) < num_rows, _number_of_groups(union, S), -1)
    own = _number_of_groups(_union_of_units(PATTERNS, UNIONS, row_tile, num_rows, UNITS), S)
    place = tl.sum(((cost > own) | ((cost == own) & (tiles < row_tile))).to(tl.int32), 0)
    tl.store(ITEMS + place, row_tile)


@triton.jit(do_not_specialize=["num_rows"])
def _unions_kernel(PATTERNS, UNIONS, PLACES, FOUND, num_rows, UNITS: tl.constexpr, S: tl.constexpr):
    row_tile = tl.program_id(0)
    cost = _number_of_groups(_union_of_units(PATTERNS, UNIONS, row_tile, num_rows, UNITS), S)
    # Place among the tiles of the same cost; which comes first does not matter.
    place = tl.atomic_add(FOUND + cost, 1, sem="relaxed")
    tl.store(PLACES + row_tile, cost * 16777216 + place)


@triton.jit(do_not_specialize=["row_tiles"])
def _items_kernel(PLACES, FOUND, ITEMS, row_tiles):
    tile = tl.program_id(0) * 128 + tl.arange(0, 128)
    packed = tl.load(PLACES + tile, mask=tile < row_tiles, other=0)
    cost = packed >> 24
    place = packed & 16777215
    for other in tl.static_range(9):
        found = tl.load(FOUND + other)
        place += tl.where(cost < other, found, 0)
    tl.store(ITEMS + place, tile, mask=tile < row_tiles)
