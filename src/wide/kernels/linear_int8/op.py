"""Dense products with int8 weights as operators of torch, and rows in int8.

All raise ShapeError if tensors do not fit, and UnsupportedBackendError if the backend cannot run here.
"""

from typing import NamedTuple

import torch

from wide.errors import ShapeError
from wide.kernels.dispatch import AnyShape, Backends
from wide.kernels.gemm_mn.op import finish_dense
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.int8 import int8_options, turned
from wide.kernels.linear_int8.reference import expand_int8_reference, linear_int8_reference, quantise_rows_reference
from wide.kernels.registration import check_tensor, operator

MAX_ROWS = 256
"""Rows up to which dense products read weights in int8 and rows as they are: bytes of weights are what takes the time.
For more of them weights are expanded once, and a library multiplies."""
MAX_WHOLE_ROWS = 16
"""Rows up to which they are read as they are where rows may be quantised: of a step of few sequences."""


class Int8Shape(NamedTuple):
    """What a backend may refuse; `dtype` is of the rows, int8 where they are quantised, width is N, depth K."""

    rows: int
    dtype: torch.dtype
    width: int
    depth: int


BACKENDS = Backends("linear_int8", __package__, linear_int8_reference)
QUANTISE_BACKENDS = Backends("quantise_rows", __package__, quantise_rows_reference)
EXPAND_BACKENDS = Backends("expand_int8", __package__, expand_int8_reference)


@operator(
    lambda x, weight, dtype, gate: x.new_empty(
        (x.shape[0], weight.shape[0] // (2 if gate else 1)), dtype=dtype or x.dtype
    )
)
def linear_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    gate: str | None = None,
    backend: str,
) -> torch.Tensor:
    """Return x W^T times the scales, plus bias: bound by the bytes of the weights where rows are few.

    Args:
        x: [M, K], last stride 1.
        weight: int8 [N, K], last stride 1.
        scale: float32 [N].
        bias: [N].
        x_scale: Of int8 rows, float32 [M]; sums are then exact (`quantise_rows`).
        rotation: What blocks of channels of other rows are multiplied by first (`hadamard`).
        dtype: Of the result and the bias of int8 rows.
        gate: Activation of the first half of the channels, which is then multiplied by the second: of gated FFNs.

    Returns:
        [M, N], or [M, N / 2] of gated FFNs, in the dtype of `x` or the one that is given, accumulated in float32 or
        int32.
    """
    if x.dim() != 2 or x.stride(1) != 1:
        raise ShapeError(f"linear_int8 wants x [M, K] with last stride 1, got {tuple(x.shape)}, strides {x.stride()}")
    width = weight.shape[0]
    if gate is not None and (gate not in ACTIVATIONS or width % 2):
        raise ShapeError(f"linear_int8: gate is one of {list(ACTIVATIONS)} and halves N, got {gate!r} and N={width}")
    check_tensor("linear_int8", "weight", weight, torch.int8, (width, x.shape[1]), "last stride 1")
    check_tensor("linear_int8", "scale", scale, torch.float32, (width,))
    check_tensor("linear_int8", "bias", bias, dtype or x.dtype, (width,))
    options = int8_options("linear_int8", x, weight, x_scale, scale if x.dtype == torch.int8 else None, dtype)
    options.pop("scale", None)
    x, turn = turned(BACKENDS, backend, x, rotation)
    shape = Int8Shape(x.shape[0], x.dtype, width, x.shape[1])
    joins = gate is not None and BACKENDS.takes(backend, "gate")
    options |= {"gate": gate} if joins else {}
    out = BACKENDS.run(backend, x.device, shape, x, weight, scale, bias=bias, **options, **turn)
    return out if gate is None or joins else finish_dense(out, gate, None, gated=True)


@operator(lambda x: (x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)))
def quantise_rows(
    x: torch.Tensor, mask: torch.Tensor | None = None, *, rotation: torch.Tensor | None = None, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in int8 [M, K], and the scale of each, float32 [M]: its largest value over 127.

    A row that holds NaN or infinity where it counts has a scale that is not finite, and so has its product.

    Args:
        x: [M, K], last stride 1.
        mask: bool [M, N_G], any strides; N_G divides K. Channels of other groups count as zero, whatever they hold.
        rotation: What blocks of channels are multiplied by before they are rounded, [b, b] in the dtype of `x`; b is
            16, 32 or 64 and divides a group.
    """
    if x.dim() != 2 or x.stride(1) != 1 or 0 in x.shape:
        raise ShapeError(f"quantise_rows wants x [M, K] with last stride 1, got {tuple(x.shape)}, strides {x.stride()}")
    check_tensor(
        "quantise_rows", "mask", mask, torch.bool, (x.shape[0], 1 if mask is None else mask.shape[-1]), "any strides"
    )
    if mask is not None and x.shape[1] % max(mask.shape[1], 1):
        raise ShapeError(f"quantise_rows: {mask.shape[1]} groups of one size do not make up {x.shape[1]} channels")
    size = 1 if rotation is None else rotation.shape[0]
    check_tensor("quantise_rows", "rotation", rotation, x.dtype, (size, size))
    if rotation is not None and (
        size not in (16, 32, 64) or x.shape[1] // (1 if mask is None else mask.shape[1]) % size
    ):
        raise ShapeError(f"quantise_rows rotates blocks of 16, 32 or 64 channels that divide a group, got {size}")
    return QUANTISE_BACKENDS.run(backend, x.device, AnyShape(x.dtype), x, mask, rotation)


@operator(lambda weight, dtype: weight.new_empty(weight.shape, dtype=dtype))
def expand_int8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, backend: str) -> torch.Tensor:
    """Return int8 weights [N, K], contiguous, times their float32 scales [N], in a floating-point dtype."""
    check_tensor("expand_int8", "weight", weight, torch.int8, weight.shape[:2])
    check_tensor("expand_int8", "scale", scale, torch.float32, weight.shape[:1])
    return EXPAND_BACKENDS.run(backend, weight.device, AnyShape(dtype), weight, scale, dtype)
