"""RMSNorm as an operator of torch."""

import torch

from wide.errors import ShapeError
from wide.kernels.dispatch import AnyShape, Backends
from wide.kernels.registration import check_tensor, operator
from wide.kernels.rms_norm.reference import rms_norm_reference

Pair = tuple[torch.Tensor, torch.Tensor]
_MAX_WIDTH = 65536

BACKENDS = Backends("rms_norm", __package__, rms_norm_reference)


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
        addend: Output of the sublayer before, as `x`.
        unit_offset: Whether the factor is 1 + weight (Gemma).

    Returns:
        Two tensors [M, D] in the dtype of `x`; the mean square is taken in float32.
    """
    total, normed = _rms_norm(x, weight, addend, eps, unit_offset, backend)
    return (x if addend is None else total), normed


def check_norm(name: str, x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None) -> None:
    """Refuse rows [M, D], a norm's weight [D] and an addend that do not fit each other (ShapeError)."""
    if x.dim() != 2 or x.stride(1) != 1 or not 1 <= x.shape[1] <= _MAX_WIDTH:
        raise ShapeError(f"{name} wants x [M, D] with last stride 1, got {tuple(x.shape)} with strides {x.stride()}")
    check_tensor(name, "weight", weight, x.dtype, x.shape[1:])
    check_tensor(name, "addend", addend, x.dtype, x.shape, "last stride 1")


@operator(lambda x, addend: (x.new_empty(0 if addend is None else x.shape), x.new_empty(x.shape)))
def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None, eps: float, unit_offset: bool, backend: str
) -> Pair:
    check_norm("rms_norm", x, weight, addend)
    shape = AnyShape(x.dtype)
    return BACKENDS.run(backend, x.device, shape, x, weight, addend=addend, eps=eps, unit_offset=unit_offset)
