"""The Hopper backend of GEMM-MN: what it takes, and the call."""

from collections.abc import Sequence
from typing import Any

import torch

from wide.errors import UnsupportedBackendError
from wide.kernels.contract import Case
from wide.kernels.device import hopper_obstacle
from wide.kernels.gemm_mn.tiles import HopperMnTile, default_hopper_tile
from wide.kernels.reordering import Reordering

_K_STEP = 64
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
    if obstacle is None and (size % columns or any(step % 8 for step in steps)):
        obstacle = f"{chosen} does not fit groups of {size} channels or rows {steps} elements apart"
    if obstacle is not None:
        raise UnsupportedBackendError(f"gemm_mn: {obstacle}; choose backend='triton'")
    from wide.kernels.gemm_mn import _gluon

    return _gluon.gemm_mn(x, weight, order, tile=chosen, **options)


def supports(device: torch.device, case: Case) -> str | None:
    """Return why the backend cannot run a case, or None."""
    return hopper_obstacle(device) or _obstacle(case.dtype, case.sizes["depth"], case.sizes["group_size"])


def _obstacle(dtype: torch.dtype, depth: int, group_size: int) -> str | None:
    if dtype in _HALF and depth % _K_STEP == 0 and group_size % _K_STEP == 0:
        return None
    return f"the Hopper kernel wants half precision and multiples of 64, got {dtype}, K={depth}, G={group_size}"
