"""Dense products with int8 weights as operators of torch."""

import torch

from wide.errors import ShapeError
from wide.kernels.dispatch import AnyShape, Backends
from wide.kernels.linear_int8.reference import expand_int8_reference, linear_int8_reference
from wide.kernels.registration import check_tensor, operator

MAX_ROWS = 256
"""Rows up to which the product reads int8; of more, weights are expanded once and a library multiplies."""
BACKENDS = Backends("linear_int8", __package__)
EXPAND_BACKENDS = Backends("expand_int8", __package__)
BACKENDS.register("torch")(linear_int8_reference)
EXPAND_BACKENDS.register("torch")(expand_int8_reference)


@operator(lambda x, weight: x.new_empty((x.shape[0], weight.shape[0])))
def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str
) -> torch.Tensor:
    """Return x W^T times the scales, plus bias: bound by the bytes of the weights where rows are few.

    Args:
        x: [M, K], last stride 1.
        weight: int8 [N, K], last stride 1.
        scale: float32 [N].
        bias: [N].

    Returns:
        [M, N] in the dtype of `x`, accumulated in float32.

    Raises:
        ShapeError: If tensors do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    if x.dim() != 2 or x.stride(1) != 1:
        raise ShapeError(f"linear_int8 wants x [M, K] with last stride 1, got {tuple(x.shape)}, strides {x.stride()}")
    width = weight.shape[0]
    check_tensor("linear_int8", "weight", weight, torch.int8, (width, x.shape[1]), "last stride 1")
    check_tensor("linear_int8", "scale", scale, torch.float32, (width,))
    check_tensor("linear_int8", "bias", bias, x.dtype, (width,))
    return BACKENDS.run(backend, x.device, AnyShape(x.dtype), x, weight, scale, bias=bias)


@operator(lambda weight, dtype: weight.new_empty(weight.shape, dtype=dtype))
def expand_int8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, backend: str) -> torch.Tensor:
    """Return int8 weights [N, K], contiguous, times their float32 scales [N], in a floating-point dtype.

    Raises:
        ShapeError: If tensors do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    check_tensor("expand_int8", "weight", weight, torch.int8, weight.shape[:2])
    check_tensor("expand_int8", "scale", scale, torch.float32, weight.shape[:1])
    return EXPAND_BACKENDS.run(backend, weight.device, AnyShape(dtype), weight, scale, dtype)
