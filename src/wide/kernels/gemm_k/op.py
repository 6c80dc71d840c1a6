"""GEMM-K as operators of torch: over rows by patterns of some groups, or in one order over all groups."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from wide.errors import ShapeError
from wide.kernels.dispatch import Backends
from wide.kernels.gemm_k.reference import gemm_k_reference
from wide.kernels.int8 import int8_options
from wide.kernels.registration import operator
from wide.kernels.reorder.op import MAX_GROUPS
from wide.kernels.reorder.rows_reference import TILE_ROWS, UNIT_ROWS, num_words
from wide.kernels.reordering import PatternReordering, RowReordering


class KShape(NamedTuple):
    """What a backend may refuse; `dtype` is of the rows, int8 where they are quantised, and `width` is N.

    `is_stored` says of `gemm_k` whether one super-block of at most 8 groups covers all of them and keeps empty rows.
    """

    dtype: torch.dtype
    num_rows: int
    num_groups: int
    group_size: int
    width: int
    is_stored: bool = True


BACKENDS = Backends("gemm_k", __package__, gemm_k_reference)
ROWS_BACKENDS = Backends("gemm_k_rows", __package__, gemm_k_reference)


@operator(lambda h, weight, dtype: h.new_empty((h.shape[0], weight.shape[0]), dtype=dtype or h.dtype))
def gemm_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return per row the sum over its executing groups of h[m, channels] W[:, channels]^T, plus bias.

    Accumulates in float32. Skipped channels of `h` are never read into a product, whatever they hold.

    Args:
        h: [M, K], rows contiguous.
        weight: [N, K].
        order: Rows by pattern over super-blocks of groups (`reorder_patterns`); with one super-block and
            `keeps_empty` every row is written once, otherwise tiles are reduced into float32.
        group_size: Channels of a group, G.
        bias: [N]; added to every row.
        x_scale: Of int8 rows, float32 [M]; weights are then int8, too, and sums of groups are exact (`quantise_rows`).
        scale: Of int8 weights, float32 [N].
        dtype: Of the result and the bias of int8 rows.
        tile: The backend's own, such as `KTile`; None takes a default for the device.

    Returns:
        [M, N] in the dtype of `h` or the one that is given.
    """
    num_groups = _check_sum("gemm_k", h, weight, group_size=group_size, bias=bias)
    blocks = -(-num_groups // order.groups_per_block)
    if h.shape[0] != order.index.shape[1] or order.counts.numel() != blocks:
        raise ShapeError(
            f"the reordering must be of the {h.shape[0]} rows of h and cover {num_groups} groups, got one of "
            f"{order.index.shape[1]} rows and {order.counts.numel()} x {order.groups_per_block} groups"
        )
    is_stored = blocks == 1 and order.keeps_empty
    shape = KShape(h.dtype, h.shape[0], num_groups, group_size, weight.shape[0], is_stored)
    options = int8_options("gemm_k", h, weight, x_scale, scale, dtype)
    return BACKENDS.run(
        backend, h.device, shape, h, weight, order, group_size=group_size, bias=bias, tile=tile, **options
    )


@operator(lambda h, weight, dtype: h.new_empty((h.shape[0], weight.shape[0]), dtype=dtype or h.dtype))
def gemm_k_rows(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: RowReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str,
) -> torch.Tensor:
    """Return per row the sum over its executing groups of h[m, channels] W[:, channels]^T, plus bias, in h's dtype.

    Accumulates in float32, in one order for each row. Skipped channels of `h` are never read into a product.

    Args:
        order: Rows in one order over all of up to 128 groups (`reorder_rows`); other arguments are as in `gemm_k`.
    """
    num_groups = _check_sum("gemm_k_rows", h, weight, group_size=group_size, bias=bias)
    if num_groups > MAX_GROUPS:
        raise ShapeError(
            f"gemm_k_rows wants 1 to {MAX_GROUPS} groups, got {num_groups} groups of {group_size} channels"
        )
    tiles, words = -(-h.shape[0] // TILE_ROWS), num_words(num_groups)
    wanted = ((h.shape[0],), (words, h.shape[0]), (TILE_ROWS // UNIT_ROWS * tiles, words), (tiles,))
    found = tuple(tuple(part.shape) for part in order)
    if found != wanted or any(part.dtype != torch.int32 or not part.is_contiguous() for part in order):
        raise ShapeError(
            f"the order must be of {h.shape[0]} rows and {num_groups} groups, contiguous int32 of shapes {wanted}, got "
            f"{found}; make it with reorder_rows of the mask"
        )
    shape = KShape(h.dtype, h.shape[0], num_groups, group_size, weight.shape[0])
    options = int8_options("gemm_k_rows", h, weight, x_scale, scale, dtype)
    return ROWS_BACKENDS.run(backend, h.device, shape, h, weight, order, group_size=group_size, bias=bias, **options)


def _check_sum(name: str, h: torch.Tensor, weight: torch.Tensor, *, group_size: int, bias: torch.Tensor | None) -> int:
    """Return the number of groups of a sum over groups; refuse tensors that do not fit each other."""
    fit = h.dim() == 2 and weight.dim() == 2 and h.shape[1] == weight.shape[1] and h.dtype == weight.dtype
    if not fit or group_size < 1 or h.shape[1] % group_size:
        raise ShapeError(
            f"{name} wants h [M, K] and weight [N, K] of one dtype and groups that divide K, got {h.dtype} "
            f"{tuple(h.shape)}, {weight.dtype} {tuple(weight.shape)} and groups of {group_size}"
        )
    num_groups = h.shape[1] // group_size
    if h.shape[0] * num_groups >= 2**31:
        raise ShapeError(f"{h.shape[0]} rows x {num_groups} groups exceed 2^31 entries; split the rows")
    if h.stride(1) != 1 or weight.stride(1) != 1:
        raise ShapeError(f"{name} wants h and weight with contiguous rows; call .contiguous() once, at load time")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias must have {weight.shape[0]} entries, got {tuple(bias.shape)}")
    return num_groups
