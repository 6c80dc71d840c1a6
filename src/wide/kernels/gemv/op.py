"""Decode GEMMs (one to four rows) as operators of torch."""

from collections.abc import Sequence
from typing import Any

import torch

from wide.errors import ShapeError
from wide.kernels.device import HALF, backend_obstacle, device_facts, half_obstacle
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.gemv.reference import gemv_k_reference, gemv_mn_reference
from wide.kernels.gemv.tiles import GemvTile, default_k_tile, default_mn_tile
from wide.kernels.native.launch import misaligned
from wide.kernels.registration import check_backend, check_tensor, operator

MAX_ROWS = 4
_BACKENDS = ("torch", "triton", "tilelang", "cute")
_LONG_SUM = 8192
# Input channels that threads of the kernel in TileLang hold at a time; of four rows more would spill.
_FRAGMENT = 1024


@operator(lambda x, weight: x.new_empty((x.shape[0], weight.shape[0])))
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
        backend: 'torch', 'triton', 'tilelang' (half precision, multiples of 16 input channels, of a group along K) or
            'cute' (half precision, K and rows multiples of 8, along K groups too).
        tile: A `GemvTile` for Triton and TileLang; None takes a default for the device.

    Returns:
        [M, N] in the dtype of `x`, accumulated in float32.

    Raises:
        ShapeError: If tensors or options do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    _check("gemv_mn", x, mask, weight.shape[0], backend)
    whole, column = (weight.shape[0], x.shape[1]), (weight.shape[0],)
    parts = (
        ("weight", weight, whole),
        ("up_weight", up_weight, whole),
        ("bias", bias, column),
        ("up_bias", up_bias, column),
    )
    for name, tensor, shape in parts:
        check_tensor("gemv_mn", name, tensor, x.dtype, shape, "last stride 1")
    if (up_bias is not None) != (bias is not None and up_weight is not None):
        raise ShapeError("gemv_mn: up_bias goes with bias and up_weight; give zeros where the model has none")
    if activation not in ACTIVATIONS:
        raise ShapeError(f"gemv_mn: unknown activation {activation!r}; choose one of {list(ACTIVATIONS)}")
    options: dict[str, Any] = {"up_weight": up_weight, "bias": bias, "up_bias": up_bias, "activation": activation}
    if backend == "torch":
        return gemv_mn_reference(x, weight, mask, **options)
    if backend == "cute":
        _check_lines("gemv_mn", {"x": x, "weight": weight, "up_weight": up_weight}, (bias, up_bias), x.shape[1], tile)
        from wide.kernels.gemv import _cute

        return _cute.gemv_mn(x, weight, mask, zero_skipped=zero_skipped, **options)
    chosen = GemvTile(*tile) if tile else default_mn_tile(device_facts(x.device), is_gated=up_weight is not None)
    if backend == "tilelang":
        from wide.kernels.gemv import _tilelang

        chosen = chosen._replace(block_k=min(chosen.block_k, _FRAGMENT))
        return _tilelang.gemv_mn(x, weight, mask, tile=chosen, zero_skipped=zero_skipped, **options)
    from wide.kernels.gemv import _triton

    return _triton.gemv_mn(x, weight, mask, tile=chosen, zero_skipped=zero_skipped, **options)


@operator(lambda h, weight: h.new_empty((h.shape[0], weight.shape[0])))
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
        weight: [N, K]; last stride 1.
        mask: True = execute, bool [M, N_G] with N_G * G = K.
        bias: [N], contiguous; added to every row.
        backend: 'torch', 'triton', 'tilelang' (half precision, multiples of 16 input channels, of a group along K) or
            'cute' (half precision, K and rows multiples of 8, along K groups too).
        tile: A `GemvTile` for Triton and TileLang; None takes a default for the device.

    Returns:
        [M, N] in the dtype of `h`, accumulated in float32; the same bits in every run.

    Raises:
        ShapeError: If tensors do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    _check("gemv_k", h, mask, h.shape[-1], backend)
    width = weight.shape[0]
    check_tensor("gemv_k", "weight", weight, h.dtype, (width, h.shape[1]), "last stride 1")
    check_tensor("gemv_k", "bias", bias, h.dtype, (width,))
    if backend == "torch":
        return gemv_k_reference(h, weight, mask, bias=bias)
    if backend == "cute":
        _check_lines("gemv_k", {"h": h, "weight": weight}, (bias,), h.shape[1] // mask.shape[1], tile)
        from wide.kernels.gemv import _cute

        return _cute.gemv_k(h, weight, mask, bias=bias)
    if backend == "tilelang":
        from wide.kernels.gemv import _tilelang

        # All threads of a block share one group's weights at a time.
        shared = GemvTile(*tile) if tile else GemvTile(block_n=1, block_k=2048, num_warps=1)
        return _tilelang.gemv_k(h, weight, mask, tile=shared, bias=bias)
    from wide.kernels.gemv import _triton

    chosen = GemvTile(*tile) if tile else default_k_tile(device_facts(h.device), is_long=h.shape[1] > _LONG_SUM)
    return _triton.gemv_k(h, weight, mask, tile=chosen, bias=bias)


def _check(name: str, x: torch.Tensor, mask: torch.Tensor, grouped_width: int, backend: str) -> None:
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS or x.stride(1) != 1:
        raise ShapeError(
            f"{name} takes 1 to {MAX_ROWS} rows with last stride 1, got {tuple(x.shape)} with strides {x.stride()}; "
            "more rows are faster through a dense product or the gather GEMMs"
        )
    check_tensor(name, "mask", mask, torch.bool, (x.shape[0], mask.shape[-1]), "last stride 1")
    if mask.shape[1] < 1 or grouped_width % mask.shape[1]:
        raise ShapeError(f"{name}: {mask.shape[1]} groups do not divide a width of {grouped_width}")
    reason = half_obstacle(x.device, x.dtype, multiplies=False) if backend == "triton" else None
    reason = reason or (backend_obstacle(backend, x.device) if backend in ("tilelang", "cute") else None)
    if reason is None and backend == "tilelang":
        reason = misfit(backend, x.dtype, x.shape[1] // (mask.shape[1] if name == "gemv_k" else 1))
    check_backend(name, backend, _BACKENDS, reason)


def _check_lines(
    name: str,
    matrices: dict[str, torch.Tensor | None],
    vectors: Sequence[torch.Tensor | None],
    size: int,
    tile: Sequence[int] | None,
) -> None:
    """Refuse what the kernels on CuTe do not take; arguments as of `misaligned` and `misfit`."""
    dtype = next(tensor.dtype for tensor in matrices.values() if tensor is not None)
    reason = misfit("cute", dtype, size) or misaligned(matrices, vectors)
    reason = reason or (f"the kernel on CuTe has no tiles, got {tuple(tile)}" if tile else None)
    check_backend(name, "cute", _BACKENDS, reason)


def misfit(backend: str, dtype: torch.dtype, size: int) -> str | None:
    """Return why a backend does not take a shape, on whatever device, or None.

    Args:
        backend: Its name.
        dtype: Of rows and weights.
        size: Input channels of a group, or all where groups lie along the output.
    """
    if backend == "cute" and (dtype not in HALF or size % 8):
        return f"the kernel on CuTe wants half precision and multiples of 8 input channels, got {dtype} and {size}"
    if backend == "tilelang" and (dtype not in HALF or size % 16):
        return f"the kernel in TileLang wants half precision and multiples of 16 input channels, got {dtype} and {size}"
    return None
