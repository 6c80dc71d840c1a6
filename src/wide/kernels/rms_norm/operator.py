"""RMSNorm as an operator of torch: validation, registration, contract."""

from collections.abc import Mapping
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.contract import Backend, Case, Operator, Work, anywhere, random_values, relative_error
from wide.kernels.device import triton_obstacle
from wide.kernels.registration import implement
from wide.kernels.rms_norm.reference import rms_norm_reference

Pair = tuple[torch.Tensor, torch.Tensor]
_MAX_WIDTH = 65536
_LIBRARY = torch.library.Library("wide", "FRAGMENT")
_LIBRARY.define(
    "rms_norm(Tensor x, Tensor weight, Tensor? addend, float eps, bool unit_offset, str backend) -> (Tensor, Tensor)"
)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    backend: str,
) -> Pair:
    """Return (x + addend, RMSNorm of it); without an addend the first is `x` itself.

    Args:
        x: Residual stream, [M, D], last stride 1.
        weight: [D].
        addend: Output of the sub-layer before, as `x`.
        eps: Added to the mean square.
        unit_offset: Whether the factor is 1 + weight (Gemma).
        backend: 'torch' or 'triton'.

    Returns:
        Two tensors [M, D] in the dtype of `x`; the mean square is taken in float32.

    Raises:
        ShapeError: If tensors do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    total, normed = torch.ops.wide.rms_norm(x, weight, addend, eps, unit_offset, backend)
    return (x if addend is None else total), normed


def _check(x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None, backend: str) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or not 1 <= x.shape[1] <= _MAX_WIDTH:
        raise ShapeError(f"rms_norm wants x [M, D] with last stride 1, got {tuple(x.shape)} with strides {x.stride()}")
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ShapeError(f"rms_norm wants a weight {x.dtype} [{x.shape[1]}], got {weight.dtype} {tuple(weight.shape)}")
    if addend is not None and (addend.shape != x.shape or addend.dtype != x.dtype or addend.stride(1) != 1):
        raise ShapeError(f"rms_norm: addend must be {x.dtype} {tuple(x.shape)} with last stride 1")
    if backend == "triton":
        obstacle = triton_obstacle(x.device)
        if obstacle is not None:
            raise UnsupportedBackendError(f"rms_norm: {obstacle}; choose backend='torch'")
    elif backend != "torch":
        raise UnsupportedBackendError(f"rms_norm has the backends 'torch' and 'triton', got {backend!r}")


@implement(_LIBRARY, "rms_norm")
def _impl(
    x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None, eps: float, unit_offset: bool, backend: str
) -> Pair:
    _check(x, weight, addend, backend)
    total, normed = RMS_NORM.backends[backend].run(x, weight, addend=addend, eps=eps, unit_offset=unit_offset)
    # An operator's output must not alias its input.
    return (x.new_empty(0) if addend is None else total), normed


@torch.library.register_fake("wide::rms_norm", lib=_LIBRARY)
def _fake(x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None, *rest: Any) -> Pair:
    del weight, rest
    return (x.new_empty(0) if addend is None else x.new_empty(x.shape)), x.new_empty(x.shape)


def _run_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> Pair:
    from wide.kernels.rms_norm import _triton

    total, normed = _triton.rms_norm(x, weight, addend=addend, eps=eps, unit_offset=unit_offset)
    return (x if addend is None else total), normed


def _triton_supports(device: torch.device, case: Case) -> str | None:
    del case
    return triton_obstacle(device)


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    shape = (case.sizes["num_rows"], case.sizes["width"])
    options = dict(case.options)
    has_addend = options.pop("has_addend", True)
    return {
        "x": random_values(case, shape, device, salt=1),
        "weight": random_values(case, shape[1:], device, salt=2),
        "addend": random_values(case, shape, device, salt=3) if has_addend else None,
        **options,
    }


def _compare(arguments: Mapping[str, Any], got: Pair, wanted: Pair) -> float:
    del arguments
    return max(relative_error(g, w) for g, w in zip(got, wanted, strict=True))


def _work(case: Case) -> Work:
    values = case.sizes["num_rows"] * case.sizes["width"]
    tensors = 2 if case.options.get("has_addend", True) else 1
    return Work(
        flop=(3 + tensors) * values,
        bytes_read=tensors * values * case.dtype.itemsize,
        bytes_written=tensors * values * case.dtype.itemsize,
    )


def _case(num_rows: int, width: int, dtype: torch.dtype = torch.float16, **options: Any) -> Case:
    return Case(sizes={"num_rows": num_rows, "width": width}, dtype=dtype, options=options)


RMS_NORM = Operator(
    name="rms_norm",
    reference=rms_norm_reference,
    backends={
        "torch": Backend(run=rms_norm_reference, supports=anywhere),
        "triton": Backend(run=_run_triton, supports=_triton_supports),
    },
    cases=(
        _case(1, 64),
        _case(3, 100, has_addend=False),
        _case(17, 96, unit_offset=True, eps=1e-5),
        _case(5, 1, torch.float32),
        _case(4, 130, torch.float32, has_addend=False, unit_offset=True),
    ),
    build=_build,
    compare=_compare,
    tolerance={torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3},
    work=_work,
)
