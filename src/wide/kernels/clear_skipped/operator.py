"""Zeros for skipped groups as an operator of torch: validation, registration, contract."""

from collections.abc import Mapping
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.clear_skipped.reference import clear_skipped_reference
from wide.kernels.contract import Backend, Case, Operator, Work, anywhere, random_mask, random_values
from wide.kernels.device import triton_obstacle
from wide.kernels.registration import implement

_NAME = "clear_skipped"
_LIBRARY = torch.library.Library("wide", "FRAGMENT")
_LIBRARY.define("clear_skipped(Tensor(a!) values, Tensor mask, str backend) -> ()")


def clear_skipped(values: torch.Tensor, mask: torch.Tensor, *, backend: str) -> None:
    """Write zeros into the channels of skipped groups, in place; executing channels are neither read nor written.

    Args:
        values: [M, C], last stride 1, of any dtype; changed.
        mask: bool [M, N_G], any strides; N_G divides C.
        backend: 'torch' or 'triton'.

    Raises:
        ShapeError: If tensors do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    torch.ops.wide.clear_skipped(values, mask, backend)


def cleared(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Clear skipped groups by the fastest backend that runs on the device, and return `values`.

    Args:
        values: As in `clear_skipped`; changed.
        mask: As in `clear_skipped`.

    Raises:
        ShapeError: If tensors do not fit.
    """
    clear_skipped(values, mask, backend="torch" if triton_obstacle(values.device) else "triton")
    return values


def _check(values: torch.Tensor, mask: torch.Tensor, backend: str) -> None:
    if values.dim() != 2 or 0 in values.shape or values.stride(1) != 1:
        raise ShapeError(
            f"{_NAME} wants values [M, C] with last stride 1, got {tuple(values.shape)} with strides {values.stride()}"
        )
    fits = mask.dim() == 2 and mask.shape[0] == values.shape[0] and mask.shape[1] > 0
    if not fits or values.shape[1] % mask.shape[1]:
        raise ShapeError(
            f"{_NAME}: a mask {tuple(mask.shape)} does not fit values {tuple(values.shape)}; it has a column for each "
            "group, and groups are of one size"
        )
    if mask.dtype != torch.bool or mask.device != values.device:
        raise ShapeError(f"{_NAME}: mask must be bool on {values.device}, got {mask.dtype} on {mask.device}")
    if mask.numel() >= 2**31:
        raise ShapeError(f"{_NAME}: {mask.shape[0]} rows x {mask.shape[1]} groups exceed 2^31 entries; split the rows")
    if backend == "triton":
        obstacle = triton_obstacle(values.device)
        if obstacle is not None:
            raise UnsupportedBackendError(f"{_NAME}: {obstacle}; choose backend='torch'")
    elif backend != "torch":
        raise UnsupportedBackendError(f"{_NAME} has the backends 'torch' and 'triton', got {backend!r}")


@implement(_LIBRARY, _NAME)
def _impl(values: torch.Tensor, mask: torch.Tensor, backend: str) -> None:
    _check(values, mask, backend)
    if backend == "torch":
        values.unflatten(1, (mask.shape[1], -1)).masked_fill_(~mask.unsqueeze(2), 0)
        return
    from wide.kernels.clear_skipped import _triton

    _triton.clear_skipped(values, mask)


@torch.library.register_fake("wide::clear_skipped", lib=_LIBRARY)
def _fake(values: torch.Tensor, mask: torch.Tensor, backend: str) -> None:
    del values, mask, backend


def _run_triton(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # The contract compares what is returned, and all backends get the same arguments.
    copy = values.clone()
    clear_skipped(copy, mask, backend="triton")
    return copy


def _triton_supports(device: torch.device, case: Case) -> str | None:
    del case
    return triton_obstacle(device)


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    rows, groups, size = (case.sizes[name] for name in ("num_rows", "num_groups", "group_size"))
    mask = random_mask(case, (rows, groups), device)
    values = random_values(case, (rows, groups * size), device, salt=1)
    values.unflatten(1, (groups, size))[~mask] = float("nan")
    return {"values": values, "mask": mask}


def _compare(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    del arguments
    return 0.0 if torch.equal(got, wanted) else float("inf")


def _work(case: Case) -> Work:
    pairs = case.sizes["num_rows"] * case.sizes["num_groups"]
    written = int((1 - case.active) * pairs * case.sizes["group_size"] * case.dtype.itemsize)
    return Work(flop=0, bytes_read=pairs, bytes_written=written)


def _case(sizes: tuple[int, int, int], active: float = 0.5, dtype: torch.dtype = torch.float16) -> Case:
    names = ("num_rows", "num_groups", "group_size")
    return Case(sizes=dict(zip(names, sizes, strict=True)), dtype=dtype, active=active)


CLEAR_SKIPPED = Operator(
    name=_NAME,
    reference=clear_skipped_reference,
    backends={
        "torch": Backend(run=clear_skipped_reference, supports=anywhere),
        "triton": Backend(run=_run_triton, supports=_triton_supports),
    },
    cases=(
        _case((1, 1, 1)),
        _case((3, 8, 512), active=0.0),
        _case((17, 3, 24)),
        _case((64, 4, 600), dtype=torch.float32),
        _case((127, 112, 16), active=1.0),
        _case((1000, 5, 13), active=0.9),
    ),
    build=_build,
    compare=_compare,
    tolerance=dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 0.0),
    work=_work,
)
