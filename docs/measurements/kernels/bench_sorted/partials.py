"""What follows super-blocks whose sums were stored one by one: add what belongs to a row, in float32."""

import torch
import triton
import triton.language as tl


@triton.jit
def _invert_kernel(INDEX, COUNTS, RANK, M, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    block = tl.program_id(1)
    listed = places < tl.load(COUNTS + block)
    rows = tl.load(INDEX + block * M + places, mask=listed, other=0)
    tl.store(RANK + block * M + rows, places, mask=listed)


@triton.jit
def _add_kernel(PARTS, SCALES, RANK, OUT, M, N, TILES, BLOCKS: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    total = tl.zeros((COLUMNS,), tl.float32)
    for block in tl.static_range(BLOCKS):
        place = tl.load(RANK + block * M + row)
        line = (block * M + place).to(tl.int64)
        listed = inside & (place >= 0)
        scale = tl.load(SCALES + line * TILES + columns // BN, mask=listed, other=0.0)
        values = tl.load(PARTS + line * N + columns, mask=listed, other=0.0, eviction_policy="evict_first")
        total += values.to(tl.float32) * scale
    tl.store(OUT + row.to(tl.int64) * N + columns, total.to(OUT.dtype.element_ty), mask=inside)


def invert(index, counts):
    """Return [blocks, M] int32: a row's place in each block's order, -1 where it is not listed."""
    blocks, rows = index.shape
    rank = torch.full_like(index, -1)
    _invert_kernel[(triton.cdiv(rows, 1024), blocks)](index, counts, rank, rows, BLOCK=1024, num_warps=4)
    return rank


def add(parts, scales, rank, out, bn, columns=1024, num_warps=4):
    """Write to `out` [M, N] the sum over blocks of the rows' scaled partial sums [blocks * M, N]."""
    rows, width = out.shape
    _add_kernel[(rows, triton.cdiv(width, columns))](
        parts, scales, rank, out, rows, width, scales.shape[1], BLOCKS=rank.shape[0], BN=bn, COLUMNS=columns, num_warps=num_warps
    )
    return out
