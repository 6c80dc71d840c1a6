"""Reorder in Triton: transpose and count per chunk of rows, then place; two launches, no host synchronisation."""

from typing import Any

import torch
import triton
import triton.language as tl

from wide.kernels.reorder.reference import BAND
from wide.kernels.reorder.tile_list._triton import list_band

# Groups that one program transposes: 32 one-byte groups are one memory sector of a mask row.
_GROUP_TILE = 32
# Counted chunks that one program places.
_CHUNKS_PLACED = 4


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
    num_tiles = torch.empty(2, **new)
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
    # Padded to a whole vector of the loads that follow.
    padded = triton.cdiv(num_rows, 16) * 16
    columns = torch.empty(num_sequences, num_groups, padded, dtype=torch.uint8, device=mask.device)
    chunk_counts = torch.empty(num_sequences, num_groups, num_chunks, dtype=torch.int32, device=mask.device)
    _transpose_kernel[(num_chunks, triton.cdiv(num_groups, _GROUP_TILE), num_sequences)](
        mask,
        columns,
        chunk_counts,
        num_rows,
        num_groups,
        num_chunks,
        padded,
        *mask.stride(),
        CHUNK=chunk,
        GROUP_TILE=_GROUP_TILE,
        num_warps=4,
    )
    offsets, tiles, num_tiles, block_m = descriptors or (counts, counts, counts, 1)
    bands = triton.cdiv(triton.cdiv(num_rows, block_m), BAND) if descriptors else 0
    wide = chunk * _CHUNKS_PLACED
    num_wide = triton.cdiv(num_rows, wide)
    _place_kernel[(num_wide + triton.cdiv(bands, num_groups), num_groups, num_sequences)](
        columns,
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
        num_wide,
        bands,
        padded,
        WIDE=wide,
        CHUNKS_PLACED=_CHUNKS_PLACED,
        ALL_GROUPS=max(16, triton.next_power_of_2(num_groups)),
        BLOCK_M=block_m,
        BAND=BAND,
        WITH_RANK=rank is not None,
        num_warps=4,
    )


@triton.jit
def _transpose_kernel(
    MASK,
    COLUMNS,
    CHUNK_COUNTS,
    M,
    N_G,
    num_chunks,
    padded,
    stride_b,
    stride_m,
    stride_g,
    CHUNK: tl.constexpr,
    GROUP_TILE: tl.constexpr,
):
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


@triton.jit
def _place_kernel(
    COLUMNS,
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
    num_wide,
    bands,
    padded,
    WIDE: tl.constexpr,
    CHUNKS_PLACED: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND: tl.constexpr,
    WITH_RANK: tl.constexpr,
):
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
        if WITH_RANK:
            ranks = RANK + rows.to(tl.int64) * N_G + group
            tl.store(ranks, tl.where(executes != 0, position, -1), mask=rows < M)
        if wide == num_wide - 1:
            tl.store(COUNTS + column, base + tl.sum(executes, 0))
    else:
        band = (wide - num_wide) * N_G + group
        if band < bands:
            _describe_band(
                CHUNK_COUNTS, OFFSETS, TILES, NUM_TILES, band, N_G, num_chunks, ALL_GROUPS, BLOCK_M, BAND
            )  # fmt: skip


@triton.jit
def _describe_band(
    CHUNK_COUNTS, OFFSETS, TILES, NUM_TILES, band, N_G, num_chunks,
    ALL_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    groups = tl.arange(0, ALL_GROUPS)
    total = _sum_of_chunks(CHUNK_COUNTS, num_chunks, groups, N_G, ALL_GROUPS)
    list_band(total, TILES, NUM_TILES, band, groups, BLOCK_M, BAND)
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
