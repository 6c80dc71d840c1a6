"""The Hopper backends of GEMM-K, in Gluon and in CUDA C++: what they take, and the calls."""

from collections.abc import Sequence
from typing import Any

import torch

from wide.errors import UnsupportedBackendError
from wide.kernels.contract import Case
from wide.kernels.device import HOPPER_STEP, hopper_obstacle
from wide.kernels.gemm_k.tiles import HopperKTile, StoredKTile, default_hopper_tile
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.reordering import PATTERN_GROUPS, PatternReordering

_MIN_WIDTH = 128
# Elements of 16 bytes, which copies and maps are aligned to.
_LINE = 8
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


def run_cuda(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    tile: Sequence[int] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Run `gemm_k_reference` on checked tensors by the kernel in CUDA C++.

    Raises:
        UnsupportedBackendError: If device, dtype, sizes, strides, options or the installation are none that it takes.
    """
    bias, group_size = options["bias"], options["group_size"]
    limited = options["packed"] is not None or options["out_dtype"] not in (None, h.dtype)
    stored = order.counts.numel() == 1 and order.keeps_empty and order.groups_per_block <= PATTERN_GROUPS
    obstacle = (
        hopper_obstacle(h.device)
        or native_obstacle()
        or _stored_obstacle(h.dtype, group_size, weight.shape[0], is_stored=stored and not limited)
    )
    steps = (h.stride(0), weight.stride(0))
    if obstacle is None and tile and tuple(tile) != StoredKTile():
        obstacle = f"the kernel in CUDA C++ has the tile {StoredKTile()} only, got {tuple(tile)}"
    if obstacle is None and any(step % _LINE for step in steps):
        obstacle = f"rows {steps} elements apart do not fit; the kernel in CUDA C++ wants multiples of {_LINE}"
    if obstacle is None and bias is not None and (bias.dtype != h.dtype or bias.stride(0) != 1):
        obstacle = f"the bias must be contiguous {h.dtype} as h is, got {bias.dtype}"
    if obstacle is None and any(t.data_ptr() % (2 * _LINE) for t in (h, weight)):
        obstacle = f"h and the weight must begin at multiples of {2 * _LINE} bytes"
    if obstacle is not None:
        raise UnsupportedBackendError(f"gemm_k: {obstacle}; choose backend='gluon', 'triton' or 'torch'")
    from wide.kernels.gemm_k import _cuda

    return _cuda.gemm_k(h, weight, order, group_size=group_size, bias=bias)


def supports(device: torch.device, case: Case) -> str | None:
    """Return why the backend in Gluon cannot run a case, or None."""
    sizes, options = case.sizes, case.options
    limited = bool(options.get("packed") or options.get("deterministic")) or sizes["width"] % _MIN_WIDTH != 0
    groups = sizes.get("groups_per_block", PATTERN_GROUPS)
    return hopper_obstacle(device) or _obstacle(case.dtype, sizes["group_size"], groups, limited)


def supports_cuda(device: torch.device, case: Case) -> str | None:
    """Return why the backend in CUDA C++ cannot run a case, or None."""
    sizes, options = case.sizes, case.options
    stored = bool(options.get("keeps_empty")) and sizes["num_groups"] <= sizes.get("groups_per_block", PATTERN_GROUPS)
    limited = bool(options.get("packed") or options.get("out_dtype") not in (None, case.dtype))
    unfit = _stored_obstacle(case.dtype, sizes["group_size"], sizes["width"], is_stored=stored and not limited)
    return hopper_obstacle(device) or native_obstacle() or unfit


def fits_stored(group_size: int, num_groups: int, width: int) -> bool:
    """Return whether the kernel in CUDA C++ takes groups of a size, all in one super-block, and an output width."""
    return group_size % HOPPER_STEP == 0 and num_groups <= PATTERN_GROUPS and width % StoredKTile().columns == 0


def _stored_obstacle(dtype: torch.dtype, group_size: int, width: int, *, is_stored: bool) -> str | None:
    if dtype in _HALF and is_stored and fits_stored(group_size, 1, width):
        return None
    return (
        f"the kernel in CUDA C++ wants half precision in and out, groups of a multiple of {HOPPER_STEP} channels, a "
        f"width that is a multiple of {StoredKTile().columns}, and rows that are not packed, sorted in one super-block "
        f"of at most {PATTERN_GROUPS} groups that keeps empty ones; got {dtype}, G={group_size}, width {width}, "
        f"{'' if is_stored else 'not '}so sorted"
    )


def _obstacle(dtype: torch.dtype, group_size: int, groups_per_block: int, limited: bool) -> str | None:
    if dtype in _HALF and group_size % HOPPER_STEP == 0 and groups_per_block <= PATTERN_GROUPS and not limited:
        return None
    return (
        f"the Hopper kernel wants half precision, groups of a multiple of {HOPPER_STEP} channels, at most "
        f"{PATTERN_GROUPS} in a super-block, neither packed nor deterministic; got {dtype}, G={group_size}, "
        f"{groups_per_block} groups"
    )
