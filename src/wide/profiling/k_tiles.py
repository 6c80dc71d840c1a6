"""Tiles of GEMM-K that benches and `wide tune` try."""

import torch

from wide.kernels.device import hopper_obstacle
from wide.kernels.gemm_k.hopper import fits_stored
from wide.kernels.gemm_k.tiles import (
    REDUCE_PAIRS,
    REDUCE_QUADS,
    HopperKTile,
    KTile,
    StoredKTile,
    default_hopper_tile,
)
from wide.kernels.gemm_k_rows import fits_rows
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.reordering import PATTERN_GROUPS

AnyKTile = KTile | HopperKTile | StoredKTile
DOWN_TILES = (
    (64, KTile(128, 64, 3, 4, 2, 1, run=4)),
    (64, KTile(128, 64, 3, 4, 2, 1, run=8)),
    (64, KTile(128, 64, 3, 4, 3, 1)),
    (128, KTile(128, 64, 3, 4, 2, 1, run=4)),
    (128, KTile(128, 64, 3, 4, 2, 1)),
    (128, KTile(256, 64, 3, 8, 1, 1, run=4)),
    (128, KTile(256, 64, 4, 8, 1, 1)),
)
OUTPUT_TILES = (
    (64, KTile(128, 64, 4, 4, 2, 1)),
    (64, KTile(128, 64, 3, 4, 2, 1, run=4)),
    (64, KTile(256, 64, 4, 4, 1, 1)),
    (64, KTile(256, 64, 2, 4, 2, 1)),
    (128, KTile(256, 64, 4, 8, 1, 1)),
    (128, KTile(256, 64, 3, 8, 1, 1, run=4)),
    (128, KTile(128, 64, 3, 4, 2, 1, run=4)),
)


def k_hopper_tiles(width: int) -> tuple[tuple[int, HopperKTile], ...]:
    """Return the tiles of the kernel in Gluon for a width: sums reduced in pairs or quads, by slabs or in one."""
    whole = default_hopper_tile(width)
    variants = (
        whole._replace(writes=REDUCE_PAIRS),
        whole._replace(writes=REDUCE_PAIRS, slab=width),
        whole._replace(writes=REDUCE_QUADS),
    )
    return tuple((StoredKTile().rows, tile) for tile in variants)


def stored_tiles(
    device: torch.device, *, group_size: int, num_groups: int, width: int
) -> tuple[tuple[int, StoredKTile], ...]:
    """Return the tile of the kernels in CUDA C++, where there is one: on Hopper, over one sort of all groups.

    Args:
        device: Where.
        group_size: Channels of a group.
        num_groups: All groups.
        width: Of the output.
    """
    missing = hopper_obstacle(device) or native_obstacle()
    takes = fits_stored if num_groups <= PATTERN_GROUPS else fits_rows
    if missing is not None or not takes(group_size, num_groups, width):
        return ()
    return ((StoredKTile().rows, StoredKTile()),)
