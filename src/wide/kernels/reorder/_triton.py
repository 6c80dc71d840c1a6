"""Reorder in Triton, without host synchronisation: lists of rows by group, row tiles, and the sort by patterns.

Lists: transpose and count per chunk of rows, then place; two launches. The sort by patterns is a counting sort, two
launches as well.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from wide.kernels.device import elementwise_obstacle
from wide.kernels.reorder import op
from wide.kernels.reorder.reference import BAND
from wide.kernels.reordering import Reordering

# Groups that one program transposes: 32 one-byte groups are one memory sector of a mask row.
_GROUP_TILE = 32
# Counted chunks that one program places.
_CHUNKS_PLACED = 4
# Rows that one program sorts at a time: comparing all pairs of a step beats bins by far.
_SORT_STEP = 128
# Every program adds up the histograms of its super-block; small chunks are for when that is little to read in all.
_SORT_CHUNKS = (128, 512)
_MAX_BYTES_READ = 2**25


@op.BACKENDS.register("triton", needs=elementwise_obstacle)
def reorder(mask: torch.Tensor, *, block_m: int) -> op.Five:
    """Run `reorder_reference` in two kernels."""
    index, counts, *lists = outputs = op.reorder_outputs(mask, block_m)
    _place_rows(mask.view(torch.uint8).unsqueeze(0), index, counts, (*lists, block_m))
    return outputs


@op.SEQUENCES_BACKENDS.register("triton", needs=elementwise_obstacle)
def reorder_sequences(mask: torch.Tensor) -> op.Two:
    """Run `reorder_sequences_reference` in two kernels."""
    index, counts = op.sequences_outputs(mask)
    _place_rows(mask.view(torch.uint8), index, counts, None)
    return index, counts


def _place_rows(
    mask: torch.Tensor, index: torch.Tensor, counts: torch.Tensor, descriptors: tuple[Any, ...] | None
) -> None:
    num_sequences, num_rows, num_groups = mask.shape
    # Enough chunks to fill a GPU, few enough that summing their counts stays cheap.
    chunk = 128 if num_rows <= 4096 else 256
    num_chunks = triton.cdiv(num_rows, chunk)
    # Padded to a whole vector of the loads that follow.
    padded = triton.cdiv(num_rows, 16) * 16
    columns = torch.empty(num_sequences, num_groups, padded, dtype=torch.uint8, device=mask.device)
    chunk_counts = torch.empty(num_sequences, num_groups, num_chunks, dtype=torch.int32, device=mask.device)
    _transpose_kernel[(num_chunks, triton.cdiv(num_groups, _GROUP_TILE), num_sequences)](
        mask, columns, chunk_counts,
        num_rows, num_groups, num_chunks, padded,
        *mask.stride(),
        CHUNK=chunk, GROUP_TILE=_GROUP_TILE, num_warps=4,
    )  # fmt: skip
    offsets, tiles, num_tiles, block_m = descriptors or (counts, counts, counts, 1)
    bands = triton.cdiv(triton.cdiv(num_rows, block_m), BAND) if descriptors else 0
    wide = chunk * _CHUNKS_PLACED
    num_wide = triton.cdiv(num_rows, wide)
    _place_kernel[(num_wide + triton.cdiv(bands, num_groups), num_groups, num_sequences)](
        columns, chunk_counts, index, counts, offsets, tiles, num_tiles,
        num_rows, num_groups, num_chunks, num_wide, bands, padded,
        WIDE=wide, CHUNKS_PLACED=_CHUNKS_PLACED, ALL_GROUPS=max(16, triton.next_power_of_2(num_groups)),
        BLOCK_M=block_m, BAND=BAND, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "num_chunks", "stride_b"])
def _transpose_kernel(
    MASK, COLUMNS, CHUNK_COUNTS,
    M, N_G, num_chunks, padded,
    stride_b, stride_m, stride_g,
    CHUNK: tl.constexpr, GROUP_TILE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    sequence = tl.program_id(2).to(tl.int64)
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    groups = tl.program_id(1) * GROUP_TILE + tl.arange(0, GROUP_TILE)
    inside = (rows < M)[:, None] & (groups < N_G)[None, :]
    place = rows.to(tl.int64)[:, None] * stride_m + groups[None, :] * stride_g
    executes = tl.load(MASK + sequence * stride_b + place, mask=inside, other=0)
    column = sequence * N_G + groups
    tl.store(CHUNK_COUNTS + column * num_chunks + chunk, tl.sum(executes.to(tl.int32), 0), mask=groups < N_G)
    # Written as columns, so that the next kernel reads and writes neighbouring rows in neighbouring lanes.
    inside = (groups < N_G)[:, None] & (rows < padded)[None, :]
    tl.store(COLUMNS + column[:, None] * padded + rows[None, :], tl.trans(executes), mask=inside)


@triton.jit(do_not_specialize=["M", "num_chunks", "num_wide", "bands"])
def _place_kernel(
    COLUMNS, CHUNK_COUNTS, INDEX, COUNTS, OFFSETS, TILES, NUM_TILES,
    M, N_G, num_chunks, num_wide, bands, padded,
    WIDE: tl.constexpr, CHUNKS_PLACED: tl.constexpr, ALL_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    wide = tl.program_id(0)
    group = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    if wide < num_wide:
        column = sequence * N_G + group
        before = tl.zeros((128,), tl.int32)
        end = wide * CHUNKS_PLACED
        for first in range(0, end, 128):
            chunks = first + tl.arange(0, 128)
            before += tl.load(CHUNK_COUNTS + column * num_chunks + chunks, mask=chunks < end, other=0)
        base = tl.sum(before, 0)
        rows = wide * WIDE + tl.arange(0, WIDE)
        executes = tl.load(COLUMNS + column * padded + rows, mask=rows < padded, other=0).to(tl.int32)
        position = base + tl.cumsum(executes, 0) - executes
        tl.store(INDEX + column * M + position, rows, mask=executes != 0)
        if wide == num_wide - 1:
            tl.store(COUNTS + column, base + tl.sum(executes, 0))
    else:
        band = (wide - num_wide) * N_G + group
        if band < bands:
            groups = tl.arange(0, ALL_GROUPS)
            total = _sum_of_chunks(CHUNK_COUNTS, num_chunks, groups, N_G, ALL_GROUPS)
            _list_band(total, TILES, NUM_TILES, band, groups, BLOCK_M, BAND)
            if band == 0:
                tl.store(OFFSETS + groups + 1, tl.cumsum(total, 0), mask=groups < N_G)
                tl.store(OFFSETS, 0)


@triton.jit
def _sum_of_chunks(CHUNK_COUNTS, num_chunks, groups, N_G, GROUPS: tl.constexpr):
    CHUNKS: tl.constexpr = 2048 // GROUPS if GROUPS <= 512 else 4
    total = tl.zeros((GROUPS,), tl.int32)
    for start in range(0, num_chunks, CHUNKS):
        chunks = start + tl.arange(0, CHUNKS)
        inside = (groups < N_G)[:, None] & (chunks < num_chunks)[None, :]
        part = tl.load(CHUNK_COUNTS + groups[:, None] * num_chunks + chunks[None, :], mask=inside, other=0)
        total += tl.sum(part, 1)
    return total


def row_tiles(order: Reordering, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `tiles` and `num_tiles` as `Reordering` describes them, for tiles of `block_m` rows."""
    if block_m == order.block_m:
        return order.tiles, order.num_tiles
    num_groups, num_rows = order.index.shape
    most = triton.cdiv(num_rows, block_m)
    tiles = order.tiles.new_empty(num_groups * most, 2)
    num_tiles = order.tiles.new_empty(2)
    _tiles_kernel[(triton.cdiv(most, BAND),)](
        order.counts, tiles, num_tiles,
        num_groups,
        BLOCK_M=block_m, BAND=BAND, ALL_GROUPS=triton.next_power_of_2(num_groups), num_warps=4,
    )  # fmt: skip
    return tiles, num_tiles


