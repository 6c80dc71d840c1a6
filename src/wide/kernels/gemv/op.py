"""Decode GEMMs (one to four rows) as operators of torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from wide.errors import ShapeError
from wide.kernels.device import device_facts, half_obstacle
from wide.kernels.gemm_mn.reference import ACTIVATIONS, activate
from wide.kernels.gemv.reference import gemv_k_reference, gemv_mn_reference
from wide.kernels.gemv.tiles import GemvTile, default_k_tile, default_mn_tile
from wide.kernels.registration import check_backend, operator

MAX_ROWS = 4
_LONG_SUM = 8192


def gemv_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    up_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str = "none",
    zero_skipped: bool = False,
    backend: str,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return act(x W^T) or act(x W^T) * (x W_up^T) for few rows; weights of groups that no row executes are not read.

    Args:
        x: [M, K] with M in 1..4; last stride 1.
        weight: [N, K]; its rows g * G .. (g + 1) * G belong to group g; last stride 1.
        mask: True = execute, bool [M, N_G] with N_G * G = N.
        up_weight: As `weight`, of gated FFNs.
        bias: [N], contiguous.
        up_bias: [N] of gated FFNs; given if and only if `bias` and `up_weight` are.
        activation: 'none', 'silu', 'gelu_tanh' or 'relu2'.
        zero_skipped: Whether skipped channels hold zeros; otherwise they are unspecified memory.
        backend: 'torch', 'triton' or 'dense' (cuBLAS, computes everything).
        tile: A `GemvTile`; None takes a default for the device.

    Returns:
        [M, N] in the dtype of `x`, accumulated in float32.

    Raises:
        ShapeError: If tensors or options do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    return _gemv_mn(x, weight, mask, up_weight, bias, up_bias, activation, zero_skipped, backend, tile or ())


def gemv_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    backend: str,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return h W^T for few rows, summed over executing groups; channels that no row executes are not read.

    Args:
        h: [M, K] with M in 1..4; skipped channels may hold anything; last stride 1.
        weight: [N, K], or its groups one after another, [N_G, N, G]; last stride 1.
        mask: True = execute, bool [M, N_G] with N_G * G = K.
        bias: [N], contiguous; added to every row.
        backend: 'torch', 'triton' or 'dense' (cuBLAS, computes everything).
        tile: A `GemvTile`; None takes a default for the device.

    Returns:
        [M, N] in the dtype of `h`, accumulated in float32; the same bits in every run.

    Raises:
        ShapeError: If tensors do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    return _gemv_k(h, weight, mask, bias, backend, tile or ())


def _check(name: str, x: torch.Tensor, mask: torch.Tensor, grouped_width: int, backend: str) -> None:
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS or x.stride(1) != 1:
        raise ShapeError(
            f"{name} takes 1 to {MAX_ROWS} rows with last stride 1, got {tuple(x.shape)} with strides {x.stride()}; "
            "more rows are faster through a dense product or the gather GEMMs"
        )
    if mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] != x.shape[0] or mask.stride(1) != 1:
        raise ShapeError(f"{name} wants a bool mask [{x.shape[0]}, N_G], got {mask.dtype} {tuple(mask.shape)}")
    if mask.shape[1] < 1 or grouped_width % mask.shape[1]:
        raise ShapeError(f"{name}: {mask.shape[1]} groups do not divide a width of {grouped_width}")
    reason = half_obstacle(x.device, x.dtype, multiplies=False) if backend == "triton" else None
    check_backend(name, backend, ("torch", "triton", "dense"), reason)


def _check_parts(name: str, x: torch.Tensor, parts: Mapping[str, tuple[torch.Tensor | None, tuple[int, ...]]]) -> None:
    for part, (tensor, shape) in parts.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device or tensor.stride(-1) != 1:
            raise ShapeError(
                f"{name}: {part} must be {x.dtype} {list(shape)} on {x.device} with last stride 1, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )


@operator(lambda x, weight: x.new_empty((x.shape[0], weight.shape[0])))
def _gemv_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    zero_skipped: bool,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    _check("gemv_mn", x, mask, weight.shape[0], backend)
    whole, column = (weight.shape[0], x.shape[1]), (weight.shape[0],)
    parts = {"weight": (weight, whole), "up_weight": (up_weight, whole), "bias": (bias, column)}
    _check_parts("gemv_mn", x, {**parts, "up_bias": (up_bias, column)})
    if (up_bias is not None) != (bias is not None and up_weight is not None):
        raise ShapeError("gemv_mn: up_bias goes with bias and up_weight; give zeros where the model has none")
    if activation not in ACTIVATIONS:
        raise ShapeError(f"gemv_mn: unknown activation {activation!r}; choose one of {list(ACTIVATIONS)}")
    options: dict[str, Any] = {"up_weight": up_weight, "bias": bias, "up_bias": up_bias, "activation": activation}
    if backend == "torch":
        return gemv_mn_reference(x, weight, mask, **options)
    if backend == "triton":
        from wide.kernels.gemv import _triton

        chosen = GemvTile(*tile) if tile else default_mn_tile(device_facts(x.device), is_gated=up_weight is not None)
        return _triton.gemv_mn(x, weight, mask, tile=chosen, zero_skipped=zero_skipped, **options)
    values = activate(linear(x, weight, bias), activation)
    if up_weight is not None:
        values = values * linear(x, up_weight, up_bias)
    if zero_skipped:
        values = torch.where(mask.repeat_interleave(weight.shape[0] // mask.shape[1], 1), values, 0.0)
    return values


@operator(lambda h, weight: h.new_empty((h.shape[0], weight.shape[-2])))
def _gemv_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor | None,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    _check("gemv_k", h, mask, h.shape[-1], backend)
    num_groups, width = mask.shape[1], weight.shape[-2]
    grouped = (num_groups, width, h.shape[1] // num_groups)
    wanted = grouped if weight.dim() == 3 else (width, h.shape[1])
    _check_parts("gemv_k", h, {"weight": (weight, wanted), "bias": (bias, (width,))})
    if backend == "torch":
        return gemv_k_reference(h, weight, mask, bias=bias)
    if backend == "triton":
        from wide.kernels.gemv import _triton

        chosen = GemvTile(*tile) if tile else default_k_tile(device_facts(h.device), is_long=h.shape[1] > _LONG_SUM)
        return _triton.gemv_k(h, weight, mask, tile=chosen, bias=bias)
    h = torch.where(mask.repeat_interleave(h.shape[1] // num_groups, 1), h, 0.0)
    return linear(h, weight.transpose(0, 1).flatten(1) if weight.dim() == 3 else weight, bias)
