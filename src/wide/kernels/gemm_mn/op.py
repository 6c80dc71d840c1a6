"""GEMM-MN as an operator of torch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.clear_skipped import cleared
from wide.kernels.device import HALF, HOPPER_STEP, backend_obstacle, interprets_triton
from wide.kernels.gemm_mn.reference import ACTIVATIONS, activate, gemm_mn_reference
from wide.kernels.gemm_mn.tiles import CLUSTER_TILE, POINTERS, TMA_STACKED, MnTile, default_tile, tilelang_tile
from wide.kernels.native.cute import CuteTile, tile_misfit
from wide.kernels.native.launch import misaligned
from wide.kernels.registration import check_backend, check_tensor, on_device_of_tensors, operator
from wide.kernels.reordering import Reordering

_BACKENDS = ("torch", "triton", "cuda", "tilelang", "cute", "dense")
# More rows do not fit into shared memory.
_MAX_BLOCK_M = 128


@operator(lambda x, weight: x.new_empty((x.shape[0], weight.shape[0])))
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
        backend: 'torch', 'triton', 'cuda' (CUDA C++, sm_90, half precision, K a multiple of 64, groups of multiples of
            128 channels if gated, of 256 if not), 'tilelang', 'cute' (half precision, K a multiple of 8, groups of 16)
            or 'dense' (computes everything).
        tile: An `MnTile` for Triton and TileLang, a `CuteTile` for CuTe, CUDA C++ has one only; None takes a default
            for the device.

    Returns:
        [M, N] in the dtype of `x`, accumulated in float32.

    Raises:
        ShapeError: If shapes, strides or dtypes do not fit together.
        UnsupportedBackendError: If the backend cannot run here.
    """
    num_groups = order.counts.numel()
    _check(x, weight, num_groups, order.index)
    if up_weight is not None and (up_weight.shape, up_weight.stride()) != (weight.shape, weight.stride()):
        raise ShapeError("gate and up weights must have the same shape and strides")
    if (up_bias is not None and up_weight is None) or activation not in ACTIVATIONS:
        raise ShapeError(f"up_bias needs up_weight; activation is one of {ACTIVATIONS}, got {activation!r}")
    if any(b is not None and b.shape != weight.shape[:1] for b in (bias, up_bias)):
        raise ShapeError(f"biases must have {weight.shape[0]} entries")
    check_tensor("gemm_mn", "mask", mask, torch.bool, (x.shape[0], num_groups), "any strides")
    size, gated = weight.shape[0] // num_groups, up_weight is not None
    options: dict[str, Any] = {"up_weight": up_weight, "bias": bias, "up_bias": up_bias, "activation": activation}
    shape: dict[str, Any] = {"group_size": size, "gated": gated, "block_m": order.block_m}
    reason = backend_obstacle(backend, x.device, x.dtype)
    reason = reason or misfit(backend, x.dtype, depth=x.shape[1], **shape)
    if reason is None and backend in ("cuda", "tilelang", "cute"):
        reason = misaligned({"x": x, "weight": weight, "up_weight": up_weight}, (bias, up_bias))
        if backend == "cute":
            reason = reason or tile_misfit(CuteTile(*(tile or ())))
        elif backend == "cuda" and tile and tuple(tile) != CLUSTER_TILE:
            reason = f"the kernel in CUDA C++ has the tile {CLUSTER_TILE} only, got {tuple(tile)}"
    check_backend("gemm_mn", backend, _BACKENDS, reason)
    if backend == "torch":
        return gemm_mn_reference(x, weight, order, mask=mask, **options)
    if backend == "dense":
        return dense_mn(x, weight, mask=mask, **options)
    if backend == "cuda":
        from wide.kernels.gemm_mn import _cuda

        return _cuda.gemm_mn(x, weight, order, mask=mask, **options)
    if backend == "cute":
        from wide.kernels.gemm_mn import _cute

        return _cute.gemm_mn(x, weight, order, mask=mask, tile=CuteTile(*(tile or ())), **options)
    stacked = _stacked(weight, up_weight)
    chosen = default_tile(x.device, stacked=stacked, dtype=x.dtype, **shape)
    if backend == "tilelang":
        chosen = tilelang_tile(x.device, **shape)
    chosen = MnTile(*tile) if tile else chosen
    if chosen.block_n < 16 or size % chosen.block_n:
        raise UnsupportedBackendError(
            f"gemm_mn: {chosen} does not work for groups of {size} channels; leave the tile out, or choose "
            "backend='dense'"
        )
    if backend == "tilelang":
        from wide.kernels.gemm_mn import _tilelang

        return _tilelang.gemm_mn(x, weight, order, tile=chosen, mask=mask, **options)
    from wide.kernels.gemm_mn import _triton

    if any(length * weight.element_size() % 16 for length in (weight.shape[1], weight.stride(0))):
        chosen = chosen._replace(weights_by=POINTERS)
    if chosen.weights_by == TMA_STACKED and not stacked:
        raise ShapeError("weights_by=2 wants the up weight right behind the gate weight in memory; use weights_by=1")
    return _triton.gemm_mn(x, weight, order, tile=chosen, mask=mask, **options)


