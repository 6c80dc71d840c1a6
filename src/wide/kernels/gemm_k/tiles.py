"""Tiles of the kernels of GEMM-K."""

from typing import NamedTuple

import torch

from wide.kernels.device import device_facts
from wide.kernels.gemm_mn.tiles import largest_tile


class KTile(NamedTuple):
    """Tile of the kernels in Triton and in TileLang, for which the first four fields and `slab` count.

    The rows of a tile come from `PatternReordering.block_m`.

    Args:
        block_n: Output columns of a tile; divides the output width.
        block_k: Reduction elements of a pipeline stage; divides the group size.
        num_stages: Pipeline stages.
        num_warps: Warps of a program.
        ctas_per_sm: Programs launched per multiprocessor; two hide one's epilogue behind the other's products.
        weights_by: 0 pointers, 1 tensor-memory access (sm_90 and newer). Where rows of weights are not a multiple of 16
            bytes apart, as that access wants, 1 means 0: tiles of tables and of `wide tune` come from other shapes,
            too, and what they say of everything else still holds.
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


STORED_TILE = (128, 256)
"""Rows of two consumers, and columns of the output: the one tile of the kernels in CUDA C++, which store rows once."""


def default_tile(
    device: torch.device, *, group_size: int, num_rows: int, width: int, block_m: int, dtype: torch.dtype
) -> KTile:
    """Return a tile that fits the device; measured tables replace it."""
    facts = device_facts(device)
    block_k = largest_tile(group_size, 64 if dtype != torch.float32 else 32)
    block_n = largest_tile(width, 128)
    # Half of the cache holds a float32 slab; the rest is for weights and rows.
    columns = facts.l2_bytes // 2 // (4 * max(1, num_rows))
    slab = 0 if columns >= width else max(block_n, columns // block_n * block_n)
    if facts.capability in (90, 100, 103):
        return KTile(block_n, block_k, 3, 4 if block_m * block_n <= 128 * 128 else 8, 2, 1, slab, 4)
    if facts.capability in (89, 120):
        block_k = min(block_k, 32)
    return KTile(block_n, block_k, 3, 8 if block_m >= 128 else 4, 1, 0, slab)
