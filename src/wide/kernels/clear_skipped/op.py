"""Zeros for skipped groups as an operator of torch."""

import torch

from wide.errors import ShapeError
from wide.kernels.device import fixed_backend
from wide.kernels.dispatch import AnyShape, Backends
from wide.kernels.registration import check_tensor, operator

_NAME = "clear_skipped"


def _reference(values: torch.Tensor, mask: torch.Tensor) -> None:
    # Filled, not multiplied: skipped channels may hold anything, and 0 * NaN is NaN.
    values.unflatten(1, (mask.shape[1], -1)).masked_fill_(~mask.unsqueeze(2), 0)


BACKENDS = Backends(_NAME, __package__, _reference)


@operator(lambda: None, mutates=["values"])
def clear_skipped(values: torch.Tensor, mask: torch.Tensor, *, backend: str) -> None:
    """Write zeros into channels of values [M, C], of any dtype, that a mask, bool [M, N_G], skips, in place.

    Executing channels are neither read nor written. Rows of values have stride 1, those of the mask any.
    """
    if values.dim() != 2 or 0 in values.shape or values.stride(1) != 1:
        raise ShapeError(
            f"{_NAME} wants values [M, C] with last stride 1, got {tuple(values.shape)} with strides {values.stride()}"
        )
    check_tensor(_NAME, "mask", mask, torch.bool, (values.shape[0], mask.shape[-1]), "any strides")
    if values.shape[1] % max(mask.shape[1], 1):
        raise ShapeError(f"{_NAME}: {mask.shape[1]} groups of one size do not make up {values.shape[1]} channels")
    if mask.numel() >= 2**31:
        raise ShapeError(f"{_NAME}: {mask.shape[0]} rows x {mask.shape[1]} groups exceed 2^31 entries; split the rows")
    BACKENDS.run(backend, values.device, AnyShape(values.dtype), values, mask)


def cleared(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Call `clear_skipped` with the fastest backend that runs on the device, and return `values`."""
    clear_skipped(values, mask, backend=fixed_backend(values.device))
    return values
