"""GEMM-MN as an operator of torch."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from wide.errors import ShapeError
from wide.kernels.clear_skipped.op import cleared
from wide.kernels.device import fixed_backend
from wide.kernels.dispatch import AnyShape, Backends
from wide.kernels.gemm_mn.reference import ACTIVATIONS, activate, gemm_mn_reference
from wide.kernels.int8 import int8_options
from wide.kernels.registration import check_tensor, on_device_of_tensors, operator
from wide.kernels.reordering import BLOCK_M, Reordering


class MnShape(NamedTuple):
    """What a backend may refuse; `dtype` is of the rows, int8 where they are quantised, and `depth` is K."""

    dtype: torch.dtype
    group_size: int
    depth: int
    gated: bool
    block_m: int = BLOCK_M


def _gated_activation(both: torch.Tensor, activation: str, mask: torch.Tensor | None) -> torch.Tensor:
    """Return act(gate) * up of `both` = [gate | up], [M, 2 N], zero where `mask` [M, N_G] is given and False."""
    gate, up = both.float().chunk(2, 1)
    values = (activate(gate, activation) * up).to(both.dtype)
    return values if mask is None else cleared(values, mask)


BACKENDS = Backends("gemm_mn", __package__, gemm_mn_reference)
GATED_BACKENDS = Backends("gated_activation", __package__, _gated_activation)


@operator(lambda x, weight, dtype: x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype or x.dtype))
def gemm_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Reordering,
    *,
    up_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str = "none",
    mask: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return act(x W^T), or act(x W^T) * (x W_up^T), computed on executing (row, group) pairs only.

    Skipped channels hold unspecified memory: select, never multiply them by a mask.

    Args:
        x: [M, K], rows contiguous.
        weight: [N, K]; its rows g * G .. (g + 1) * G belong to group g.
        order: Which rows execute which group (`reorder`).
        up_weight: [N, K] of gated FFNs.
        bias: [N].
        up_bias: [N] of gated FFNs.
        activation: 'none', 'silu', 'gelu_tanh' or 'relu2'.
        mask: bool [M, N_G]; if given, skipped channels are zero.
        x_scale: Of int8 rows, float32 [M]; weights are then int8, too, and sums are exact (`quantise_rows`).
        scale: Of int8 weights, float32 [N].
        up_scale: Of int8 weights of gated FFNs, float32 [N].
        dtype: Of the result and the biases of int8 rows.
        tile: The backend's own, such as `MnTile`; None takes a default for the device.

    Returns:
        [M, N] in the dtype of `x` or the one that is given, accumulated in float32 or int32.
    """
    num_groups = order.counts.numel()
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ShapeError(
            f"gemm_mn wants x [M, K] and weight [N, K] of one dtype, got {x.dtype} {tuple(x.shape)} and "
            f"{weight.dtype} {tuple(weight.shape)}"
        )
    if weight.shape[0] % num_groups or order.index.shape != (num_groups, x.shape[0]):
        raise ShapeError(
            f"a reordering of {tuple(order.index.shape)} (groups, rows) does not fit x {tuple(x.shape)} and weight "
            f"{tuple(weight.shape)}"
        )
    if x.shape[0] * num_groups >= 2**31:
        raise ShapeError(f"{x.shape[0]} rows x {num_groups} groups exceed 2^31 entries; split the rows")
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise ShapeError("gemm_mn wants x and weight with contiguous rows; call .contiguous() once, at load time")
    if up_weight is not None and (up_weight.shape, up_weight.stride()) != (weight.shape, weight.stride()):
        raise ShapeError("gate and up weights must have the same shape and strides")
    if (up_bias is not None and up_weight is None) or activation not in ACTIVATIONS:
        raise ShapeError(f"up_bias needs up_weight; activation is one of {ACTIVATIONS}, got {activation!r}")
    if any(b is not None and b.shape != weight.shape[:1] for b in (bias, up_bias)):
        raise ShapeError(f"biases must have {weight.shape[0]} entries")
    check_tensor("gemm_mn", "mask", mask, torch.bool, (x.shape[0], num_groups), "any strides")
    shape = MnShape(x.dtype, weight.shape[0] // num_groups, x.shape[1], up_weight is not None, order.block_m)
    options: dict[str, Any] = {"up_weight": up_weight, "bias": bias, "up_bias": up_bias, "activation": activation}
    options |= int8_options("gemm_mn", x, weight, x_scale, scale, dtype, up_weight=up_weight, up_scale=up_scale)
    return BACKENDS.run(backend, x.device, shape, x, weight, order, mask=mask, tile=tile, **options)


def is_stacked(weight: torch.Tensor, up_weight: torch.Tensor | None) -> bool:
    """Return whether the up weight lies right behind the gate weight in memory."""
    bytes_of_weight = weight.numel() * weight.element_size()
    return (
        up_weight is not None
        and weight.is_contiguous()
        and up_weight.data_ptr() == weight.data_ptr() + bytes_of_weight
        and up_weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    )


@functools.partial(on_device_of_tensors, "gemm_mn")
def finish_dense(values: torch.Tensor, activation: str, mask: torch.Tensor | None, *, gated: bool) -> torch.Tensor:
    """Return the activation [M, N] of a product, or of [gate | up] [M, 2 N], which may be changed; see `gemm_mn`."""
    if gated:
        shape = AnyShape(values.dtype)
        return GATED_BACKENDS.run(fixed_backend(values.device), values.device, shape, values, activation, mask)
    if activation != "none":
        values = activate(values.float(), activation).to(values.dtype)
    return values if mask is None else cleared(values, mask)
