"""GEMM-MN on CuTe: what rows of a tile skip is skipped in loads and in products, too.

On Hopper by wgmma and tensor maps (gemm_mn_cute_hopper.cu), elsewhere by mma.sync (gemm_mn_cute.cu).
"""

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.languages.cute import LEVELS, CuteTile, cute_obstacle, cute_tile, function
from wide.kernels.clear_skipped.op import cleared
from wide.kernels.device import HALF, device_facts
from wide.kernels.dispatch import Candidate, largest_tile, require
from wide.kernels.gemm_mn._cuda import CLUSTER_TILE
from wide.kernels.gemm_mn.op import BACKENDS, MnShape
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.native.launch import misaligned, tensor_map
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


def supports(shape: MnShape) -> str | None:
    """Return why no device runs a shape, or None."""
    if shape.dtype in HALF and shape.depth > 0 and shape.depth % 8 == 0 and shape.group_size % 16 == 0:
        return None
    return (
        "the kernel on CuTe wants half precision, K a multiple of 8 and groups of a multiple of 16 channels; got "
        f"{shape.dtype}, K={shape.depth}, G={shape.group_size}"
    )


def candidates(*_: object) -> Iterator[Candidate]:
    """Yield all levels."""
    for level in LEVELS:
        yield Candidate(CuteTile(level), CLUSTER_TILE[0])


@BACKENDS.register("cute", needs=cute_obstacle, supports=supports, candidates=candidates)
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
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `gemm_mn_reference`; the tile is a `CuteTile`."""
    require(misaligned({"x": x, "weight": weight, "up_weight": up_weight}, (bias, up_bias)))
    chosen = cute_tile(tile)
    out = x.new_empty(x.shape[0], weight.shape[0])
    size, gated = weight.shape[0] // order.counts.numel(), up_weight is not None
    facts = device_facts(x.device)
    if facts.capability == 90 and size % _HOPPER_GROUP == 0:
        compiled = hopper_variant(chosen, x.dtype, group_size=size, gated=gated, activation=activation)
        # A quarter of a tile's weights, in lines of 128 bytes.
        box = compiled["BN"] * (2 if gated else 1) // 4, 64
        both = weight, weight if up_weight is None else up_weight
        maps = [tensor_map(each, *box, name="gemm_mn", instead="triton") for each in both]
        lists = order.index, order.counts, *row_tiles(order, CLUSTER_TILE[0])
        run = function(HOPPER_SOURCE, x.device, **compiled)
        run(x, bias, up_bias, out, *lists, *map(ctypes.addressof, maps), facts.num_sms // 2 * 2)
    else:
        compiled = variant(chosen, x.dtype, group_size=size, block_m=order.block_m, gated=gated)
        lists = order.index, order.counts, order.tiles, order.num_tiles
        run = function(SOURCE, x.device, **compiled)
        run(x, weight, up_weight, bias, up_bias, out, *lists, order.block_m, ACTIVATIONS.index(activation))
    return out if mask is None else cleared(out, mask)
