"""Pattern sort in Triton: a counting sort in two launches, no host synchronisation."""

from typing import Any

import torch
import triton
import triton.language as tl

# Rows that one program sorts at a time: comparing all pairs of a step beats bins by far.
_SORT_STEP = 128
# Every program adds up the histograms of its super-block; small chunks are for when that is little to read in all.
_SORT_CHUNKS = (128, 512)
_MAX_BYTES_READ = 2**25


def _chunk_rows(num_rows: int, num_blocks: int, bins: int) -> int:
    """Return the rows that one program sorts."""
    small, large = _SORT_CHUNKS
    return small if num_blocks * triton.cdiv(num_rows, small) ** 2 * bins * 4 <= _MAX_BYTES_READ else large


def reorder_patterns(
    mask: torch.Tensor, *, block_m: int, groups_per_block: int, keeps_empty: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `reorder_patterns_reference` as a counting sort in two kernels."""
    num_rows, num_groups = mask.shape
    num_blocks = triton.cdiv(num_groups, groups_per_block)
    max_row_tiles = triton.cdiv(num_rows, block_m)
    new: dict[str, Any] = {"dtype": torch.int32, "device": mask.device}
    index = torch.empty(num_blocks, num_rows, **new)
    patterns = torch.empty(num_blocks, num_rows, **new)
    counts = torch.empty(num_blocks, **new)
    tiles = torch.empty(num_blocks * max_row_tiles, 2, **new)
    num_tiles = torch.empty(1, **new)
    bins = max(32, 2**groups_per_block)
    chunk = _chunk_rows(num_rows, num_blocks, bins)
    num_chunks = triton.cdiv(num_rows, chunk)
    histogram = torch.empty(num_blocks, num_chunks, bins, **new)
    codes = torch.empty(num_blocks, num_chunks * chunk, dtype=torch.uint8, device=mask.device)
    raw = mask.view(torch.uint8)
    _histogram_kernel[(num_chunks, num_blocks)](
        raw,
        codes,
        histogram,
        num_rows,
        num_groups,
        num_chunks,
        *raw.stride(),
        S=groups_per_block,
        BITS=triton.next_power_of_2(groups_per_block),
        CHUNK=chunk,
        BINS=bins,
        num_warps=4,
    )
    _sort_kernel[(num_chunks + 1, num_blocks)](
        codes,
        histogram,
        index,
        patterns,
        counts,
        tiles,
        num_tiles,
        num_rows,
        num_chunks,
        num_blocks,
        CHUNK=chunk,
        STEP=_SORT_STEP,
        BINS=bins,
        ALL_BLOCKS=max(16, triton.next_power_of_2(num_blocks)),
        BLOCK_M=block_m,
        KEEPS_EMPTY=keeps_empty,
        num_warps=4,
    )
    return index, patterns, counts, tiles, num_tiles


@triton.jit
def _gray_rank(pattern):
    rank = pattern ^ (pattern >> 1)
    rank = rank ^ (rank >> 2)
    return rank ^ (rank >> 4)


@triton.jit
def _histogram_kernel(
    MASK,
    CODES,
    HISTOGRAM,
    M,
    N_G,
    num_chunks,
    stride_m,
    stride_g,
    S: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):
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


@triton.jit
def _sort_kernel(
    CODES,
    HISTOGRAM,
    INDEX,
    PATTERNS,
    COUNTS,
    TILES,
    NUM_TILES,
    M,
    num_chunks,
    num_blocks,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BINS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEEPS_EMPTY: tl.constexpr,
):
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
        _describe_blocks(
            HISTOGRAM,
            COUNTS,
            TILES,
            NUM_TILES,
            M,
            num_chunks,
            num_blocks,
            block,
            ALL_BLOCKS,
            BLOCK_M,
            KEEPS_EMPTY,
            BINS,
        )


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


@triton.jit
def _describe_blocks(
    HISTOGRAM,
    COUNTS,
    TILES,
    NUM_TILES,
    M,
    num_chunks,
    num_blocks,
    block,
    ALL_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEEPS_EMPTY: tl.constexpr,
    BINS: tl.constexpr,
):
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
