"""GEMM-K as operators of torch: over rows by patterns of some groups, or in one order over all groups."""

from collections.abc import Sequence
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.device import HALF, HOPPER_STEP, backend_obstacle
from wide.kernels.gemm_k.reference import gemm_k_reference
from wide.kernels.gemm_k.tiles import STORED_TILE, KTile, default_tile
from wide.kernels.native.cute import CuteTile, tile_misfit
from wide.kernels.native.launch import misaligned
from wide.kernels.registration import check_backend, operator
from wide.kernels.reorder.op import MAX_GROUPS
from wide.kernels.reorder.rows_reference import TILE_ROWS, UNIT_ROWS, num_words
from wide.kernels.reordering import PATTERN_GROUPS, PatternReordering, RowReordering

_BACKENDS = ("torch", "triton", "cuda", "tilelang", "cute")
_CUTE_LEVELS = (1, 2)


@operator(lambda h, weight: h.new_empty((h.shape[0], weight.shape[0])))
def gemm_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
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
        backend: 'torch', 'triton', 'cuda' (CUDA C++: sm_90, half precision, G a multiple of 64, N of 256, one
            super-block that keeps empty rows), 'tilelang' (half precision, G and N multiples of 16) or 'cute' (half
            precision, G and N multiples of 8).
        tile: A `KTile` for Triton and TileLang, a `CuteTile` of level 1 or 2 for CuTe, CUDA C++ has one only; None
            takes a default for the device.

    Returns:
        [M, N] in the dtype of `h`.

    Raises:
        ShapeError: If shapes, strides or dtypes do not fit together.
        UnsupportedBackendError: If the backend cannot run here.
    """
    num_groups = _check_sum("gemm_k", h, weight, group_size=group_size, bias=bias)
    width, block_m = weight.shape[0], order.block_m
    blocks = -(-num_groups // order.groups_per_block)
    if h.shape[0] != order.index.shape[1] or order.counts.numel() != blocks:
        raise ShapeError(
            f"the reordering must be of the {h.shape[0]} rows of h and cover {num_groups} groups, got one of "
            f"{order.index.shape[1]} rows and {order.counts.numel()} x {order.groups_per_block} groups"
        )
    is_stored = blocks == 1 and order.keeps_empty
    reason = backend_obstacle(backend, h.device, h.dtype)
    reason = reason or misfit(backend, h.dtype, group_size=group_size, width=width, is_stored=is_stored)
    if reason is None and backend in ("cuda", "tilelang", "cute"):
        reason = misaligned({"h": h, "weight": weight}, (bias,))
        if backend == "cute":
            reason = reason or tile_misfit(CuteTile(*(tile or ())), _CUTE_LEVELS)
        elif backend == "cuda" and tile and tuple(tile) != STORED_TILE:
            reason = f"the kernel in CUDA C++ has the tile {STORED_TILE} only, got {tuple(tile)}"
    check_backend("gemm_k", backend, _BACKENDS, reason)
    options: dict[str, Any] = {"group_size": group_size, "bias": bias}
    if backend == "torch":
        return gemm_k_reference(h, weight, order, **options)
    if backend == "cuda":
        from wide.kernels.gemm_k import _cuda

        return _cuda.gemm_k(h, weight, order, **options)
    if backend == "cute":
        from wide.kernels.gemm_k import _cute

        return _cute.gemm_k(h, weight, order, tile=CuteTile(*(tile or ())), **options)
    shape: dict[str, Any] = {"num_rows": h.shape[0], "width": width, "block_m": block_m, "dtype": h.dtype}
    chosen = KTile(*tile) if tile else default_tile(h.device, group_size=group_size, **shape)
    if backend == "tilelang" and not tile:
        # What loads takes as many threads again: one block fills a multiprocessor.
        chosen = chosen._replace(num_warps=8 if block_m >= 128 else 4)
    fit = group_size % chosen.block_k == 0 and width % chosen.block_n == 0 and chosen.slab % chosen.block_n == 0
    if not fit or min(block_m, chosen.block_n, chosen.block_k) < 16:
        raise UnsupportedBackendError(
            f"gemm_k: {chosen} with block_m={block_m} does not work for groups of {group_size} and a width of {width}; "
            "the kernels want multiples of 16; leave the tile out, or choose backend='torch'"
        )
    if backend == "tilelang":
        from wide.kernels.gemm_k import _tilelang

        return _tilelang.gemm_k(h, weight, order, tile=chosen, **options)
    from wide.kernels.gemm_k import _triton

    if weight.stride(0) * weight.element_size() % 16:
        chosen = chosen._replace(weights_by=0)
    return _triton.gemm_k(h, weight, order, tile=chosen, **options)


@operator(lambda h, weight: h.new_empty((h.shape[0], weight.shape[0])))
def gemm_k_rows(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: RowReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
    backend: str,
) -> torch.Tensor:
    """Return per row the sum over its executing groups of h[m, channels] W[:, channels]^T, plus bias, in h's dtype.

    Accumulates in float32, in one order for each row. Skipped channels of `h` are never read into a product.

    Args:
        h: [M, K], rows contiguous.
        weight: [N, K].
        order: Rows in one order over all groups (`reorder_rows`).
        group_size: Channels of a group, G; up to 128 groups.
        bias: [N]; added to every row.
        backend: 'torch', 'cuda' (CUDA C++, sm_90, half precision, G a multiple of 64, N of 256) or 'cute' (half
            precision, G and N multiples of 8).

    Raises:
        ShapeError: If shapes, strides or dtypes do not fit together.
        UnsupportedBackendError: If the backend cannot run here.
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
    shape = {"group_size": group_size, "num_groups": num_groups, "width": weight.shape[0]}
    reason = backend_obstacle(backend, h.device, h.dtype) or rows_misfit(backend, h.dtype, **shape)
    if reason is None and backend in ("cuda", "cute"):
        reason = misaligned({"h": h, "weight": weight}, (bias,))
    check_backend("gemm_k_rows", backend, ("torch", "cuda", "cute"), reason)
    options: dict[str, Any] = {"group_size": group_size, "bias": bias}
    if backend == "torch":
        return gemm_k_reference(h, weight, order, **options)
    if backend == "cute":
        from wide.kernels.gemm_k import _cute

        return _cute.gemm_k(h, weight, order, tile=CuteTile(), **options)
    from wide.kernels.gemm_k import _cuda

    return _cuda.gemm_k(h, weight, order, **options)


