"""Row tiles of a reordering: in its own launch, or of another size in one more, which nobody waits for."""

import torch
import triton
import triton.language as tl

from wide.kernels.reorder.reference import BAND
from wide.kernels.reordering import Reordering


def row_tiles(order: Reordering, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `tiles` and `num_tiles` as `Reordering` describes them, for tiles of `block_m` rows."""
    if block_m == order.block_m:
        return order.tiles, order.num_tiles
    num_groups, num_rows = order.index.shape
    most = triton.cdiv(num_rows, block_m)
    tiles = order.tiles.new_empty(num_groups * most, 2)
    num_tiles = order.tiles.new_empty(2)
    _tiles_kernel[(triton.cdiv(most, BAND),)](
        order.counts,
        tiles,
        num_tiles,
        num_groups,
        BLOCK_M=block_m,
        BAND=BAND,
        ALL_GROUPS=triton.next_power_of_2(num_groups),
        num_warps=4,
    )
    return tiles, num_tiles


@triton.jit
def _tiles_kernel(COUNTS, TILES, NUM_TILES, N_G, BLOCK_M: tl.constexpr, BAND: tl.constexpr, ALL_GROUPS: tl.constexpr):
    groups = tl.arange(0, ALL_GROUPS)
    count = tl.load(COUNTS + groups, mask=groups < N_G, other=0)
    list_band(count, TILES, NUM_TILES, tl.program_id(0), groups, BLOCK_M, BAND)


@triton.jit
def list_band(total, TILES, NUM_TILES, band, groups, BLOCK_M: tl.constexpr, BAND: tl.constexpr):
    """List the whole tiles of one band, as `_tiles_in_bands` does; the first band lists and counts short ones, too."""
    # A remainder of more than half a tile counts as a whole one, up to a quarter is thin.
    whole = (total + BLOCK_M - BLOCK_M // 2 - 1) // BLOCK_M
    in_band = tl.minimum(tl.maximum(whole - band * BAND, 0), BAND)
    first = tl.sum(tl.minimum(whole, band * BAND), 0) + tl.cumsum(in_band, 0) - in_band
    for step in tl.static_range(BAND):
        tl.store(TILES + 2 * (first + step), groups, mask=step < in_band)
        tl.store(TILES + 2 * (first + step) + 1, tl.zeros_like(groups) + band * BAND + step, mask=step < in_band)
    if band == 0:
        is_short = (total > whole * BLOCK_M).to(tl.int32)
        num_whole = tl.sum(whole, 0)
        num_short = tl.sum(is_short, 0)
        is_thin = is_short * (total <= whole * BLOCK_M + BLOCK_M // 4).to(tl.int32)
        is_thick = is_short - is_thin
        among = tl.where(
            is_thin != 0, tl.sum(is_thick, 0) + tl.cumsum(is_thin, 0) - is_thin, tl.cumsum(is_thick, 0) - is_thick
        )
        place = TILES + 2 * (num_whole + among)
        tl.store(place, groups, mask=is_short != 0)
        tl.store(place + 1, whole, mask=is_short != 0)
        tl.store(NUM_TILES, num_whole + num_short)
        tl.store(NUM_TILES + 1, num_short)
