"""One order of rows as an operator of torch."""

import functools

import torch

from wide.errors import ShapeError
from wide.kernels.device import hopper_obstacle
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.registration import check_backend, operator
from wide.kernels.reorder_rows.reference import TILE_ROWS, UNIT_ROWS, num_words, reorder_rows_reference
from wide.kernels.reordering import RowReordering

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
MAX_GROUPS = 128
"""Groups that rows may have; what four words hold."""


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
    return RowReordering(*_reorder_rows(mask, backend))


def _outputs(mask: torch.Tensor) -> Tensors:
    num_rows, num_groups = mask.shape
    tiles, words = (num_rows + TILE_ROWS - 1) // TILE_ROWS, num_words(num_groups)
    new = functools.partial(mask.new_empty, dtype=torch.int32)
    return new((num_rows,)), new((words, num_rows)), new((TILE_ROWS // UNIT_ROWS * tiles, words)), new((tiles,))


@operator(_outputs)
def _reorder_rows(mask: torch.Tensor, backend: str) -> Tensors:
    if mask.dtype != torch.bool or mask.dim() != 2 or 0 in mask.shape or mask.shape[1] > MAX_GROUPS:
        raise ShapeError(
            f"reorder_rows wants a bool mask [M, N_G] of 1 to {MAX_GROUPS} groups, got {mask.dtype} {tuple(mask.shape)}"
        )
    reason = hopper_obstacle(mask.device) or native_obstacle() if backend == "cuda" else None
    check_backend("reorder_rows", backend, ("torch", "cuda"), reason)
    if backend == "torch":
        return reorder_rows_reference(mask)
    from wide.kernels.reorder_rows import _cuda

    return _cuda.reorder_rows(mask)
