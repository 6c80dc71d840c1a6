"""GEMM-K over rows in one order as an operator of torch."""

import torch

from wide.errors import ShapeError
from wide.kernels.device import HALF, HOPPER_STEP, hopper_obstacle
from wide.kernels.gemm_k.op import dense_product
from wide.kernels.gemm_k_rows.reference import gemm_k_rows_reference
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.native.launch import misaligned
from wide.kernels.registration import check_backend, operator
from wide.kernels.reorder_rows.reference import TILE_ROWS, UNIT_ROWS, num_words
from wide.kernels.reordering import RowReordering

_NAME = "gemm_k_rows"
# Of a tile.
_COLUMNS = 256
_MAX_GROUPS = 128


def gemm_k_rows(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: RowReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
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
        mask: bool [M, N_G]; needed by backend 'dense' unless the skipped channels of `h` are zero.
        backend: 'torch', 'cuda' (CUDA C++, sm_90, half precision, G a multiple of 64, N of 256) or 'dense' (multiplies
            everything).

    Raises:
        ShapeError: If shapes, strides or dtypes do not fit together.
        UnsupportedBackendError: If the backend cannot run here.
    """
    return _gemm_k_rows(h, weight, bias, *order, group_size, mask, backend)


def fits(
    backend: str, device: torch.device, dtype: torch.dtype, *, group_size: int, num_groups: int, width: int
) -> str | None:
    """Return why a backend cannot run a shape on a device, or None.

    Args:
        backend: Its name.
        device: Where.
        dtype: Of rows and weights.
        group_size: Channels of a group, G.
        num_groups: All groups.
        width: Of the output, N.
    """
    if backend != "cuda":
        return None
    missing = hopper_obstacle(device) or native_obstacle()
    if missing is not None or (dtype in HALF and fits_rows(group_size, num_groups, width)):
        return missing
    return (
        f"the kernel in CUDA C++ wants half precision, up to {_MAX_GROUPS} groups of a multiple of {HOPPER_STEP} "
        f"channels and a width that is a multiple of {_COLUMNS}; got {dtype}, G={group_size}, {num_groups} groups, "
        f"width {width}"
    )


def fits_rows(group_size: int, num_groups: int, width: int) -> bool:
    """Return whether the kernel in CUDA C++ takes groups of a size, so many of them, and an output width."""
    return group_size % HOPPER_STEP == 0 and 0 < num_groups <= _MAX_GROUPS and width % _COLUMNS == 0


@operator(lambda h, weight: h.new_empty((h.shape[0], weight.shape[0])))
def _gemm_k_rows(
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor,
    words: torch.Tensor,
    unions: torch.Tensor,
    items: torch.Tensor,
    group_size: int,
    mask: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    order = RowReordering(index, words, unions, items)
    _check(h, weight, order, group_size=group_size, bias=bias, mask=mask)
    shape = {"group_size": group_size, "num_groups": h.shape[1] // group_size, "width": weight.shape[0]}
    reason = fits(backend, h.device, h.dtype, **shape)
    if reason is None and backend == "cuda":
        reason = misaligned({"h": h, "weight": weight}, (bias,))
    check_backend(_NAME, backend, ("torch", "cuda", "dense"), reason)
    if backend == "torch":
        return gemm_k_rows_reference(h, weight, order, group_size=group_size, bias=bias)
    if backend == "dense":
        return dense_product(h, weight, bias, mask)
    from wide.kernels.gemm_k_rows import _cuda

    return _cuda.gemm_k_rows(h, weight, order, group_size=group_size, bias=bias)


def _check(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: RowReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    if h.dim() != 2 or weight.dim() != 2 or h.dtype != weight.dtype or h.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"{_NAME} wants h [M, K] and weight [N, K] of one dtype, got {h.dtype} {tuple(h.shape)} and {weight.dtype} "
            f"{tuple(weight.shape)}"
        )
    num_groups = weight.shape[1] // max(group_size, 1)
    if group_size < 1 or weight.shape[1] % group_size or num_groups > _MAX_GROUPS:
        raise ShapeError(
            f"{_NAME} wants 1 to {_MAX_GROUPS} groups that divide K={weight.shape[1]}, got groups of {group_size}"
        )
    tiles, words = -(-h.shape[0] // TILE_ROWS), num_words(num_groups)
    wanted = ((h.shape[0],), (words, h.shape[0]), (TILE_ROWS // UNIT_ROWS * tiles, words), (tiles,))
    found = tuple(tuple(part.shape) for part in order)
    if found != wanted or any(part.dtype != torch.int32 or not part.is_contiguous() for part in order):
        raise ShapeError(
            f"the order must be of {h.shape[0]} rows and {num_groups} groups, contiguous int32 of shapes {wanted}, got "
            f"{found}; make it with reorder_rows of the mask"
        )
    if h.stride(1) != 1 or weight.stride(1) != 1:
        raise ShapeError(f"{_NAME} wants h and weight with contiguous rows; call .contiguous() once, at load time")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias must have {weight.shape[0]} entries, got {tuple(bias.shape)}")
    if mask is not None and (mask.shape != (h.shape[0], num_groups) or mask.dtype != torch.bool):
        raise ShapeError(f"mask must be bool {(h.shape[0], num_groups)}, got {mask.dtype} {tuple(mask.shape)}")
