"""GEMM-MN for Hopper in CUDA C++ (gemm_mn.cu): clusters of two programs share weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from wide.kernels.clear_skipped.op import cleared
from wide.kernels.device import cuda_obstacle, device_facts, hopper_step
from wide.kernels.dispatch import Candidate, require
from wide.kernels.gemm_mn.op import BACKENDS, MnShape
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.native.launch import misaligned, product
from wide.kernels.reorder._triton import row_tiles
from wide.kernels.reordering import Reordering

SOURCE = Path(__file__).with_name("gemm_mn.cu")
CLUSTER_TILE = (256, 256)
"""Rows of a cluster of two programs and weight rows, gate and up together: the one tile."""
# Rows of a box of weights in shared memory.
_BOX_ROWS = 64


def supports(shape: MnShape) -> str | None:
    """Return why no device runs a shape, or None."""
    whole = shape.group_size % (CLUSTER_TILE[1] // (2 if shape.gated else 1)) == 0
    step = hopper_step(shape.dtype)
    if step is not None and shape.depth > 0 and shape.depth % step == 0 and whole:
        return None
    return (
        "the kernel in CUDA C++ wants half precision and K a multiple of 64, or int8 and one of 128, and groups of a "
        f"multiple of 128 channels if gated, of 256 if not; got {shape.dtype}, K={shape.depth}, G={shape.group_size}, "
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
    **int8: Any,
) -> torch.Tensor:
    """Run `gemm_mn_reference`."""
    if tile and tuple(tile) != CLUSTER_TILE:
        require(f"the kernel in CUDA C++ has the tile {CLUSTER_TILE} only, got {tuple(tile)}")
    options: dict[str, Any] = {"up_weight": up_weight, "bias": bias, "up_bias": up_bias, "activation": activation}
    out = multiply(x, weight, order, **options, **int8)
    return out if mask is None else cleared(out, mask)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Reordering | None,
    *,
    up_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str = "none",
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Run the kernel; arguments as in `gemm_mn`, but that without an order every row executes everything."""
    require(misaligned({"x": x, "weight": weight, "up_weight": up_weight}, (bias, up_bias) if x_scale is None else ()))
    num_rows, depth = x.shape
    out = x.new_empty(num_rows, weight.shape[0], dtype=dtype or x.dtype)
    up = weight if up_weight is None else up_weight
    lists: tuple[Any, ...] = (out,) * 4
    if order is not None:
        lists = (order.index, order.counts, *row_tiles(order, CLUSTER_TILE[0]))
    kernel = product(
        SOURCE,
        "triton",
        GATED=int(up_weight is not None),
        ACTIVATION=ACTIVATIONS.index(activation),
        HAS_BIAS=int(bias is not None),
        HAS_UP_BIAS=int(up_bias is not None),
        FLOAT16=int(out.dtype == torch.float16),
        INT8=int(x_scale is not None),
        DENSE=int(order is None),
    )
    kernel(
        x.device, device_facts(x.device).num_sms // 2 * 2,
        *(kernel.tensor_map(each, _BOX_ROWS, 128 // x.itemsize) for each in (weight, up)),
        x, out, out if bias is None else bias, out if up_bias is None else up_bias, *lists,
        num_rows, depth, weight.shape[0] // (1 if order is None else order.counts.numel()), x.stride(0), out.stride(0),
        *(() if x_scale is None else (x_scale, scale, scale if up_scale is None else up_scale)),
    )  # fmt: skip
    return out
