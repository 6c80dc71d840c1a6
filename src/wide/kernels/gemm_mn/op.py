"""GEMM-MN as an operator of torch."""

from collections.abc import Sequence
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.clear_skipped import cleared
from wide.kernels.device import HALF, HOPPER_STEP, hopper_obstacle, interprets_triton, triton_obstacle
from wide.kernels.gemm_mn.reference import ACTIVATIONS, activate, gemm_mn_reference
from wide.kernels.gemm_mn.tiles import POINTERS, TMA_STACKED, ClusterMnTile, MnTile, default_tile
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.native.launch import misaligned
from wide.kernels.registration import check_backend, operator
from wide.kernels.reordering import Reordering

_BACKENDS = ("torch", "triton", "cuda", "dense")
# More rows do not fit into shared memory.
_MAX_BLOCK_M = 128


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
            128 channels if gated, of 256 if not) or 'dense' (computes everything).
        tile: An `MnTile` for Triton, a `ClusterMnTile` for CUDA C++; None takes a default for the device.

    Returns:
        [M, N] in the dtype of `x`, accumulated in float32.

    Raises:
        ShapeError: If shapes, strides or dtypes do not fit together.
        UnsupportedBackendError: If the backend cannot run here.
    """
    return _gemm_mn(x, weight, up_weight, bias, up_bias, *order, mask, activation, backend, tile or ())


def fits(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    group_size: int,
    depth: int,
    gated: bool = False,
    block_m: int = _MAX_BLOCK_M,
) -> str | None:
    """Return why a backend cannot run a shape on a device, or None.

    Args:
        backend: Its name.
        device: Where.
        dtype: Of rows and weights.
        group_size: Channels of a group, G.
        depth: K.
        gated: Whether gate and up are multiplied together.
        block_m: Rows that a tile was made for.
    """
    if backend == "triton":
        if group_size % 16 or not 16 <= block_m <= _MAX_BLOCK_M:
            return triton_obstacle(device, dtype) or (
                f"the Triton backend wants groups that 16 divides and tiles of 16 to {_MAX_BLOCK_M} rows, got groups "
                f"of {group_size} channels and tiles of {block_m}"
            )
        return triton_obstacle(device, dtype)
    if backend != "cuda":
        return None
    missing = hopper_obstacle(device) or native_obstacle()
    if missing is not None or (
        dtype in HALF and depth > 0 and depth % HOPPER_STEP == 0 and fits_cluster(group_size, gated=gated)
    ):
        return missing
    return (
        "the kernel in CUDA C++ wants half precision, K a multiple of 64, and groups of a multiple of 128 channels if "
        f"gated, of 256 if not; got {dtype}, K={depth}, G={group_size}, {'' if gated else 'not '}gated"
    )


def fits_cluster(group_size: int, *, gated: bool) -> bool:
    """Return whether groups of this size are whole tiles of the kernel in CUDA C++."""
    return group_size % (ClusterMnTile().weight_rows // (2 if gated else 1)) == 0


@operator(lambda x, weight: x.new_empty((x.shape[0], weight.shape[0])))
def _gemm_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    index: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    block_m: int,
    mask: torch.Tensor | None,
    activation: str,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    order = Reordering(index, counts, offsets, tiles, num_tiles, block_m)
    options: dict[str, Any] = {"up_weight": up_weight, "bias": bias, "up_bias": up_bias, "activation": activation}
    _check(x, weight, order, mask=mask, **options)
    size, gated = weight.shape[0] // counts.numel(), up_weight is not None
    shape: dict[str, Any] = {"group_size": size, "depth": x.shape[1], "gated": gated, "block_m": block_m}
    reason = fits(backend, x.device, x.dtype, **shape)
    if reason is None and backend == "cuda":
        reason = misaligned({"x": x, "weight": weight, "up_weight": up_weight}, (bias, up_bias))
        if tile and tuple(tile) != ClusterMnTile():
            reason = f"the kernel in CUDA C++ has the tile {ClusterMnTile()} only, got {tuple(tile)}"
    check_backend("gemm_mn", backend, _BACKENDS, reason)
    if backend == "torch":
        return gemm_mn_reference(x, weight, order, mask=mask, **options)
    if backend == "dense":
        return _dense(x, weight, mask=mask, **options)
    if backend == "cuda":
        from wide.kernels.gemm_mn import _cuda

        return _cuda.gemm_mn(x, weight, order, mask=mask, **options)
    from wide.kernels.gemm_mn import _triton

    stacked = _stacked(weight, up_weight)
    chosen = (
        MnTile(*tile)
        if tile
        else default_tile(x.device, group_size=size, block_m=block_m, gated=gated, stacked=stacked, dtype=x.dtype)
    )
    if chosen.block_n < 16 or size % chosen.block_n:
        raise UnsupportedBackendError(
            f"gemm_mn: {chosen} does not work for groups of {size} channels; leave the tile out, or choose "
            "backend='dense'"
        )
    if any(length * weight.element_size() % 16 for length in (weight.shape[1], weight.stride(0))):
        chosen = chosen._replace(weights_by=POINTERS)
    if chosen.weights_by == TMA_STACKED and not stacked:
        raise ShapeError("weights_by=2 wants the up weight right behind the gate weight in memory; use weights_by=1")
    return _triton.gemm_mn(x, weight, order, tile=chosen, mask=mask, **options)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Reordering,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    mask: torch.Tensor | None,
) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ShapeError(
            f"gemm_mn wants x [M, K] and weight [N, K] of one dtype, got {x.dtype} {tuple(x.shape)} and "
            f"{weight.dtype} {tuple(weight.shape)}"
        )
    num_groups = order.counts.numel()
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
    if mask is not None and (mask.shape != (x.shape[0], num_groups) or mask.dtype != torch.bool):
        raise ShapeError(f"mask must be bool {(x.shape[0], num_groups)}, got {mask.dtype} {tuple(mask.shape)}")


def _stacked(weight: torch.Tensor, up_weight: torch.Tensor | None) -> bool:
    bytes_of_weight = weight.numel() * weight.element_size()
    return (
        up_weight is not None
        and weight.is_contiguous()
        and up_weight.data_ptr() == weight.data_ptr() + bytes_of_weight
        and up_weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    )


def _dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Compute every channel with the library's GEMM; the candidate that skipping must beat."""
    if up_weight is None:
        values = torch.nn.functional.linear(x, weight, bias)
        if activation != "none":
            values = activate(values.float(), activation).to(x.dtype)
        return values if mask is None else cleared(values, mask)
    if _stacked(weight, up_weight) and bias is None and up_bias is None:
        width, depth = weight.shape
        both = x @ weight.as_strided((2 * width, depth), (depth, 1)).t()
    else:
        gate = torch.nn.functional.linear(x, weight, bias)
        both = torch.cat((gate, torch.nn.functional.linear(x, up_weight, up_bias)), 1)
    if x.is_cuda and not interprets_triton():
        from wide.kernels.gemm_mn import _triton

        return _triton.gated_activation(both, activation, mask)
    gate, up = both.float().chunk(2, 1)
    values = (activate(gate, activation) * up).to(x.dtype)
    return values if mask is None else cleared(values, mask)
