"""GEMM-MN for Hopper in CUDA C++ (gemm_mn.cu): clusters of two programs share weights."""

from collections.abc import Sequence
from pathlib import Path

import torch

from wide.kernels.clear_skipped import cleared
from wide.kernels.device import HALF, HOPPER_STEP, cuda_obstacle, device_facts
from wide.kernels.dispatch import Candidate, require
from wide.kernels.gemm_mn.op import BACKENDS, MnShape
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.native.launch import misaligned, product
from wide.kernels.reorder._triton import row_tiles
from wide.kernels.reordering import Reordering

SOURCE = Path(__file__).with_name("gemm_mn.cu")
CLUSTER_TILE = (256, 256)
"""Rows of a cluster of two programs and weight rows, gate and up together: the one tile."""
# A box of weights in shared memory: rows, and elements of a 128-byte line.
_BOX = (64, 64)


def supports(shape: MnShape) -> str | None:
    """Return why no device runs a shape, or None."""
    whole = shape.group_size % (CLUSTER_TILE[1] // (2 if shape.gated else 1)) == 0
    if shape.dtype in HALF and shape.depth > 0 and shape.depth % HOPPER_STEP == 0 and whole:
        return None
    return (
        "the kernel in CUDA C++ wants half precision, K a multiple of 64, and groups of a multiple of 128 channels if "
        f"gated, of 256 if not; got {shape.dtype}, K={shape.depth}, G={shape.group_size}, "
        f"{'' if shape.gated else 'not '}gated"
    )


def candidates(*_: object) -> tuple[Candidate, ...]:
    """Return the one tile, into which rows are sorted, so that the kernel has no list of its own to make."""
    return (Candidate(CLUSTER_TILE, CLUSTER_TILE[0]),)


@BACKENDS.register("cuda", needs=cuda_obstacle, supports=supports, candidates=candidates)
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
    """Run `gemm_mn_reference`."""
    require(misaligned({"x": x, "weight": weight, "up_weight": up_weight}, (bias, up_bias)))
    if tile and tuple(tile) != CLUSTER_TILE:
        require(f"the kernel in CUDA C++ has the tile {CLUSTER_TILE} only, got {tuple(tile)}")
    num_rows, depth = x.shape
    out = x.new_empty(num_rows, weight.shape[0])
    kernel = product(
        SOURCE,
        "triton",
        GATED=int(up_weight is not None),
        ACTIVATION=ACTIVATIONS.index(activation),
        HAS_BIAS=int(bias is not None),
        HAS_UP_BIAS=int(up_bias is not None),
        FLOAT16=int(x.dtype == torch.float16),
    )
    kernel(
        x.device,
        device_facts(x.device).num_sms // 2 * 2,
        kernel.tensor_map(weight, *_BOX),
        kernel.tensor_map(weight if up_weight is None else up_weight, *_BOX),
        x,
        out,
        out if bias is None else bias,
        out if up_bias is None else up_bias,
        order.index,
        order.counts,
        *row_tiles(order, CLUSTER_TILE[0]),
        num_rows,
        depth,
        weight.shape[0] // order.counts.numel(),
        x.stride(0),
        out.stride(0),
    )
    return out if mask is None else cleared(out, mask)
