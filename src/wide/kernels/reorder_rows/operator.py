"""One order of rows as an operator of torch: validation, registration, contract."""

from collections.abc import Mapping
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.contract import Backend, Case, Operator, Work, anywhere, random_mask
from wide.kernels.device import hopper_obstacle
from wide.kernels.native.build import obstacle as native_obstacle
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
        backend: 'torch' or 'cuda' (CUDA C++, sm_90).

    Raises:
        ShapeError: If the mask does not fit.
        UnsupportedBackendError: If the backend cannot run here.

    Source: docs/results/operators.md (rare groups first).
    """
    return RowReordering(*torch.ops.wide.reorder_rows(mask, backend))


@implement(_LIBRARY, _NAME)
def _impl(mask: torch.Tensor, backend: str) -> Tensors:
    if mask.dtype != torch.bool or mask.dim() != 2 or 0 in mask.shape or mask.shape[1] > MAX_GROUPS:
        raise ShapeError(
            f"{_NAME} wants a bool mask [M, N_G] of 1 to {MAX_GROUPS} groups, got {mask.dtype} {tuple(mask.shape)}"
        )
    if backend not in REORDER_ROWS.backends:
        raise UnsupportedBackendError(f"{_NAME} has the backends {sorted(REORDER_ROWS.backends)}, got {backend!r}")
    return REORDER_ROWS.backends[backend].run(mask)  # type: ignore[no-any-return]


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


def _run_cuda(mask: torch.Tensor) -> Tensors:
    obstacle = hopper_obstacle(mask.device) or native_obstacle()
    if obstacle is not None:
        raise UnsupportedBackendError(f"{_NAME}: {obstacle}; choose backend='torch'")
    from wide.kernels.reorder_rows import _cuda

    return _cuda.reorder_rows(mask)


def _cuda_supports(device: torch.device, case: Case) -> str | None:
    del case
    return hopper_obstacle(device) or native_obstacle()


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
        "cuda": Backend(run=_run_cuda, supports=_cuda_supports),
    },
    cases=(
        _case(1, 1),
        _case(3, 9),
        _case(64, 33, 0.0),
        _case(65, 64, 1.0),
        _case(127, 40, 0.3),
        _case(300, 112),
        _case(520, 128, 0.9),
        _case(4096, 96, 0.2),
        # More than one chunk.
        _case(16900, 40, 0.1),
    ),
    build=_build,
    compare=_compare,
    tolerance={torch.bool: 0.0},
    work=_work,
)
