"""The Hopper backend of GEMM-K: what it takes, and the call."""

from collections.abc import Sequence
from typing import Any

import torch

from wide.errors import UnsupportedBackendError
from wide.kernels.contract import Case
from wide.kernels.device import hopper_obstacle
from wide.kernels.gemm_k.tiles import HopperKTile, default_hopper_tile
from wide.kernels.reordering import PatternReordering

_K_STEP, _MAX_GROUPS = 64, 8
_MIN_WIDTH = 128
# Consumers of a program.
_UNITS = 2
_HALF = (torch.float16, torch.bfloat16)


def run(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    tile: Sequence[int] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Run `gemm_k_reference` on checked tensors.

    Raises:
        UnsupportedBackendError: If device, dtype, sizes, strides or options are none that the kernel takes.
    """
    group_size, width = options["group_size"], weight.shape[0]
    chosen = HopperKTile(*tile) if tile else default_hopper_tile(width)
    limited = options["packed"] is not None or options["deterministic"]
    obstacle = hopper_obstacle(h.device) or _obstacle(h.dtype, group_size, order.groups_per_block, limited)
    steps = (h.stride(0), weight.stride(0))
    columns = (width, chosen.slab)
    if obstacle is None and chosen.units != _UNITS:
        obstacle = f"a tile has {_UNITS} consumers, got {chosen}"
    if obstacle is None and (any(c % chosen.block_n for c in columns) or any(s % 8 for s in steps)):
        obstacle = f"{chosen} does not fit a width of {width} or rows {steps} elements apart"
    if obstacle is not None:
        raise UnsupportedBackendError(f"gemm_k: {obstacle}; choose backend='triton'")
    from wide.kernels.gemm_k import _gluon

    return _gluon.gemm_k(
        h,
        weight,
        order,
        group_size=group_size,
        bias=options["bias"],
        out_dtype=options["out_dtype"] or h.dtype,
        tile=chosen,
    )


def supports(device: torch.device, case: Case) -> str | None:
    """Return why the backend cannot run a case, or None."""
    sizes, options = case.sizes, case.options
    limited = bool(options.get("packed") or options.get("deterministic")) or sizes["width"] % _MIN_WIDTH != 0
    groups = sizes.get("groups_per_block", _MAX_GROUPS)
    return hopper_obstacle(device) or _obstacle(case.dtype, sizes["group_size"], groups, limited)


def _obstacle(dtype: torch.dtype, group_size: int, groups_per_block: int, limited: bool) -> str | None:
    if dtype in _HALF and group_size % _K_STEP == 0 and groups_per_block <= _MAX_GROUPS and not limited:
        return None
    return (
        f"the Hopper kernel wants half precision, groups of a multiple of 64 channels, at most {_MAX_GROUPS} in a "
        f"super-block, neither packed nor deterministic; got {dtype}, G={group_size}, {groups_per_block} groups"
    )
