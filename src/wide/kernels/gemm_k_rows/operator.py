"""GEMM-K over rows in one order as an operator of torch: validation, registration, contract."""

from collections.abc import Mapping
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.contract import Backend, Case, Operator, anywhere, random_mask, random_values, relative_error
from wide.kernels.device import HOPPER_STEP, hopper_obstacle
from wide.kernels.gemm_k.work import least_work
from wide.kernels.gemm_k_rows.reference import gemm_k_rows_reference
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.registration import implement
from wide.kernels.reorder_rows.reference import TILE_ROWS, UNIT_ROWS, num_words
from wide.kernels.reordering import RowReordering

_NAME = "gemm_k_rows"
_LIBRARY = torch.library.Library("wide", "FRAGMENT")
_LIBRARY.define(
    "gemm_k_rows(Tensor h, Tensor weight, Tensor? bias, Tensor index, Tensor words, Tensor unions, Tensor items,"
    " int group_size, Tensor? mask, str backend) -> Tensor"
)
_HALF = (torch.float16, torch.bfloat16)
# Of a tile.
_COLUMNS = 256
# Elements of 16 bytes, which copies and maps are aligned to.
_LINE = 8
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
    return torch.ops.wide.gemm_k_rows(h, weight, bias, *order, group_size, mask, backend)  # type: ignore[no-any-return]


def fits_rows(group_size: int, num_groups: int, width: int) -> bool:
    """Return whether the kernel in CUDA C++ takes groups of a size, so many of them, and an output width."""
    return group_size % HOPPER_STEP == 0 and 0 < num_groups <= _MAX_GROUPS and width % _COLUMNS == 0


@implement(_LIBRARY, _NAME)
def _impl(
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
    if backend not in GEMM_K_ROWS.backends:
        raise UnsupportedBackendError(f"{_NAME} has the backends {sorted(GEMM_K_ROWS.backends)}, got {backend!r}")
    run = GEMM_K_ROWS.backends[backend].run
    return run(h, weight, order, group_size=group_size, bias=bias, mask=mask)  # type: ignore[no-any-return]


@torch.library.register_fake(f"wide::{_NAME}", lib=_LIBRARY)
def _fake(h: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    del others
    return h.new_empty((h.shape[0], weight.shape[0]))


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


def _unfit(dtype: torch.dtype, group_size: int, num_groups: int, width: int) -> str | None:
    if dtype in _HALF and fits_rows(group_size, num_groups, width):
        return None
    return (
        f"the kernel in CUDA C++ wants half precision, up to {_MAX_GROUPS} groups of a multiple of {HOPPER_STEP} "
        f"channels and a width that is a multiple of {_COLUMNS}; got {dtype}, G={group_size}, {num_groups} groups, "
        f"width {width}"
    )


def _run_cuda(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: RowReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    del mask
    obstacle = (
        hopper_obstacle(h.device)
        or native_obstacle()
        or _unfit(h.dtype, group_size, weight.shape[1] // group_size, weight.shape[0])
    )
    steps = (h.stride(0), weight.stride(0))
    if obstacle is None and any(step % _LINE for step in steps):
        obstacle = f"rows {steps} elements apart do not fit; the kernel in CUDA C++ wants multiples of {_LINE}"
    if obstacle is None and bias is not None and (bias.dtype != h.dtype or bias.stride(0) != 1):
        obstacle = f"the bias must be contiguous {h.dtype} as h is, got {bias.dtype}"
    if obstacle is None and any(t.data_ptr() % (2 * _LINE) for t in (h, weight)):
        obstacle = f"h and the weight must begin at multiples of {2 * _LINE} bytes"
    if obstacle is not None:
        raise UnsupportedBackendError(f"{_NAME}: {obstacle}; choose backend='torch' or 'dense'")
    from wide.kernels.gemm_k_rows import _cuda

    return _cuda.gemm_k_rows(h, weight, order, group_size=group_size, bias=bias)


def _run_dense(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: RowReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply everything with the library's GEMM; the candidate that skipping must beat."""
    del order
    if mask is not None:
        h = torch.where(mask.unsqueeze(2), h.view(*mask.shape, group_size), 0).view_as(h)
    return torch.nn.functional.linear(h, weight, bias)


def _cuda_supports(device: torch.device, case: Case) -> str | None:
    sizes = case.sizes
    unfit = _unfit(case.dtype, sizes["group_size"], sizes["num_groups"], sizes["width"])
    return hopper_obstacle(device) or native_obstacle() or unfit


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    from wide.kernels.reorder_rows import reorder_rows

    rows, groups, size, width = (case.sizes[k] for k in ("num_rows", "num_groups", "group_size", "width"))
    mask = random_mask(case, (rows, groups), device)
    h = torch.where(mask.unsqueeze(2), random_values(case, (rows, groups, size), device, salt=1), float("nan"))
    return {
        "h": h.view(rows, groups * size),
        "weight": random_values(case, (width, groups * size), device, salt=2) / (groups * size) ** 0.5,
        "order": reorder_rows(mask, backend="torch"),
        "group_size": size,
        "bias": random_values(case, (width,), device, salt=3) if case.options.get("biased") else None,
        "mask": mask,
    }


def _compare(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    del arguments
    return relative_error(got, wanted)


def _case(sizes: tuple[int, int, int, int], active: float = 0.5, *, biased: bool = False, **more: Any) -> Case:
    names = ("num_rows", "num_groups", "group_size", "width")
    options = {"biased": True} if biased else {}
    return Case(sizes=dict(zip(names, sizes, strict=True)), active=active, options=options, **more)


_HALVES: dict[str, Any] = {"dtype": torch.bfloat16}
_SINGLE: dict[str, Any] = {"dtype": torch.float32}
GEMM_K_ROWS = Operator(
    name=_NAME,
    reference=gemm_k_rows_reference,
    backends={
        "torch": Backend(run=gemm_k_rows_reference, supports=anywhere),
        "cuda": Backend(run=_run_cuda, supports=_cuda_supports),
        "dense": Backend(run=_run_dense, supports=anywhere),
    },
    cases=(
        _case((1, 1, 16, 32), 1.0, **_SINGLE),
        _case((3, 2, 8, 16), biased=True, **_SINGLE),
        _case((70, 40, 8, 24), **_SINGLE),
        _case((130, 5, 16, 16), 0.0, biased=True, **_SINGLE),
        # Of the kernel in CUDA C++: two to four words, rows, units and tiles that are not full, nothing and everything.
        _case((1, 9, 64, 256), **_HALVES),
        _case((65, 12, 128, 512), biased=True, **_HALVES),
        _case((127, 33, 64, 256), 0.1, **_HALVES),
        _case((200, 70, 64, 256), **_HALVES),
        _case((300, 112, 64, 512), 0.02, biased=True, **_HALVES),
        _case((130, 40, 64, 256), 0.0, biased=True, **_HALVES),
        _case((129, 128, 64, 256), 1.0, **_HALVES),
        _case((190, 112, 64, 256), biased=True, dtype=torch.float16),
    ),
    build=_build,
    compare=_compare,
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    work=least_work,
)
