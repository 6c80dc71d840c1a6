"""GEMM-K for Hopper in CUDA C++: each row is stored once, and nothing is reduced through memory.

Over one sort of few groups, or over rows in one order of many.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from wide.kernels.device import cuda_obstacle, device_facts, hopper_step
from wide.kernels.dispatch import Candidate, require
from wide.kernels.gemm_k._triton import in_one_order
from wide.kernels.gemm_k.op import BACKENDS, ROWS_BACKENDS, KShape
from wide.kernels.native.launch import misaligned, product
from wide.kernels.reorder.op import MAX_GROUPS
from wide.kernels.reordering import PATTERN_GROUPS, PatternReordering, RowReordering

SOURCE = Path(__file__).with_name("gemm_k.cu")
STORED_TILE = (128, 256)
"""Rows of two consumers, and columns of the output: the one tile."""


def _fits_boxes(shape: KShape) -> bool:
    """Return whether groups and an output width are whole boxes of weights."""
    step = hopper_step(shape.dtype)
    return step is not None and shape.group_size % step == 0 and shape.width % STORED_TILE[1] == 0


def supports(shape: KShape) -> str | None:
    """Return why no device runs a shape over one sort of few groups, or None."""
    if shape.is_stored and _fits_boxes(shape):
        return None
    return (
        "the kernel in CUDA C++ wants groups of a multiple of 64 channels in half precision, of 128 in int8, a width "
        f"of a multiple of {STORED_TILE[1]}, and rows sorted in one super-block of at most {PATTERN_GROUPS} groups "
        f"that keeps empty ones; got {shape.dtype}, G={shape.group_size}, width {shape.width}, "
        f"{'' if shape.is_stored else 'not '}so sorted"
    )


def supports_rows(shape: KShape) -> str | None:
    """Return why no device runs a shape over rows in one order, or None."""
    if 0 < shape.num_groups <= MAX_GROUPS and _fits_boxes(shape):
        return None
    return (
        f"the kernel in CUDA C++ wants up to {MAX_GROUPS} groups, of a multiple of 64 channels in half precision, of "
        f"128 in int8, and a width that is a multiple of {STORED_TILE[1]}; got {shape.dtype}, G={shape.group_size}, "
        f"{shape.num_groups} groups, width {shape.width}"
    )


def candidates(shape: KShape, *_: object) -> tuple[Candidate, ...]:
    """Return the one tile, over one sort of all groups."""
    return (Candidate(STORED_TILE, STORED_TILE[0], max(shape.num_groups, PATTERN_GROUPS)),)


@ROWS_BACKENDS.register("cuda", needs=cuda_obstacle, supports=supports_rows, candidates=candidates)
@BACKENDS.register("cuda", needs=cuda_obstacle, supports=supports, candidates=candidates)
def gemm_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering | RowReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `gemm_k_reference`; rows by patterns are in one super-block, which keeps empty ones."""
    require(misaligned({"h": h, "weight": weight}, (bias,) if x_scale is None else ()))
    if tile and tuple(tile) != STORED_TILE:
        require(f"the kernel in CUDA C++ has the tile {STORED_TILE} only, got {tuple(tile)}")
    num_rows, width = h.shape[0], weight.shape[0]
    out = h.new_empty(num_rows, width, dtype=dtype or h.dtype)
    instead = "torch" if isinstance(order, RowReordering) else "triton"
    order = in_one_order(order)
    kernel = product(
        SOURCE,
        instead,
        WORDS=order.words.shape[0],
        HAS_BIAS=int(bias is not None),
        FLOAT16=int(out.dtype == torch.float16),
        INT8=int(x_scale is not None),
    )
    kernel(
        h.device, device_facts(h.device).num_sms,
        kernel.tensor_map(weight, STORED_TILE[1], 128 // h.itemsize),
        h, out, out if bias is None else bias, *order,
        num_rows, width, group_size, h.stride(0), out.stride(0),
        *(() if x_scale is None else (x_scale, scale)),
    )  # fmt: skip
    return out
