"""Reorder in Triton: count per chunk of rows, then place; two launches, no host synchronisation."""

from typing import Any

import torch
import triton
import triton.language as tl

from wide.kernels.reorder.reference import BAND

# Rows and groups that one program places; 32 one-byte groups are one memory sector of a mask row.
_GROUP_TILE = 32
_BIN_TILE = 32


def _chunk_rows(num_rows: int) -> int:
    """Return the rows of a chunk: enough chunks to fill a GPU, few enough that summing their counts stays cheap."""
    return 128 if num_rows <= 4096 else 256


def reorder(
    mask: torch.Tensor, *, block_m: int, with_rank: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `reorder_reference` in two kernels."""
    num_rows, num_groups = mask.shape
    max_row_tiles = triton.cdiv(num_rows, block_m)
    new: dict[str, Any] = {"dtype": torch.int32, "device": mask.device}
    index = torch.empty(num_groups, num_rows, **new)
    counts = torch.empty(num_groups, **new)
    offsets = torch.empty(num_groups + 1, **new)
    tiles = torch.empty(num_groups * max_row_tiles, 2, **new)
    num_tiles = torch.empty(1, **new)
    rank = torch.empty(num_rows if with_rank else 0, num_groups if with_rank else 0, **new)
    _place_rows(
        mask.view(torch.uint8).unsqueeze(0),
        index,
        counts,
        rank if with_rank else None,
        (offsets, tiles, num_tiles, block_m),
    )
    return index, counts, offsets, tiles, num_tiles, rank if with_rank else rank.view(0)


def reorder_sequences(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `reorder_sequences_reference` in two kernels."""
    num_sequences, num_tokens, num_groups = mask.shape
    index = torch.empty(num_sequences, num_groups, num_tokens, dtype=torch.int32, device=mask.device)
    counts = torch.empty(num_sequences, num_groups, dtype=torch.int32, device=mask.device)
    _place_rows(mask.view(torch.uint8), index, counts, None, None)
    return index, counts


def _place_rows(
    mask: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    rank: torch.Tensor | None,
    descriptors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int] | None,
) -> None:
    num_sequences, num_rows, num_groups = mask.shape
    chunk = _chunk_rows(num_rows)
    num_chunks = triton.cdiv(num_rows, chunk)
    group_tiles = triton.cdiv(num_groups, _GROUP_TILE)
    chunk_counts = torch.empty(num_sequences, num_chunks, num_groups, dtype=torch.int32, device=mask.device)
    _count_kernel[(num_chunks, group_tiles, num_sequences)](
        mask, chunk_counts, num_rows, num_groups, *mask.stride(), CHUNK=chunk, GROUP_TILE=_GROUP_TILE, num_warps=4
    )
    offsets, tiles, num_tiles, block_m = descriptors or (counts, counts, counts, 1)
    bands = triton.cdiv(triton.cdiv(num_rows, block_m), BAND) if descriptors else 0
    _place_kernel[(num_chunks + bands, group_tiles, num_sequences)](
        mask,
        chunk_counts,
        index,
        counts,
        counts if rank is None else rank,
        offsets,
        tiles,
        num_tiles,
        num_rows,
        num_groups,
        num_chunks,
        *mask.stride(),
        CHUNK=chunk,
        GROUP_TILE=_GROUP_TILE,
        ALL_GROUPS=max(16, triton.next_power_of_2(num_groups)),
        BLOCK_M=block_m,
        BAND=BAND,
        WITH_RANK=rank is not None,
        num_warps=8,
    )


@triton.jit
def _count_kernel(
    MASK, CHUNK_COUNTS, M, N_G, stride_b, stride_m, stride_g, CHUNK: tl.constexpr, GROUP_TILE: tl.constexpr
):
    chunk = tl.program_id(0)
    sequence = tl.program_id(2).to(tl.int64)
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    groups = tl.program_id(1) * GROUP_TILE + tl.arange(0, GROUP_TILE)
    inside = (rows < M)[:, None] & (groups < N_G)[None, :]
    place = rows.to(tl.int64)[:, None] * stride_m + groups[None, :] * stride_g
    executes = tl.load(MASK + sequence * stride_b + place, mask=inside, other=0).to(tl.int32)
    out = CHUNK_COUNTS + (sequence * tl.cdiv(M, CHUNK) + chunk) * N_G
    tl.store(out + groups, tl.sum(executes, 0), mask=groups < N_G)


