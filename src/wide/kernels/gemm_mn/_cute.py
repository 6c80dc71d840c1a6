"""GEMM-MN on CuTe (gemm_mn_cute.cu): what rows of a tile skip is skipped in loads and in products, too."""

from pathlib import Path

import torch

from wide.kernels.clear_skipped import cleared
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.gemm_mn.tiles import largest_tile
from wide.kernels.native.cute import CuteTile, function
from wide.kernels.reordering import Reordering

SOURCE = Path(__file__).with_name("gemm_mn_cute.cu")


def variant(tile: CuteTile, dtype: torch.dtype, *, group_size: int, block_m: int, gated: bool) -> dict[str, int]:
    """Return what is compiled in for a shape.

    Args:
        tile: How it skips and loads.
        dtype: Of rows and weights.
        group_size: Channels of a group, G.
        block_m: Rows that the order's tiles were made for.
        gated: Whether gate and up are multiplied together.
    """
    return {
        "FLOAT16": int(dtype == torch.float16),
        "GATED": int(gated),
        "LEVEL": tile.level,
        "BM": 128 if block_m >= 128 else 64,
        "BN": largest_tile(group_size, 64 if gated else 128),
        "BK": 64,
        "STAGES": tile.num_stages,
    }


def gemm_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Reordering,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    mask: torch.Tensor | None,
    tile: CuteTile,
) -> torch.Tensor:
    """Run `gemm_mn_reference`."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    size, gated = weight.shape[0] // order.counts.numel(), up_weight is not None
    compiled = variant(tile, x.dtype, group_size=size, block_m=order.block_m, gated=gated)
    lists = order.index, order.counts, order.tiles, order.num_tiles, order.block_m
    run = function(SOURCE, x.device, **compiled)
    run(x, weight, up_weight, bias, up_bias, out, *lists, ACTIVATIONS.index(activation))
    return out if mask is None else cleared(out, mask)
