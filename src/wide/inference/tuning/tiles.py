"""Tiles that races try, by operator, device and size of groups; the device's defaults come first."""

from collections.abc import Iterator

import torch

from wide.kernels.attention_prefill.tiles import HopperTile, PrefillTile
from wide.kernels.device import hopper_obstacle
from wide.kernels.gemm_k.op import fits_stored
from wide.kernels.gemm_k.tiles import KTile, StoredKTile
from wide.kernels.gemm_k.tiles import default_tile as default_k_tile
from wide.kernels.gemm_k_rows import fits_rows
from wide.kernels.gemm_mn.op import fits_cluster
from wide.kernels.gemm_mn.tiles import ClusterMnTile, MnTile
from wide.kernels.gemm_mn.tiles import default_tile as default_mn_tile
from wide.kernels.gemv.tiles import GemvTile
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.reordering import PATTERN_GROUPS

MnTiles = list[tuple[int, MnTile | ClusterMnTile]]
"""Rows of a tile, for the sort, and the tile."""
KTiles = list[tuple[int, int, KTile | StoredKTile]]
"""Groups of a super-block, rows of a tile, and the tile."""
_BLOCK_M = 128
_MN_GATED = (
    (128, MnTile(128, 64, 4, 8, 1, 2)),
    (128, MnTile(128, 64, 3, 8, 1, 2)),
    (128, MnTile(128, 64, 4, 8, 1, 1)),
    (128, MnTile(64, 64, 3, 4, 2, 2)),
    (64, MnTile(128, 64, 4, 4, 1, 2)),
    (64, MnTile(128, 64, 2, 4, 2, 2)),
    (64, MnTile(128, 64, 4, 4, 1, 1)),
    (64, MnTile(64, 64, 4, 4, 2, 2)),
)
_MN_PLAIN = (
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
_K_TILES = (
    (64, KTile(128, 64, 3, 4, 2, 1, run=4)),
    (64, KTile(128, 64, 3, 4, 3, 1)),
    (64, KTile(128, 64, 4, 4, 2, 1)),
    (64, KTile(256, 64, 4, 4, 1, 1)),
    (64, KTile(256, 64, 2, 4, 2, 1)),
    (128, KTile(128, 64, 3, 4, 2, 1, run=4)),
    (128, KTile(128, 64, 3, 4, 2, 1)),
    (128, KTile(256, 64, 3, 8, 1, 1, run=4)),
    (128, KTile(256, 64, 4, 8, 1, 1)),
)
# Groups in a super-block that are worth trying, by channels of a group.
_SUPER_BLOCKS = {128: (8, 6, 4), 256: (4, 5, 3), 512: (4, 8)}
_GEMV = tuple(
    GemvTile(block_n=n, block_k=k, num_warps=w)
    for n, k, w in (
        (4, 2048, 4), (2, 4096, 4), (4, 1024, 2), (2, 1024, 2), (2, 2048, 4), (4, 1024, 4), (2, 1024, 1), (1, 2048, 2),
        (2, 512, 1), (4, 512, 1), (4, 2048, 8), (8, 512, 2), (8, 1024, 4), (4, 4096, 8), (1, 4096, 4),
    )
)  # fmt: skip
_PREFILL = tuple(
    PrefillTile(block_m=m, block_n=n, num_warps=w, num_stages=s, uses_tma=tma)
    for m, n, w, s, tma in (
        (128, 128, 8, 2, True), (128, 128, 8, 3, True), (128, 64, 8, 3, True), (128, 64, 8, 4, True),
        (64, 128, 4, 2, True), (64, 64, 4, 3, True), (128, 64, 4, 2, True),
        (128, 128, 8, 2, False), (128, 64, 8, 3, False), (64, 64, 4, 3, False),
    )
)  # fmt: skip
_PREFILL_HOPPER = (HopperTile(128, 2, 0), HopperTile(128, 2, 1), HopperTile(64, 4, 0))
_FEW_GEMV, _FEW_PREFILL = 8, 4


def mn_tiles(device: torch.device, group_size: int, *, gated: bool, quick: bool) -> MnTiles:
    """Return the tiles of GEMM-MN that fit groups of a size.

    Args:
        device: Where.
        group_size: Channels of a group.
        gated: Whether gate and up are multiplied together, which then lie behind each other in memory.
        quick: The defaults of each backend alone.
    """
    shape = {"group_size": group_size, "gated": gated, "stacked": gated, "dtype": torch.bfloat16}
    found: MnTiles = [
        (rows, default_mn_tile(device, block_m=rows, **shape))  # type: ignore[arg-type]
        for rows in (_BLOCK_M, _BLOCK_M // 2)
    ]
    if (hopper_obstacle(device) or native_obstacle()) is None and fits_cluster(group_size, gated=gated):
        # Rows are sorted into the tiles that the kernel takes, so that it has no list of its own to make.
        found.append((ClusterMnTile().rows, ClusterMnTile()))
    if not quick:
        found += [(m, tile) for m, tile in (_MN_GATED if gated else _MN_PLAIN) if group_size % tile.block_n == 0]
    return list(dict.fromkeys(found))


def k_tiles(device: torch.device, group_size: int, num_groups: int, *, width: int, rows: int, quick: bool) -> KTiles:
    """Return super-blocks and tiles of GEMM-K that fit groups of a size.

    Args:
        device: Where.
        group_size: Channels of a group.
        num_groups: All groups.
        width: Of the output.
        rows: Of the product.
        quick: The defaults of each backend alone, in the first super-block of `_SUPER_BLOCKS`.
    """
    blocks = (8,) if num_groups <= PATTERN_GROUPS else _SUPER_BLOCKS.get(group_size, (8, 4))
    default = default_k_tile(
        device, group_size=group_size, num_rows=rows, width=width, block_m=_BLOCK_M, dtype=torch.bfloat16
    )
    tiles = [(_BLOCK_M, default)]
    if not quick:
        fitting = [(m, t) for m, t in _K_TILES if width % t.block_n == 0 and group_size % t.block_k == 0]
        tiles += [(m, t._replace(slab=default.slab // t.block_n * t.block_n)) for m, t in fitting]
    found: KTiles = [
        (max(num_groups, PATTERN_GROUPS), StoredKTile().rows, tile)
        for tile in one_sort_tiles(device, group_size=group_size, num_groups=num_groups, width=width)
    ]
    found += [(block, m, tile) for block in (blocks[:1] if quick else blocks) for m, tile in tiles]
    return list(dict.fromkeys(found))


def one_sort_tiles(device: torch.device, *, group_size: int, num_groups: int, width: int) -> Iterator[StoredKTile]:
    """Yield the tile of the kernels in CUDA C++ over one sort of all groups, where there is one: on Hopper.

    Args:
        device: Where.
        group_size: Channels of a group.
        num_groups: All groups.
        width: Of the output.
    """
    takes = fits_stored if num_groups <= PATTERN_GROUPS else fits_rows
    missing = hopper_obstacle(device) or native_obstacle()
    if missing is None and takes(group_size, num_groups, width):
        yield StoredKTile()


def gemv_tiles(*, quick: bool) -> tuple[GemvTile, ...]:
    """Return the tiles of the products of one to four rows."""
    return _GEMV[:_FEW_GEMV] if quick else _GEMV


def prefill_tiles(device: torch.device, *, quick: bool) -> tuple[PrefillTile | HopperTile, ...]:
    """Return the tiles of causal attention; those for Hopper GPUs come first, where it is one."""
    hopper = _PREFILL_HOPPER if hopper_obstacle(device) is None else ()
    return (*hopper, *(_PREFILL[:_FEW_PREFILL] if quick else _PREFILL))


def backend_of(tile: tuple[int, ...]) -> str:
    """Return the backend that a tile belongs to."""
    if isinstance(tile, ClusterMnTile | StoredKTile):
        return "cuda"
    return "gluon" if isinstance(tile, HopperTile) else "triton"