def _check_sum(
    name: str,
    h: torch.Tensor,
    weight: torch.Tensor,
    *,
    group_size: int,
    bias: torch.Tensor | None,
) -> int:
    """Return the number of groups of a sum over groups; refuse tensors that do not fit each other.

    Args:
        name: Of the operator, for messages.
        h: [M, K].
        weight: [N, K].
        group_size: Channels of a group.
        bias: [N] or None.

    Raises:
        ShapeError: If shapes, strides or dtypes do not fit together.
    """
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


def misfit(backend: str, dtype: torch.dtype, *, group_size: int, width: int, is_stored: bool = True) -> str | None:
    """Return why a backend of `gemm_k` does not take a shape, on whatever device, or None.

    Args:
        backend: Its name.
        dtype: Of rows and weights.
        group_size: Channels of a group, G.
        width: Of the output, N.
        is_stored: Whether one super-block of at most 8 groups covers all of them and keeps empty rows.
    """
    if backend in ("triton", "tilelang") and (group_size % 16 or width % 16):
        return f"the kernels want multiples of 16, got groups of {group_size} and a width of {width}"
    if backend == "tilelang" and dtype not in HALF:
        return f"the kernel in TileLang wants half precision, got {dtype}"
    if backend == "cute":
        return _cute_misfit(dtype, group_size=group_size, width=width)
    if backend == "cuda" and not (dtype in HALF and is_stored and _fits_boxes(group_size, width)):
        return (
            f"the kernel in CUDA C++ wants half precision, groups of a multiple of {HOPPER_STEP} channels, a width "
            f"that is a multiple of {STORED_TILE[1]}, and rows sorted in one super-block of at most {PATTERN_GROUPS} "
            f"groups that keeps empty ones; got {dtype}, G={group_size}, width {width}, "
            f"{'' if is_stored else 'not '}so sorted"
        )
    return None


def rows_misfit(backend: str, dtype: torch.dtype, *, group_size: int, num_groups: int, width: int) -> str | None:
    """Return why a backend of `gemm_k_rows` does not take a shape, on whatever device, or None.

    Args:
        backend: Its name.
        dtype: Of rows and weights.
        group_size: Channels of a group, G.
        num_groups: All groups.
        width: Of the output, N.
    """
    if backend == "cute":
        few = num_groups <= MAX_GROUPS
        return _cute_misfit(dtype, group_size=group_size, width=width) if few else f"{num_groups} groups are too many"
    fit = dtype in HALF and 0 < num_groups <= MAX_GROUPS and _fits_boxes(group_size, width)
    if backend != "cuda" or fit:
        return None
    return (
        f"the kernel in CUDA C++ wants half precision, up to {MAX_GROUPS} groups of a multiple of {HOPPER_STEP} "
        f"channels and a width that is a multiple of {STORED_TILE[1]}; got {dtype}, G={group_size}, {num_groups} "
        f"groups, width {width}"
    )


def _cute_misfit(dtype: torch.dtype, *, group_size: int, width: int) -> str | None:
    if dtype in HALF and group_size % 8 == 0 and width % 8 == 0:
        return None
    return (
        "the kernel on CuTe wants half precision, groups of a multiple of 8 channels and a width of one; got "
        f"{dtype}, G={group_size}, width {width}"
    )


def _fits_boxes(group_size: int, width: int) -> bool:
    """Return whether groups and an output width are whole boxes of weights, as the kernels in CUDA C++ load them."""
    return group_size % HOPPER_STEP == 0 and width % STORED_TILE[1] == 0
