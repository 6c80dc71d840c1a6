"""The tile lists of the Hopper kernels, in Triton's interpreter: every tile once, costly ones first."""

import pytest
import torch

from wide.kernels.device import interprets_triton
from wide.kernels.reorder import reorder, reorder_patterns

pytestmark = pytest.mark.skipif(not interprets_triton(), reason="the interpreter stands in for a GPU")

SHAPES = ((1, 1, 0.5), (200, 5, 0.5), (1000, 7, 0.02), (700, 9, 1.0), (300, 3, 0.0))


def _mask(rows: int, groups: int, active: float) -> torch.Tensor:
    return torch.rand(rows, groups, generator=torch.Generator().manual_seed(rows)) < active


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_m", [64, 192, 256])
def test_row_tiles_cover_every_list_once(shape: tuple[int, int, float], block_m: int) -> None:
    from wide.kernels.reorder.tile_list._triton import row_tiles

    order = reorder(_mask(*shape), backend="torch")
    tiles, num_tiles = row_tiles(order, block_m)
    listed = [tuple(pair) for pair in tiles[: int(num_tiles[0])].tolist()]
    wanted = [(g, t) for g, count in enumerate(order.counts.tolist()) for t in range(-(-count // block_m))]
    assert sorted(listed) == wanted
    counts = order.counts.tolist()
    short = [(g, t) for g, t in wanted if counts[g] - t * block_m <= block_m // 2]
    assert listed[len(listed) - int(num_tiles[1]) :] == short


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("units", "groups_per_block"), [(2, 3), (3, 8), (2, 8)])
def test_items_name_the_groups_of_each_unit_and_fall_in_cost(
    shape: tuple[int, int, float], units: int, groups_per_block: int
) -> None:
    from wide.kernels.gemm_k import _gluon

    rows, groups, _ = shape
    keeps_empty = groups_per_block >= groups
    order = reorder_patterns(
        _mask(*shape), groups_per_block=groups_per_block, block_m=128, keeps_empty=keeps_empty, backend="torch"
    )
    work = _gluon.describe(order, units)
    items = work.items[: int(work.num_items)].tolist()
    row_tiles = -(-rows // (64 * units))
    wanted = {}
    for block, count in enumerate(order.counts.tolist()):
        for tile in range(-(-count // (64 * units))):
            union = 0
            for place in range(tile * 64 * units, min((tile + 1) * 64 * units, count)):
                unit = (place - tile * 64 * units) // 64
                union |= int(order.patterns[block, place]) << (8 * unit)
            wanted[block * row_tiles + tile] = union
    assert dict(items) == wanted
    assert len(items) == len(wanted)
    costs = [((u | u >> 8 | u >> 16) & 255).bit_count() for _, u in items]
    assert costs == sorted(costs, reverse=True)