def _check(x: torch.Tensor, weight: torch.Tensor, num_groups: int, index: torch.Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ShapeError(
            f"gemm_mn wants x [M, K] and weight [N, K] of one dtype, got {x.dtype} {tuple(x.shape)} and "
            f"{weight.dtype} {tuple(weight.shape)}"
        )
    if weight.shape[0] % num_groups or index.shape != (num_groups, x.shape[0]):
        raise ShapeError(
            f"a reordering of {tuple(index.shape)} (groups, rows) does not fit x {tuple(x.shape)} and weight "
            f"{tuple(weight.shape)}"
        )
    if x.shape[0] * num_groups >= 2**31:
        raise ShapeError(f"{x.shape[0]} rows x {num_groups} groups exceed 2^31 entries; split the rows")
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise ShapeError("gemm_mn wants x and weight with contiguous rows; call .contiguous() once, at load time")


def misfit(
    backend: str, dtype: torch.dtype, *, group_size: int, depth: int, gated: bool = False, block_m: int = _MAX_BLOCK_M
) -> str | None:
    """Return why a backend does not take a shape, on whatever device, or None.

    Args:
        backend: Its name.
        dtype: Of rows and weights.
        group_size: Channels of a group, G.
        depth: K.
        gated: Whether gate and up are multiplied together.
        block_m: Rows that a tile was made for.
    """
    if backend == "triton" and (group_size % 16 or not 16 <= block_m <= _MAX_BLOCK_M):
        return (
            f"the Triton backend wants groups that 16 divides and tiles of 16 to {_MAX_BLOCK_M} rows, got groups of "
            f"{group_size} channels and tiles of {block_m}"
        )
    fits = group_size % 16 == 0 and depth > 0 and depth % 8 == 0 and 16 <= block_m <= _MAX_BLOCK_M
    if backend == "tilelang" and not (dtype in HALF and fits):
        return (
            f"the kernel in TileLang wants half precision, K a multiple of 8, groups of a multiple of 16 channels and "
            f"tiles of 16 to {_MAX_BLOCK_M} rows; got {dtype}, K={depth}, G={group_size} and tiles of {block_m}"
        )
    if backend == "cute" and not (dtype in HALF and depth > 0 and depth % 8 == 0 and group_size % 16 == 0):
        return (
            "the kernel on CuTe wants half precision, K a multiple of 8 and groups of a multiple of 16 channels; got "
            f"{dtype}, K={depth}, G={group_size}"
        )
    whole = group_size % (CLUSTER_TILE[1] // (2 if gated else 1)) == 0
    if backend == "cuda" and not (dtype in HALF and depth > 0 and depth % HOPPER_STEP == 0 and whole):
        return (
            "the kernel in CUDA C++ wants half precision, K a multiple of 64, and groups of a multiple of 128 channels "
            f"if gated, of 256 if not; got {dtype}, K={depth}, G={group_size}, {'' if gated else 'not '}gated"
        )
    return None


def _stacked(weight: torch.Tensor, up_weight: torch.Tensor | None) -> bool:
    bytes_of_weight = weight.numel() * weight.element_size()
    return (
        up_weight is not None
        and weight.is_contiguous()
        and up_weight.data_ptr() == weight.data_ptr() + bytes_of_weight
        and up_weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    )


@functools.partial(on_device_of_tensors, "gemm_mn")
def dense_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    mask: torch.Tensor | None,
    ready: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Compute every channel with the library's GEMM; the candidate that skipping must beat.

    Arguments are those of `gemm_mn`; `ready` is called between the product and the first look at `mask`, which may be
    on its way until then.
    """
    if up_weight is None:
        values = torch.nn.functional.linear(x, weight, bias)
    elif _stacked(weight, up_weight) and bias is None and up_bias is None:
        width, depth = weight.shape
        values = x @ weight.as_strided((2 * width, depth), (depth, 1)).t()
    else:
        gate = torch.nn.functional.linear(x, weight, bias)
        values = torch.cat((gate, torch.nn.functional.linear(x, up_weight, up_bias)), 1)
    if ready is not None:
        ready()
    if up_weight is not None and x.is_cuda and not interprets_triton():
        from wide.kernels.gemm_mn import _triton

        return _triton.gated_activation(values, activation, mask)
    if up_weight is not None:
        gate, up = values.float().chunk(2, 1)
        values = (activate(gate, activation) * up).to(x.dtype)
    elif activation != "none":
        values = activate(values.float(), activation).to(x.dtype)
    return values if mask is None else cleared(values, mask)
