"""The tile list of GEMM-K for Hopper: what each tile of sorted rows executes, costly ones first."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from wide.kernels.reordering import PatternReordering

# Rows of one consumer: what one warp group's product instruction takes.
UNIT_ROWS = 64
_COSTS = 9
# Every program that describes a tile of a single list reads all patterns: 64 KB.
_MAX_ROWS_READ = 2**14


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
