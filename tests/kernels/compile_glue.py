"""Norm, rope and router kernels, compiled for a target; `compile_targets.py` runs it."""

import functools
from collections.abc import Iterator
from typing import Any

import compile_kernels

from wide.kernels.clear_skipped import _triton as clear_skipped
from wide.kernels.rms_norm import _triton as rms_norm
from wide.kernels.rope import _triton as rope
from wide.kernels.route import _triton as route

HALF = dict.fromkeys(
    ("X", "Q", "K", "V", "COS", "SIN", "K_CACHE", "V_CACHE", "Q_NORM", "K_NORM", "OUT"), "*bf16"
) | dict.fromkeys(("ADDEND", "WEIGHT", "TOTAL", "NORMED", "DOWN"), "*bf16")
FLOATS = dict.fromkeys(("DIFFERENCE", "OFFSET", "PARTIAL"), "*fp32") | {"eps": "fp32"}
TYPES = (
    HALF
    | FLOATS
    | {"POSITIONS": "*i32", "PLACES": "*i64", "COUNTER": "*i32", "MASK": "*u8", "PADDING": "*u8", "COUNTS": "*i32"}
)
STRIDES = ("stride_xm", "stride_ym", *(f"stride_{tensor}{dim}" for tensor in "qkvc" for dim in "bth"))


def kernels_at(target: int) -> Iterator[dict[str, Any]]:
    """Compile each kernel for shapes of an 8B model."""
    build = functools.partial(compile_kernels.build, divisible=STRIDES)
    for pairs, size, block in ((32, 512, 512), (128, 128, 128)):
        sizes = {"G": size, "PAIRS": pairs, "BLOCK_C": block}
        yield build(clear_skipped._clear_skipped, target, sizes, 4, 3, **TYPES)
    norm = {"D": 4096, "BLOCK_D": 4096, "UNIT_OFFSET": False}
    yield build(rms_norm._rms_norm, target, norm, 4, 3, **TYPES)
    heads = {"H_Q": 32, "H_K": 8, "D": 128, "BLOCK_D": 64}
    for at_once, group, turned, other in (
        (16, 0, 128, False),
        (64, 4, 128, False),
        (16, 0, 64, True),
        (16, 0, 64, False),
    ):
        form = {"HEADS": at_once, "GROUP": group, "R": turned, "INTERLEAVED": other, "UNIT_OFFSET": other}
        yield build(rope._rope_to_cache, target, heads | form, 4, 3, **TYPES)
    router = {"D": 4096, "R": 32, "BLOCK_R": 32, "PARTS": 2, "NUM_GROUPS": 112, "OFFSET": None}
    facts = compile_kernels.facts_of(target)
    for num_rows in (16, 8192, 16384):
        tile = route.default_tile(facts, num_rows)
        names = {"BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k, "BLOCK_G": tile.block_g}
        yield build(route._route, target, router | names, tile.num_warps, tile.num_stages, **TYPES)
    split = {"BLOCK_G": 128, "BLOCK_M": route.SMALLEST_BLOCK, "BLOCK_K": 256, "SHARE": 256, "NUM_SHARES": 16}
    yield build(route._route_split, target, router | split | {"BLOCK_S": 16}, 4, 3, **TYPES)
    few = {"BLOCK_D": 4096, "BLOCK_G": 128, "SHARE": 128, "NUM_SHARES": 32, "BLOCK_S": 32}
    flags = {"UNIT_OFFSET": False, "READS_RESIDUAL": False}
    yield build(route._route_few, target, router | few | flags, 4, 3, **TYPES)