@triton.jit
def _place_kernel(
    MASK,
    CHUNK_COUNTS,
    INDEX,
    COUNTS,
    RANK,
    OFFSETS,
    TILES,
    NUM_TILES,
    M,
    N_G,
    num_chunks,
    stride_b,
    stride_m,
    stride_g,
    CHUNK: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND: tl.constexpr,
    WITH_RANK: tl.constexpr,
):
    chunk = tl.program_id(0)
    group_tile = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    chunk_counts = CHUNK_COUNTS + sequence * num_chunks * N_G
    if chunk < num_chunks:
        groups = group_tile * GROUP_TILE + tl.arange(0, GROUP_TILE)
        before = _sum_of_chunks(chunk_counts, chunk, groups, N_G, GROUP_TILE)
        rows = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = (rows < M)[:, None] & (groups < N_G)[None, :]
        place = rows.to(tl.int64)[:, None] * stride_m + groups[None, :] * stride_g
        executes = tl.load(MASK + sequence * stride_b + place, mask=inside, other=0).to(tl.int32)
        # Transposed, so that neighbouring lanes hold neighbouring rows and write neighbouring list entries.
        executes = tl.trans(executes)
        position = before[:, None] + tl.cumsum(executes, 1) - executes
        lists = INDEX + (sequence * N_G + groups.to(tl.int64)) * M
        listed = tl.broadcast_to(rows[None, :], (GROUP_TILE, CHUNK))
        tl.store(lists[:, None] + position, listed, mask=executes != 0)
        if WITH_RANK:
            ranks = RANK + rows.to(tl.int64)[None, :] * N_G + groups[:, None]
            ranked = (rows < M)[None, :] & (groups < N_G)[:, None]
            tl.store(ranks, tl.where(executes != 0, position, -1), mask=ranked)
        if chunk == num_chunks - 1:
            total = before + tl.sum(executes, 1)
            tl.store(COUNTS + sequence * N_G + groups, total, mask=groups < N_G)
    elif group_tile == 0:
        band = chunk - num_chunks
        groups = tl.arange(0, ALL_GROUPS)
        total = _sum_of_chunks(chunk_counts, num_chunks, groups, N_G, ALL_GROUPS)
        row_tiles = (total + BLOCK_M - 1) // BLOCK_M
        in_band = tl.minimum(tl.maximum(row_tiles - band * BAND, 0), BAND)
        first = tl.sum(tl.minimum(row_tiles, band * BAND), 0) + tl.cumsum(in_band, 0) - in_band
        for step in tl.static_range(BAND):
            tl.store(TILES + 2 * (first + step), groups, mask=step < in_band)
            tl.store(TILES + 2 * (first + step) + 1, tl.zeros_like(groups) + band * BAND + step, mask=step < in_band)
        if band == 0:
            tl.store(NUM_TILES, tl.sum(row_tiles, 0))
            tl.store(OFFSETS + groups + 1, tl.cumsum(total, 0), mask=groups < N_G)
            tl.store(OFFSETS, 0)


@triton.jit
def _sum_of_chunks(chunk_counts, end, groups, N_G, GROUPS: tl.constexpr):
    CHUNKS: tl.constexpr = 4096 // GROUPS if GROUPS <= 1024 else 4
    total = tl.zeros((GROUPS,), tl.int32)
    for start in range(0, end, CHUNKS):
        chunks = start + tl.arange(0, CHUNKS)
        inside = (chunks < end)[:, None] & (groups < N_G)[None, :]
        part = tl.load(chunk_counts + chunks[:, None] * N_G + groups[None, :], mask=inside, other=0)
        total += tl.sum(part, 0)
    return total


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
    chunk = _chunk_rows(num_rows)
    num_chunks = triton.cdiv(num_rows, chunk)
    bins = 2**groups_per_block
    bin_tile = min(bins, _BIN_TILE)
    histogram = torch.empty(num_blocks, num_chunks, bins, **new)
    raw = mask.view(torch.uint8)
    sizes = {"S": groups_per_block, "CHUNK": chunk, "BINS": bins, "BIN_TILE": bin_tile, "num_warps": 8}
    _histogram_kernel[(num_chunks, num_blocks)](raw, histogram, num_rows, num_groups, *raw.stride(), **sizes)
    _sort_kernel[(num_chunks + 1, num_blocks)](
        raw,
        histogram,
        index,
        patterns,
        counts,
        tiles,
        num_tiles,
        num_rows,
        num_groups,
        num_chunks,
        num_blocks,
        *raw.stride(),
        ALL_BLOCKS=max(16, triton.next_power_of_2(num_blocks)),
        BLOCK_M=block_m,
        KEEPS_EMPTY=keeps_empty,
        **sizes,
    )
    return index, patterns, counts, tiles, num_tiles


