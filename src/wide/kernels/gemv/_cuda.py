"""Products of few rows with int8 weights in CUDA C++ (gemv_int8.cu), for sm_80 and newer: tensor cores."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from wide.kernels.device import HALF, ampere_obstacle, device_facts
from wide.kernels.dispatch import require
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.gemv.op import K_BACKENDS, MN_BACKENDS, GemvShape
from wide.kernels.native.build import cache_folder, cubin
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.native.launch import Kernel, misaligned
from wide.kernels.tuning import bucket

SOURCE = Path(__file__).with_name("gemv_int8.cu")
MAX_ROWS = 32
"""Rows that a product takes, as they are or in int8: of more, other kernels were measured faster."""
CHANNELS, PIECE = 16, 64
"""Weight rows of a tile, and inputs that a warp multiplies at a time, as in the source."""
_MAX_GROUPS = 1024


def obstacle(device: torch.device, _: torch.dtype) -> str | None:
    """Return why the kernel cannot run on `device`, or None if it can."""
    return ampere_obstacle(device) or native_obstacle()


def supports(shape: GemvShape) -> str | None:
    """Return why no device runs a shape, or None."""
    if shape.int8 and shape.dtype in HALF and shape.size % PIECE == 0 and shape.width % CHANNELS == 0:
        return None
    return (
        f"the kernel in CUDA C++ wants int8 weights, rows in half precision, inputs in groups of a multiple of {PIECE} "
        f"and outputs of {CHANNELS}; got {'int8' if shape.int8 else shape.dtype}, {shape.size} and {shape.width}"
    )


def macros(num_rows: int, *, float16: bool, **chosen: int) -> dict[str, int]:
    """Return what is compiled in; of what is not named, flags are 0."""
    names = ("SUMS", "GATED", "ACTIVATION", "HAS_MASK", "ZERO_SKIPPED", "HAS_BIAS", "HAS_UP_BIAS", "INT8", "ROTATES")
    tiles = bucket(-(-num_rows // 8))
    sizes = {"GROUP": PIECE, "TILES": tiles, "WARPS": 8, "TEAMS": 1}
    return dict.fromkeys(names, 0) | {"FLOAT16": int(float16)} | sizes | chosen


def shared_out(variant: Mapping[str, int], width: int, num_sms: int) -> dict[str, int]:
    """Return warps and teams of a block, so that most multiprocessors have work, and none reads rows often."""
    if variant["TILES"] <= 2:
        return {"WARPS": 8, "TEAMS": 1}
    tiles = width // CHANNELS if variant["GATED"] else width // CHANNELS // 2
    teams = next((teams for teams in (4, 2) if tiles % teams == 0 and tiles >= 2 * teams * num_sms), 1)
    return {"WARPS": 16 if tiles <= num_sms else 8, "TEAMS": teams}


@functools.cache
def _kernel(capability: int, variant: tuple[tuple[str, int], ...]) -> Kernel:
    code = cubin(SOURCE, cache_folder() / "kernels", architecture=f"sm_{capability}", macros=dict(variant))
    return Kernel(code, SOURCE.stem, threads=32 * dict(variant)["WARPS"], shared_bytes=0, instead="triton")


@MN_BACKENDS.register("cuda", needs=obstacle, supports=supports)
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
    scale: torch.Tensor,
    up_scale: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    **int8: Any,
) -> torch.Tensor:
    """Run `gemv_mn_reference` of few rows, rotated; of int8 ones their scales and the dtype of the result are given."""
    given: dict[str, Any] = {"up_weight": up_weight, "up_scale": up_scale, "bias": bias, "up_bias": up_bias, **int8}
    chosen = {"GATED": up_weight is not None, "ACTIVATION": ACTIVATIONS.index(activation), "ROTATES": _size(rotation)}
    chosen["INT8"] = x.dtype == torch.int8
    return _run(x, weight, mask, scale, chosen, zero_skipped=zero_skipped and mask is not None, **given)


@K_BACKENDS.register("cuda", needs=obstacle, supports=supports)
def gemv_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    rotation: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `gemv_k_reference` of few rows, rotated."""
    if mask.shape[1] > _MAX_GROUPS:
        require(f"the kernel in CUDA C++ takes up to {_MAX_GROUPS} groups, got {mask.shape[1]}")
    chosen = {"SUMS": 1, "GROUP": h.shape[1] // mask.shape[1], "ROTATES": _size(rotation)}
    return _run(h, weight, mask, scale, chosen, bias=bias)


def _size(rotation: torch.Tensor | None) -> int:
    """Return the channels of a block, 0 where none is rotated; the kernel knows the entries of `hadamard`."""
    return 0 if rotation is None else len(rotation)


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor | None,
    scale: torch.Tensor,
    chosen: dict[str, int],
    *,
    up_weight: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    zero_skipped: bool = False,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    biases = (bias, up_bias) if x_scale is None else ()
    require(misaligned({"x": x}, biases) or misaligned({"weight": weight, "up_weight": up_weight}, ()))
    num_rows, depth = x.shape
    width = weight.shape[0]
    out = x.new_empty(num_rows, width, dtype=dtype or x.dtype)
    flags = {"HAS_MASK": mask, "HAS_BIAS": bias, "HAS_UP_BIAS": up_bias}
    chosen |= {name: int(value is not None) for name, value in flags.items()} | {"ZERO_SKIPPED": int(zero_skipped)}
    variant = macros(num_rows, float16=out.dtype == torch.float16, **{key: int(value) for key, value in chosen.items()})
    facts = device_facts(x.device)
    variant |= shared_out(variant, width, facts.num_sms)
    tiles = 2 if variant["TILES"] > 2 and up_weight is None else 1
    kernel = _kernel(facts.capability, tuple(sorted(variant.items())))
    up = weight if up_weight is None else up_weight
    kernel(
        x.device, width // (CHANNELS * tiles * variant["TEAMS"]),
        x, weight, up, *(out if each is None else each for each in (bias, up_bias)),
        scale, *(scale if each is None else each for each in (up_scale, x_scale)), out if mask is None else mask, out,
        num_rows, width, depth,
        x.stride(0), weight.stride(0), up.stride(0), 0 if mask is None else mask.stride(0),
        1 if mask is None else mask.shape[1],
    )  # fmt: skip
    return out
