"""GEMM-K as an operator of torch."""

from collections.abc import Sequence
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.device import HALF, HOPPER_STEP, hopper_obstacle, triton_obstacle
from wide.kernels.gemm_k.reference import gemm_k_reference
from wide.kernels.gemm_k.tiles import KTile, StoredKTile, default_tile
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.native.launch import misaligned
from wide.kernels.registration import check_backend, operator
from wide.kernels.reordering import PATTERN_GROUPS, PatternReordering

_BACKENDS = ("torch", "triton", "cuda", "dense")


def gemm_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
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
        mask: bool [M, N_G]; needed by backend 'dense' unless the skipped channels of `h` are zero.
        backend: 'torch', 'triton', 'cuda' (CUDA C++: sm_90, half precision, G a multiple of 64, N of 256, one
            super-block that keeps empty rows) or 'dense' (multiplies everything).
        tile: A `KTile` for Triton, a `StoredKTile` for CUDA C++; None takes a default for the device.

    Returns:
        [M, N] in the dtype of `h`.

    Raises:
        ShapeError: If shapes, strides or dtypes do not fit together.
        UnsupportedBackendError: If the backend cannot run here.
    """
    return _gemm_k(h, weight, bias, *order, group_size, mask, backend, tile or ())


def fits(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    group_size: int,
    width: int,
    is_stored: bool = True,
) -> str | None:
    """Return why a backend cannot run a shape on a device, or None.

    Args:
        backend: Its name.
        device: Where.
        dtype: Of rows and weights.
        group_size: Channels of a group, G.
        width: Of the output, N.
        is_stored: Whether one super-block of at most 8 groups covers all of them and keeps empty rows.
    """
    if backend == "triton":
        if group_size % 16 or width % 16:
            return triton_obstacle(device, dtype) or (
                f"the Triton backend wants multiples of 16, got groups of {group_size} and a width of {width}"
            )
        return triton_obstacle(device, dtype)
    if backend != "cuda":
        return None
    missing = hopper_obstacle(device) or native_obstacle()
    if missing is not None or (dtype in HALF and is_stored and fits_stored(group_size, 1, width)):
        return missing
    return (
        f"the kernel in CUDA C++ wants half precision, groups of a multiple of {HOPPER_STEP} channels, a width that is "
        f"a multiple of {StoredKTile().columns}, and rows sorted in one super-block of at most {PATTERN_GROUPS} groups "
        f"that keeps empty ones; got {dtype}, G={group_size}, width {width}, {'' if is_stored else 'not '}so sorted"
    )


def fits_stored(group_size: int, num_groups: int, width: int) -> bool:
    """Return whether the kernel in CUDA C++ takes groups of a size, all in one super-block, and an output width."""
    return group_size % HOPPER_STEP == 0 and num_groups <= PATTERN_GROUPS and width % StoredKTile().columns == 0


def dense_product(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Multiply everything with the library's GEMM; the candidate that skipping must beat.

    Args:
        h: [M, K]; skipped channels are zero unless `mask` is given.
        weight: [N, K].
        bias: [N].
        mask: bool [M, N_G].
    """
    if mask is not None:
        h = torch.where(mask.unsqueeze(2), h.view(*mask.shape, -1), 0).view_as(h)
    return torch.nn.functional.linear(h, weight, bias)


@operator(lambda h, weight: h.new_empty((h.shape[0], weight.shape[0])))
def _gemm_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor,
    patterns: torch.Tensor,
    counts: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    block_m: int,
    groups_per_block: int,
    keeps_empty: bool,
    group_size: int,
    mask: torch.Tensor | None,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    order = PatternReordering(index, patterns, counts, tiles, num_tiles, block_m, groups_per_block, keeps_empty)
    _check(h, weight, order, group_size=group_size, bias=bias, mask=mask)
    width = weight.shape[0]
    is_stored = counts.numel() == 1 and keeps_empty
    reason = fits(backend, h.device, h.dtype, group_size=group_size, width=width, is_stored=is_stored)
    if reason is None and backend == "cuda":
        reason = misaligned({"h": h, "weight": weight}, (bias,))
        if tile and tuple(tile) != StoredKTile():
            reason = f"the kernel in CUDA C++ has the tile {StoredKTile()} only, got {tuple(tile)}"
    check_backend("gemm_k", backend, _BACKENDS, reason)
    options: dict[str, Any] = {"group_size": group_size, "bias": bias}
    if backend == "torch":
        return gemm_k_reference(h, weight, order, **options)
    if backend == "dense":
        return dense_product(h, weight, bias, mask)
    if backend == "cuda":
        from wide.kernels.gemm_k import _cuda

        return _cuda.gemm_k(h, weight, order, **options)
    from wide.kernels.gemm_k import _triton

    shape: dict[str, Any] = {"num_rows": h.shape[0], "width": width, "block_m": block_m, "dtype": h.dtype}
    chosen = KTile(*tile) if tile else default_tile(h.device, group_size=group_size, **shape)
    fit = group_size % chosen.block_k == 0 and width % chosen.block_n == 0 and chosen.slab % chosen.block_n == 0
    if not fit or min(block_m, chosen.block_n, chosen.block_k) < 16:
        raise UnsupportedBackendError(
            f"gemm_k: {chosen} with block_m={block_m} does not work for groups of {group_size} and a width of {width}; "
            "the Triton backend wants multiples of 16; leave the tile out, or choose backend='dense'"
        )
    if weight.stride(0) * weight.element_size() % 16:
        chosen = chosen._replace(weights_by=0)
    return _triton.gemm_k(h, weight, order, tile=chosen, **options)


def _check(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    num_rows, depth = order.index.shape[1], weight.shape[1]
    if depth % group_size or h.dim() != 2 or weight.dim() != 2 or h.dtype != weight.dtype:
        raise ShapeError(
            f"gemm_k wants h and weight [N, K] of one dtype and groups that divide K, got {h.dtype} {tuple(h.shape)}, "
            f"{weight.dtype} {tuple(weight.shape)} and groups of {group_size}"
        )
    num_groups = depth // group_size
    if tuple(h.shape) != (num_rows, depth) or order.counts.numel() != -(-num_groups // order.groups_per_block):
        raise ShapeError(
            f"h must be {(num_rows, depth)} and the reordering cover {num_groups} groups, got h {tuple(h.shape)}"
        )
    if num_rows * num_groups >= 2**31:
        raise ShapeError(f"{num_rows} rows x {num_groups} groups exceed 2^31 entries; split the rows")
    if h.stride(1) != 1 or weight.stride(1) != 1:
        raise ShapeError("gemm_k wants h and weight with contiguous rows; call .contiguous() once, at load time")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias must have {weight.shape[0]} entries, got {tuple(bias.shape)}")
    if mask is not None and (mask.shape != (num_rows, num_groups) or mask.dtype != torch.bool):
        raise ShapeError(f"mask must be bool {(num_rows, num_groups)}, got {mask.dtype} {tuple(mask.shape)}")
