"""Decode GEMMs (one to four rows) as operators of torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from wide.errors import ShapeError
from wide.kernels.dispatch import Backends
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.gemv.reference import gemv_k_reference, gemv_mn_reference
from wide.kernels.int8 import turned
from wide.kernels.registration import check_tensor, operator

MAX_ROWS = 4


class GemvShape(NamedTuple):
    """What a backend may refuse: the dtype of rows, input and output channels of a group, and whether weights are int8.

    Along the axis where groups do not lie, `size` or `width` is that of all.
    """

    dtype: torch.dtype
    size: int
    width: int
    int8: bool = False


MN_BACKENDS = Backends("gemv_mn", __package__, gemv_mn_reference)
K_BACKENDS = Backends("gemv_k", __package__, gemv_k_reference)


@operator(lambda x, weight: x.new_empty((x.shape[0], weight.shape[0])))
def gemv_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    up_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str = "none",
    zero_skipped: bool = False,
    scale: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    backend: str,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return act(x W^T) or act(x W^T) * (x W_up^T) for few rows; weights of groups that no row executes are not read.

    Args:
        x: [M, K] with M in 1..4; last stride 1.
        weight: [N, K] in the dtype of `x`, or int8; its rows g * G .. (g + 1) * G belong to group g; last stride 1.
        mask: True = execute, bool [M, N_G] with N_G * G = N; None = everything.
        up_weight: As `weight`, of gated FFNs.
        bias: [N], contiguous.
        up_bias: [N] of gated FFNs; given if and only if `bias` and `up_weight` are.
        activation: 'none', 'silu', 'gelu_tanh' or 'relu2'.
        zero_skipped: Whether skipped channels hold zeros; otherwise they are unspecified memory.
        scale: Of int8 weights, float32 [N].
        up_scale: Of int8 weights of gated FFNs, float32 [N].
        rotation: What blocks of channels of `x` are multiplied by first (`hadamard`).
        tile: The backend's own, such as `GemvTile`; None takes a default for the device.

    Returns:
        [M, N] in the dtype of `x`, accumulated in float32.
    """
    _check("gemv_mn", x, mask, weight.shape[0])
    whole, column = (weight.shape[0], x.shape[1]), (weight.shape[0],)
    for start, part, offset, factor in (("", weight, bias, scale), ("up_", up_weight, up_bias, up_scale)):
        if part is not None:
            _check_weight("gemv_mn", f"{start}weight", part, whole, x.dtype, factor)
        check_tensor("gemv_mn", f"{start}bias", offset, x.dtype, column)
    if (up_bias is not None) != (bias is not None and up_weight is not None):
        raise ShapeError("gemv_mn: up_bias goes with bias and up_weight; give zeros where the model has none")
    if activation not in ACTIVATIONS:
        raise ShapeError(f"gemv_mn: unknown activation {activation!r}; choose one of {list(ACTIVATIONS)}")
    options: dict[str, Any] = {"up_weight": up_weight, "bias": bias, "up_bias": up_bias, "activation": activation}
    options["zero_skipped"] = zero_skipped
    if scale is not None:
        options |= {"scale": scale, "up_scale": up_scale}
    shape = GemvShape(x.dtype, x.shape[1], weight.shape[0] // (1 if mask is None else mask.shape[1]), scale is not None)
    x, turn = turned(MN_BACKENDS, backend, x, rotation)
    return MN_BACKENDS.run(backend, x.device, shape, x, weight, mask, tile=tile, **options, **turn)


@operator(lambda h, weight: h.new_empty((h.shape[0], weight.shape[0])))
def gemv_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    backend: str,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return h W^T for few rows, summed over executing groups; channels that no row executes are not read.

    Args:
        h: [M, K] with M in 1..4; skipped channels may hold anything; last stride 1.
        mask: True = execute, bool [M, N_G] with N_G * G = K.
        bias: [N], contiguous; added to every row. Other arguments are as in `gemv_mn`.
        rotation: A block stays in its group.

    Returns:
        [M, N] in the dtype of `h`, accumulated in float32; the same bits in every run.
    """
    _check("gemv_k", h, mask, h.shape[-1])
    width = weight.shape[0]
    _check_weight("gemv_k", "weight", weight, (width, h.shape[1]), h.dtype, scale)
    check_tensor("gemv_k", "bias", bias, h.dtype, (width,))
    shape = GemvShape(h.dtype, h.shape[1] // mask.shape[1], width, scale is not None)
    options = {} if scale is None else {"scale": scale}
    h, turn = turned(K_BACKENDS, backend, h, rotation)
    return K_BACKENDS.run(backend, h.device, shape, h, weight, mask, bias=bias, tile=tile, **options, **turn)


def _check_weight(
    operator: str, name: str, weight: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, scale: torch.Tensor | None
) -> None:
    """Refuse weights that are of neither the dtype of the rows nor int8 with scales."""
    if (weight.dtype == torch.int8) != (scale is not None):
        raise ShapeError(f"{operator}: int8 weights go with scales: {name} is {weight.dtype}, its scale {scale}")
    check_tensor(operator, name, weight, dtype if scale is None else torch.int8, shape, "last stride 1")
    check_tensor(operator, f"scale of {name}", scale, torch.float32, shape[:1])


def _check(name: str, x: torch.Tensor, mask: torch.Tensor | None, grouped_width: int) -> None:
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS or x.stride(1) != 1:
        raise ShapeError(
            f"{name} takes 1 to {MAX_ROWS} rows with last stride 1, got {tuple(x.shape)} with strides {x.stride()}; "
            "more rows are faster through a dense product or the gather GEMMs"
        )
    if mask is None:
        return
    check_tensor(name, "mask", mask, torch.bool, (x.shape[0], mask.shape[-1]), "last stride 1")
    if mask.shape[1] < 1 or grouped_width % mask.shape[1]:
        raise ShapeError(f"{name}: {mask.shape[1]} groups do not divide a width of {grouped_width}")
