"""Tiles of the kernels of GEMM-MN."""

from typing import NamedTuple

import torch

from wide.kernels.device import device_facts

# How the Triton kernel reads weights: `MnTile.weights_by`.
POINTERS, TMA, TMA_STACKED = 0, 1, 2
CLUSTER_TILE = (256, 256)
"""Rows of a cluster of two programs and weight rows, gate and up together: the one tile of the kernel in CUDA C++."""


class MnTile(NamedTuple):
    """Tile of the kernels in Triton and in TileLang, for which the first four fields count.

    The rows of a tile come from `Reordering.block_m`.

    Args:
        block_n: Channels of a tile (of gate and up each); divides the group size.
        block_k: Reduction elements of a pipeline stage.
        num_stages: Pipeline stages.
        num_warps: Warps of a program.
        ctas_per_sm: Programs launched per multiprocessor.
        weights_by: 0 pointers, 1 tensor-memory access (sm_90 and newer), 2 the same with gate and up as one product;
            needs the up weight right behind the gate weight in memory. Where rows of weights are not a multiple of 16
            bytes long and apart, as that access wants, 1 and 2 mean 0: tiles of tables and of `wide tune` come from
            other shapes, too, and what they say of everything else still holds.
    """

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    ctas_per_sm: int = 1
    weights_by: int = 0


def largest_tile(size: int, limit: int) -> int:
    """Return the largest power of two that divides `size` and is at most `limit`."""
    return min(size & -size, limit)


def default_tile(
    device: torch.device, *, group_size: int, block_m: int, gated: bool, stacked: bool, dtype: torch.dtype
) -> MnTile:
    """Return a tile that fits the device; measured tables replace it."""
    facts = device_facts(device)
    if facts.capability in (90, 100, 103):
        block_n = largest_tile(group_size, 128 if gated else 256)
        warps = 8 if block_m >= 128 and block_n * (2 if gated else 1) >= 128 else 4
        return MnTile(block_n, 64, 4, warps, 1, 2 if gated and stacked else 1)
    block_n = largest_tile(group_size, 64 if gated else 128)
    block_k = 32 if dtype == torch.float32 or facts.capability in (89, 120) else 64
    return MnTile(block_n, block_k, 3, 8 if block_m >= 128 else 4)


def tilelang_tile(device: torch.device, *, group_size: int, block_m: int, gated: bool) -> MnTile:
    """Return a tile of the kernel in TileLang that fits the device and spills nothing."""
    capability = device_facts(device).capability
    if capability == 90 and block_m >= 128 and not gated and group_size % 256 == 0:
        # Fewer rows are loaded twice; a fourth stage does not fit.
        return MnTile(256, 64, 3, 8)
    # On sm_90 those who multiply have the registers of those who load; elsewhere 512 threads share them alike.
    block_n = largest_tile(group_size, 64 if gated and capability != 90 else 128)
    warps = 8 if block_m >= 128 else 4
    if capability in (89, 120):
        return MnTile(block_n, 32, 3, warps)
    return MnTile(block_n, 64, 4 if capability >= 90 else 3, warps)
