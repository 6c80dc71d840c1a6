"""Tiles of GEMM-MN that benches and `wide tune` try."""

import torch

from wide.kernels.device import HOPPER_STEP, hopper_obstacle
from wide.kernels.gemm_mn.hopper import fits_cluster
from wide.kernels.gemm_mn.tiles import ClusterMnTile, HopperMnTile, MnTile, default_hopper_tile
from wide.kernels.native.build import obstacle as native_obstacle

AnyMnTile = MnTile | HopperMnTile | ClusterMnTile
MnTiles = tuple[tuple[int, AnyMnTile], ...]
MN_GATED_TILES: tuple[tuple[int, MnTile], ...] = (
    (128, MnTile(128, 64, 4, 8, 1, 2)),
    (128, MnTile(128, 64, 3, 8, 1, 2)),
    (128, MnTile(128, 64, 4, 8, 1, 1)),
    (128, MnTile(64, 64, 3, 4, 2, 2)),
    (64, MnTile(128, 64, 4, 4, 1, 2)),
    (64, MnTile(128, 64, 2, 4, 2, 2)),
    (64, MnTile(128, 64, 4, 4, 1, 1)),
    (64, MnTile(64, 64, 4, 4, 2, 2)),
)
MN_PLAIN_TILES: tuple[tuple[int, MnTile], ...] = (
    (128, MnTile(256, 64, 4, 8, 1, 1)),
    (128, MnTile(256, 64, 3, 8, 1, 1)),
    (128, MnTile(128, 64, 3, 4, 2, 1)),
    (64, MnTile(256, 64, 5, 4, 1, 1)),
    (64, MnTile(256, 64, 4, 4, 1, 1)),
    (64, MnTile(256, 64, 2, 4, 2, 1)),
    (64, MnTile(128, 64, 4, 4, 2, 1)),
    (64, MnTile(128, 64, 3, 4, 3, 1)),
    (64, MnTile(64, 64, 4, 4, 3, 1)),
)


def mn_hopper_tiles(device: torch.device, group_size: int, *, gated: bool) -> MnTiles:
    """Return the tiles of the Hopper kernels for groups of a size, in Gluon and, where it fits, in CUDA C++.

    Args:
        device: Where; one that is no Hopper has none.
        group_size: Channels of a group.
        gated: Whether gate and up are multiplied together.
    """
    if hopper_obstacle(device) is not None or group_size % HOPPER_STEP:
        return ()
    gluon = (128, default_hopper_tile(group_size, gated=gated))
    if native_obstacle() is not None or not fits_cluster(group_size, gated=gated):
        return (gluon,)
    # Rows are sorted into the tiles that the kernel takes, so that it has no list of its own to make.
    return (gluon, (ClusterMnTile().rows, ClusterMnTile()))