@triton.jit
def _tiles_kernel(COUNTS, TILES, NUM_TILES, N_G, BLOCK_M: tl.constexpr, BAND: tl.constexpr, ALL_GROUPS: tl.constexpr):
    groups = tl.arange(0, ALL_GROUPS)
    count = tl.load(COUNTS + groups, mask=groups < N_G, other=0)
    _list_band(count, TILES, NUM_TILES, tl.program_id(0), groups, BLOCK_M, BAND)


@triton.jit
def _list_band(total, TILES, NUM_TILES, band, groups, BLOCK_M: tl.constexpr, BAND: tl.constexpr):
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


@op.PATTERNS_BACKENDS.register("triton", needs=elementwise_obstacle)
def reorder_patterns(mask: torch.Tensor, *, block_m: int, groups_per_block: int, keeps_empty: bool) -> op.Five:
    """Run `reorder_patterns_reference` as a counting sort in two kernels."""
    num_rows, num_groups = mask.shape
    num_blocks = triton.cdiv(num_groups, groups_per_block)
    outputs = op.patterns_outputs(mask, block_m, groups_per_block)
    bins = max(32, 2**groups_per_block)
    small, large = _SORT_CHUNKS
    chunk = small if num_blocks * triton.cdiv(num_rows, small) ** 2 * bins * 4 <= _MAX_BYTES_READ else large
    num_chunks = triton.cdiv(num_rows, chunk)
    histogram = torch.empty(num_blocks, num_chunks, bins, dtype=torch.int32, device=mask.device)
    codes = torch.empty(num_blocks, num_chunks * chunk, dtype=torch.uint8, device=mask.device)
    raw = mask.view(torch.uint8)
    _histogram_kernel[(num_chunks, num_blocks)](
        raw, codes, histogram,
        num_rows, num_groups, num_chunks,
        *raw.stride(),
        S=groups_per_block, BITS=triton.next_power_of_2(groups_per_block), CHUNK=chunk, BINS=bins, num_warps=4,
    )  # fmt: skip
    _sort_kernel[(num_chunks + 1, num_blocks)](
        codes, histogram, *outputs,
        num_rows, num_chunks, num_blocks,
        CHUNK=chunk, STEP=_SORT_STEP, BINS=bins, ALL_BLOCKS=max(16, triton.next_power_of_2(num_blocks)),
        BLOCK_M=block_m, KEEPS_EMPTY=keeps_empty, num_warps=4,
    )  # fmt: skip
    return outputs


