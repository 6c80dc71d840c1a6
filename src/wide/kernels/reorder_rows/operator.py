"""One order of rows as an operator of torch: validation, registration, contract."""

from collections.abc import Mapping
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.contract import Backend, Case, Operator, Work, anywhere, random_mask
from wide.kernels.device import triton_obstacle
from wide.kernels.registration import implement
from wide.kernels.reorder_rows.reference import TILE_ROWS, UNIT_ROWS, num_words, reorder_rows_reference
from wide.kernels.reordering import RowReordering

Tensors = tuple[torch.Tensor, ...]
MAX_GROUPS = 128
"""Groups that rows may have; what four words hold."""
_NAME = "reorder_rows"
_LIBRARY = torch.library.Library("wide", "FRAGMENT")
_LIBRARY.define("reorder_rows(Tensor mask, str backend) -> (Tensor, Tensor, Tensor, Tensor)")


def reorder_rows(mask: torch.Tensor, *, backend: str) -> RowReordering:
    """Return rows in one order over all groups, with what rows and units of 64 rows execute.

    Args:
        mask: True = execute, bool [M, N_G] with N_G up to 128, any strides.
        backend: 'torch' or 'triton'.

    Raises:
        ShapeError: If the mask does not fit.
        UnsupportedBackendError: If the backend cannot run here.

    Source: docs/measurements/operators/trained-masks.md (rare groups first).
    """
    return RowReordering(*torch.ops.wide.reorder_rows(mask, backend))


@implement(_LIBRARY, _NAME)
def _impl(mask: torch.Tensor, backend: str) -> Tensors:
    if mask.dtype != torch.bool or mask.dim() != 2 or 0 in mask.shape or mask.shape[1] > MAX_GROUPS:
        raise ShapeError(
            f"{_NAME} wants a bool mask [M, N_G] of 1 to {MAX_GROUPS} groups, got {mask.dtype} {tuple(mask.shape)}"
        )
    if backend == "torch":
        return reorder_rows_reference(mask)
    if backend != "triton":
        raise UnsupportedBackendError(f"{_NAME} has the backends 'torch' and 'triton', got {backend!r}")
    obstacle = triton_obstacle(mask.device)
    if obstacle is not None:
        raise UnsupportedBackendError(f"{_NAME}: {obstacle}; choose backend='torch'")
    return _run_triton(mask)


@torch.library.register_fake(f"wide::{_NAME}", lib=_LIBRARY)
def _fake(mask: torch.Tensor, backend: str) -> Tensors:
    del backend
    num_rows, num_groups = mask.shape
    tiles, words = (num_rows + TILE_ROWS - 1) // TILE_ROWS, num_words(num_groups)
    shapes: tuple[tuple[Any, ...], ...] = (
        (num_rows,),
        (words, num_rows),
        (TILE_ROWS // UNIT_ROWS * tiles, words),
        (tiles,),
    )
    return tuple(mask.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _run_triton(mask: torch.Tensor) -> Tensors:
    from wide.kernels.reorder_rows import _triton

    return _triton.reorder_rows(mask)


def _triton_supports(device: torch.device, case: Case) -> str | None:
    del case
    return triton_obstacle(device)


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    return {"mask": random_mask(case, (case.sizes["num_rows"], case.sizes["num_groups"]), device)}


def _compare(arguments: Mapping[str, Any], got: Tensors, wanted: Tensors) -> float:
    del arguments
    return 0.0 if all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True)) else float("inf")


def _work(case: Case) -> Work:
    rows, groups = case.sizes["num_rows"], case.sizes["num_groups"]
    return Work(flop=0, bytes_read=2 * rows * groups, bytes_written=4 * rows * (1 + num_words(groups)))


def _case(rows: int, groups: int, active: float = 0.5) -> Case:
    return Case(sizes={"num_rows": rows, "num_groups": groups}, dtype=torch.bool, active=active)


REORDER_ROWS = Operator(
    name=_NAME,
    reference=reorder_rows_reference,
    backends={
        "torch": Backend(run=reorder_rows_reference, supports=anywhere),
        "triton": Backend(run=_run_triton, supports=_triton_supports),
    },
    cases=(
        _case(1, 1),
        _case(3, 9),
        _case(64, 33, 0.0),
        _case(65, 64, 1.0),
        _case(127, 40, 0.3),
        _case(300, 112),
        _case(520, 128, 0.9),
    ),
    build=_build,
    compare=_compare,
    tolerance={torch.bool: 0.0},
    work=_work,
)
