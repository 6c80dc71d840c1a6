"""The Hopper backends of GEMM-MN, in Gluon and in CUDA C++: what they take, and the calls."""

from collections.abc import Sequence
from typing import Any

import torch

from wide.errors import UnsupportedBackendError
from wide.kernels.contract import Case
from wide.kernels.device import HOPPER_STEP, hopper_obstacle
from wide.kernels.gemm_mn.tiles import ClusterMnTile, HopperMnTile, default_hopper_tile
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.reordering import Reordering

# Elements of 16 bytes, which copies and maps are aligned to.
_LINE = 8
# Consumers of a program in Gluon.
_UNITS = 2
_HALF = (torch.float16, torch.bfloat16)


def run(
    x: torch.Tensor, weight: torch.Tensor, order: Reordering, *, tile: Sequence[int] | None = None, **options: Any
) -> torch.Tensor:
    """Run `gemm_mn_reference` on checked tensors.

    Raises:
        UnsupportedBackendError: If device, dtype, sizes or strides are none that the kernel takes.
    """
    size, gated = weight.shape[0] // order.counts.numel(), options["up_weight"] is not None
    chosen = HopperMnTile(*tile) if tile else default_hopper_tile(size, gated=gated)
    columns = chosen.block_n // 2 if gated else chosen.block_n
    obstacle = hopper_obstacle(x.device) or _obstacle(x.dtype, x.shape[1], size)
    steps = (x.stride(0), weight.stride(0))
    if obstacle is None and chosen.units != _UNITS:
        obstacle = f"a tile has {_UNITS} consumers, got {chosen}"
    if obstacle is None and (size % columns or any(step % 8 for step in steps)):
        obstacle = f"{chosen} does not fit groups of {size} channels or rows {steps} elements apart"
    if obstacle is not None:
        raise UnsupportedBackendError(f"gemm_mn: {obstacle}; choose backend='triton'")
    from wide.kernels.gemm_mn import _gluon

    return _gluon.gemm_mn(x, weight, order, tile=chosen, **options)


def run_cuda(
    x: torch.Tensor, weight: torch.Tensor, order: Reordering, *, tile: Sequence[int] | None = None, **options: Any
) -> torch.Tensor:
    """Run `gemm_mn_reference` on checked tensors by the kernel in CUDA C++.

    Raises:
        UnsupportedBackendError: If device, dtype, sizes, strides or the installation are none that the kernel takes.
    """
    size, gated = weight.shape[0] // order.counts.numel(), options["up_weight"] is not None
    obstacle = hopper_obstacle(x.device) or native_obstacle() or _cluster_obstacle(x.dtype, x.shape[1], size, gated)
    steps = (x.stride(0), weight.stride(0))
    if obstacle is None and tile and tuple(tile) != ClusterMnTile():
        obstacle = f"the kernel in CUDA C++ has the tile {ClusterMnTile()} only, got {tuple(tile)}"
    if obstacle is None and any(step % _LINE for step in steps):
        obstacle = f"rows {steps} elements apart do not fit; the kernel in CUDA C++ wants multiples of {_LINE}"
    others = [options[name] for name in ("up_weight", "bias", "up_bias") if options[name] is not None]
    if obstacle is None and any(t.dtype != x.dtype or t.stride(-1) != 1 for t in (weight, *others)):
        obstacle = (
            f"weights and biases must be contiguous {x.dtype} as x is, got {[t.dtype for t in (weight, *others)]}"
        )
    if obstacle is None and any(t.data_ptr() % (2 * _LINE) for t in (x, weight, options["up_weight"]) if t is not None):
        obstacle = f"x and weights must begin at multiples of {2 * _LINE} bytes"
    if obstacle is not None:
        raise UnsupportedBackendError(f"gemm_mn: {obstacle}; choose backend='gluon', 'triton' or 'torch'")
    from wide.kernels.gemm_mn import _cuda

    return _cuda.gemm_mn(x, weight, order, **options)


def supports(device: torch.device, case: Case) -> str | None:
    """Return why the backend in Gluon cannot run a case, or None."""
    return hopper_obstacle(device) or _obstacle(case.dtype, case.sizes["depth"], case.sizes["group_size"])


def supports_cuda(device: torch.device, case: Case) -> str | None:
    """Return why the backend in CUDA C++ cannot run a case, or None."""
    gated = bool(case.options.get("gated"))
    unfit = _cluster_obstacle(case.dtype, case.sizes["depth"], case.sizes["group_size"], gated)
    return hopper_obstacle(device) or native_obstacle() or unfit


def fits_cluster(group_size: int, *, gated: bool) -> bool:
    """Return whether groups of this size are whole tiles of the kernel in CUDA C++."""
    return group_size % (ClusterMnTile().weight_rows // (2 if gated else 1)) == 0


def _cluster_obstacle(dtype: torch.dtype, depth: int, group_size: int, gated: bool) -> str | None:
    if dtype in _HALF and depth > 0 and depth % HOPPER_STEP == 0 and fits_cluster(group_size, gated=gated):
        return None
    return (
        "the kernel in CUDA C++ wants half precision, K a multiple of 64, and groups of a multiple of 128 channels if "
        f"gated, of 256 if not; got {dtype}, K={depth}, G={group_size}, {'' if gated else 'not '}gated"
    )


def _obstacle(dtype: torch.dtype, depth: int, group_size: int) -> str | None:
    if dtype in _HALF and depth % HOPPER_STEP == 0 and group_size % HOPPER_STEP == 0:
        return None
    return f"the Hopper kernel wants half precision and multiples of 64, got {dtype}, K={depth}, G={group_size}"