@triton.jit
def _gray_rank(pattern):
    rank = pattern ^ (pattern >> 1)
    rank = rank ^ (rank >> 2)
    return rank ^ (rank >> 4)


@triton.jit(do_not_specialize=["M", "num_chunks"])
def _histogram_kernel(
    MASK, CODES, HISTOGRAM,
    M, N_G, num_chunks,
    stride_m, stride_g,
    S: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    block = tl.program_id(1)
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    bits = tl.arange(0, BITS)
    groups = block * S + bits
    inside = (rows < M)[:, None] & ((bits < S) & (groups < N_G))[None, :]
    places = MASK + rows.to(tl.int64)[:, None] * stride_m + groups[None, :] * stride_g
    executes = tl.load(places, mask=inside, other=0).to(tl.int32)
    pattern = tl.sum(executes << bits[None, :], 1)
    tl.store(CODES + (block.to(tl.int64) * num_chunks * CHUNK + rows), pattern.to(tl.uint8))
    found = tl.histogram(_gray_rank(pattern), BINS, mask=rows < M)
    tl.store(HISTOGRAM + (block * num_chunks + chunk) * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["M", "num_chunks"])
def _sort_kernel(
    CODES, HISTOGRAM, INDEX, PATTERNS, COUNTS, TILES, NUM_TILES,
    M, num_chunks, num_blocks,
    CHUNK: tl.constexpr, STEP: tl.constexpr, BINS: tl.constexpr, ALL_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
    KEEPS_EMPTY: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    block = tl.program_id(1)
    if chunk < num_chunks:
        base = _first_places(HISTOGRAM, block, chunk, num_chunks, BINS, KEEPS_EMPTY)
        codes = CODES + block.to(tl.int64) * num_chunks * CHUNK
        for start in tl.static_range(0, CHUNK, STEP):
            steps = tl.arange(0, STEP)
            rows = chunk * CHUNK + start + steps
            pattern = tl.load(codes + rows).to(tl.int32)
            key = _gray_rank(pattern)
            # The place among these rows with the same key; what lies beyond the last row comes after all of them.
            earlier = (key[None, :] == key[:, None]) & (steps[None, :] < steps[:, None])
            position = tl.sum(earlier.to(tl.int32), 1) + tl.gather(base, key, 0)
            listed = rows < M
            if not KEEPS_EMPTY:
                listed &= pattern != 0
            out = block.to(tl.int64) * M + position
            tl.store(INDEX + out, rows, mask=listed)
            tl.store(PATTERNS + out, pattern, mask=listed)
            if start + STEP < CHUNK:
                base += tl.histogram(key, BINS, mask=rows < M)
    else:
        blocks = tl.arange(0, ALL_BLOCKS)
        count = tl.where(blocks < num_blocks, M, 0)
        if not KEEPS_EMPTY:
            # Bin 0 of every histogram holds the rows that execute nothing.
            for first in range(0, num_chunks, 64):
                chunks = first + tl.arange(0, 64)
                parts = HISTOGRAM + (blocks[:, None] * num_chunks + chunks[None, :]) * BINS
                inside = (blocks < num_blocks)[:, None] & (chunks < num_chunks)[None, :]
                count -= tl.sum(tl.load(parts, mask=inside, other=0), 1)
        row_tiles = (count + BLOCK_M - 1) // BLOCK_M
        mine = tl.sum(tl.where(blocks == block, row_tiles, 0), 0)
        first_tile = tl.sum(tl.where(blocks < block, row_tiles, 0), 0)
        for start in range(0, mine, 128):
            steps = start + tl.arange(0, 128)
            tl.store(TILES + 2 * (first_tile + steps), tl.zeros_like(steps) + block, mask=steps < mine)
            tl.store(TILES + 2 * (first_tile + steps) + 1, steps, mask=steps < mine)
        if block == 0:
            tl.store(NUM_TILES, tl.sum(row_tiles, 0))
            tl.store(COUNTS + blocks, count, mask=blocks < num_blocks)


@triton.jit
def _first_places(HISTOGRAM, block, chunk, num_chunks, BINS: tl.constexpr, KEEPS_EMPTY: tl.constexpr):
    """Return where the rows of a chunk start in every bin of the whole list."""
    PARTS: tl.constexpr = 4096 // BINS
    bins = tl.arange(0, BINS)
    all_parts = tl.zeros((PARTS, BINS), tl.int32)
    parts_before = tl.zeros((PARTS, BINS), tl.int32)
    for first in range(0, num_chunks, PARTS):
        chunks = first + tl.arange(0, PARTS)
        places = HISTOGRAM + (block * num_chunks + chunks)[:, None] * BINS + bins[None, :]
        part = tl.load(places, mask=(chunks < num_chunks)[:, None], other=0)
        all_parts += part
        parts_before += tl.where((chunks < chunk)[:, None], part, 0)
    total = tl.sum(all_parts, 0)
    before = tl.sum(parts_before, 0)
    if not KEEPS_EMPTY:
        total = tl.where(bins == 0, 0, total)
    return tl.cumsum(total, 0) - total + before
