"""GEMM-MN on CuTe: what rows of a tile skip is skipped in loads and in products, too.

On Hopper by wgmma and tensor maps (gemm_mn_cute_hopper.cu), elsewhere by mma.sync (gemm_mn_cute.cu).
"""

import ctypes
from pathlib import Path

import torch

from wide.kernels.clear_skipped import cleared
from wide.kernels.device import device_facts
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.gemm_mn.tiles import CLUSTER_TILE, largest_tile
from wide.kernels.native.cute import CuteTile, function
from wide.kernels.native.launch import tensor_map
from wide.kernels.reorder._triton import row_tiles
from wide.kernels.reordering import Reordering

SOURCE = Path(__file__).with_name("gemm_mn_cute.cu")
HOPPER_SOURCE = Path(__file__).with_name("gemm_mn_cute_hopper.cu")
_HOPPER_GROUP = 32
"""Groups of a multiple of so many channels go by wgmma: a box, a quarter of the weights, has eight rows at least."""


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
        "STAGES": tile.num_stages or 3,
    }


def hopper_variant(
    tile: CuteTile, dtype: torch.dtype, *, group_size: int, gated: bool, activation: str
) -> dict[str, int]:
    """Return what is compiled in for a shape on Hopper; arguments as of `variant`.

    Args:
        tile: How it skips and loads.
        dtype: Of rows and weights.
        group_size: Channels of a group, G.
        gated: Whether gate and up are multiplied together.
        activation: One of `ACTIVATIONS`.
    """
    return {
        "FLOAT16": int(dtype == torch.float16),
        "GATED": int(gated),
        "ACTIVATION": ACTIVATIONS.index(activation),
        "LEVEL": tile.level,
        "BN": largest_tile(group_size, CLUSTER_TILE[1] // (2 if gated else 1)),
        "STAGES": tile.num_stages or 4,
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
    facts = device_facts(x.device)
    if facts.capability == 90 and size % _HOPPER_GROUP == 0:
        compiled = hopper_variant(tile, x.dtype, group_size=size, gated=gated, activation=activation)
        # A quarter of a tile's weights, in lines of 128 bytes.
        box = compiled["BN"] * (2 if gated else 1) // 4, 64
        both = weight, weight if up_weight is None else up_weight
        maps = [tensor_map(each, *box, name="gemm_mn", instead="triton") for each in both]
        lists = order.index, order.counts, *row_tiles(order, CLUSTER_TILE[0])
        run = function(HOPPER_SOURCE, x.device, **compiled)
        run(x, bias, up_bias, out, *lists, *map(ctypes.addressof, maps), facts.num_sms // 2 * 2)
    else:
        compiled = variant(tile, x.dtype, group_size=size, block_m=order.block_m, gated=gated)
        lists = order.index, order.counts, order.tiles, order.num_tiles
        run = function(SOURCE, x.device, **compiled)
        run(x, weight, up_weight, bias, up_bias, out, *lists, order.block_m, ACTIVATIONS.index(activation))
    return out if mask is None else cleared(out, mask)