@triton.jit
def _patterns_of(MASK, rows, block, M, N_G, stride_m, stride_g, S: tl.constexpr, CHUNK: tl.constexpr):
    pattern = tl.zeros((CHUNK,), tl.int32)
    for bit in tl.static_range(S):
        group = block * S + bit
        executes = tl.load(
            MASK + rows.to(tl.int64) * stride_m + group * stride_g, mask=(rows < M) & (group < N_G), other=0
        )
        pattern |= executes.to(tl.int32) << bit
    return pattern


@triton.jit
def _gray_rank(pattern):
    rank = pattern ^ (pattern >> 1)
    rank = rank ^ (rank >> 2)
    return rank ^ (rank >> 4)


@triton.jit
def _histogram_kernel(
    MASK,
    HISTOGRAM,
    M,
    N_G,
    stride_m,
    stride_g,
    S: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    BIN_TILE: tl.constexpr,
):
    chunk = tl.program_id(0)
    block = tl.program_id(1)
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    key = _gray_rank(_patterns_of(MASK, rows, block, M, N_G, stride_m, stride_g, S, CHUNK))
    key = tl.where(rows < M, key, BINS)
    out = HISTOGRAM + (block * tl.cdiv(M, CHUNK) + chunk) * BINS
    for start in range(0, BINS, BIN_TILE):
        bins = start + tl.arange(0, BIN_TILE)
        tl.store(out + bins, tl.sum((key[:, None] == bins[None, :]).to(tl.int32), 0))


@triton.jit
def _sort_kernel(
    MASK,
    HISTOGRAM,
    INDEX,
    PATTERNS,
    COUNTS,
    TILES,
    NUM_TILES,
    M,
    N_G,
    num_chunks,
    num_blocks,
    stride_m,
    stride_g,
    ALL_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEEPS_EMPTY: tl.constexpr,
    S: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    BIN_TILE: tl.constexpr,
):
    chunk = tl.program_id(0)
    block = tl.program_id(1)
    if chunk < num_chunks:
        rows = chunk * CHUNK + tl.arange(0, CHUNK)
        pattern = _patterns_of(MASK, rows, block, M, N_G, stride_m, stride_g, S, CHUNK)
        key = _gray_rank(pattern)
        listed = rows < M
        if not KEEPS_EMPTY:
            listed &= pattern != 0
        position = tl.zeros((CHUNK,), tl.int32)
        smaller = 0
        for start in range(0, BINS, BIN_TILE):
            bins = start + tl.arange(0, BIN_TILE)
            total = tl.zeros((BIN_TILE,), tl.int32)
            before = tl.zeros((BIN_TILE,), tl.int32)
            for first in range(0, num_chunks, 64):
                chunks = first + tl.arange(0, 64)
                parts = HISTOGRAM + (block * num_chunks + chunks)[:, None] * BINS + bins[None, :]
                part = tl.load(parts, mask=(chunks < num_chunks)[:, None], other=0)
                total += tl.sum(part, 0)
                before += tl.sum(tl.where((chunks < chunk)[:, None], part, 0), 0)
            if not KEEPS_EMPTY:
                total = tl.where(bins == 0, 0, total)
            hit = (listed[:, None] & (key[:, None] == bins[None, :])).to(tl.int32)
            base = smaller + tl.cumsum(total, 0) - total + before
            position += tl.sum(hit * (base[None, :] + tl.cumsum(hit, 0) - hit), 1)
            smaller += tl.sum(total, 0)
        out = block.to(tl.int64) * M + position
        tl.store(INDEX + out, rows, mask=listed)
        tl.store(PATTERNS + out, pattern, mask=listed)
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
