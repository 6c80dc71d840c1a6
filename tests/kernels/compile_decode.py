"""Attention and decode kernels, compiled for a target; `compile_targets.py` runs it."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import compile_kernels
import triton

from wide.kernels.attention_decode import _triton as decode
from wide.kernels.attention_prefill import _triton as prefill
from wide.kernels.device import DeviceFacts
from wide.kernels.gemv import _triton as gemv

# Largest shared memory of one block in bytes.
VALUES = dict.fromkeys(("Q", "K", "V"), "*bf16")
FLOATS = dict.fromkeys(("scale", "cap_in", "cap_out"), "fp32") | dict.fromkeys(
    ("PART_OUT", "PART_MAX", "PART_SUM"), "*fp32"
)
INTS = dict.fromkeys(("STARTS", "LENGTHS", "ENDS", "RUNS", "PAGES"), "*i32")
TYPES = VALUES | FLOATS | INTS
WEIGHT_STRIDES = ("stride_xm", "stride_hm", "stride_wn", "stride_un")
STRIDES = (*(f"stride_{tensor}{dim}" for tensor in "qkv" for dim in "bth"), *WEIGHT_STRIDES)
build = functools.partial(compile_kernels.build, divisible=STRIDES)
HEADS = {"NUM_UNITS": 8, "NUM_GROUPS": 8, "NUM_KV_HEADS": 8, "HEADS": 4}


def prefill_at(facts: DeviceFacts, head_dim: int, *, edges: bool, runs: bool = False) -> dict[str, Any]:
    """Compile prefill attention with its default tile.

    `edges` asks for window and soft cap; `runs` for runs and soft cap, since runs exclude the others.
    """
    tile = prefill.default_tile(facts, head_dim, uses_tma=facts.capability in (90, 100))
    block_d = triton.next_power_of_2(head_dim)
    constants = HEADS | {
        "D": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "HAS_CAP": edges or runs,
        "USES_TMA": tile.uses_tma,
    }
    # What is not given is None.
    constants |= ({} if edges else {"window": None}) | ({} if runs else {"RUNS": None})
    types = dict(TYPES)
    if tile.uses_tma:
        types["K"] = types["V"] = f"tensordesc<bf16[1, {tile.block_n}, 1, {block_d}]>"
    how = {"is_read": edges and head_dim == 128}
    return build(
        prefill._attention_prefill, facts.capability, constants, tile.num_warps, tile.num_stages, **how, **types
    )


def decode_at(facts: DeviceFacts, head_dim: int, *, edges: bool) -> dict[str, Any]:
    """Compile the split of decode attention with its default tile."""
    tile = decode.default_tile(facts, head_dim, 256)
    constants = HEADS | {
        "PAIRS": 256,
        "ROWS": 16,
        "D": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_N": tile.block_n,
        "MIN_BLOCKS": tile.min_blocks,
        "HAS_CAP": edges,
        "PAGE": 256 if edges else 0,
    }
    if not edges:
        constants |= {"STARTS": None, "PAGES": None, "window": None}
    how = {"is_read": edges and head_dim == 128}
    return build(decode._attend_share, facts.capability, constants, tile.num_warps, tile.num_stages, **how, **TYPES)


def merge_at(facts: DeviceFacts) -> dict[str, Any]:
    """Compile the merge of decode attention."""
    constants = {"HEADS": 4, "D": 128, "BLOCK_D": 128, "BLOCK_P": 16, "MIN_BLOCKS": 2}
    return build(decode._merge_parts, facts.capability, constants, 4, 3, **TYPES)


def gemv_at(facts: DeviceFacts, rows: int, weights: str = "bf16") -> Iterator[dict[str, Any]]:
    """Compile both decode GEMMs for a number of rows."""
    is_int8 = weights == "i8"
    types = dict.fromkeys(("WEIGHT", "UP_WEIGHT"), f"*{weights}") | dict.fromkeys(("SCALE", "UP_SCALE"), "*fp32")
    rows_of = {"ROWS": rows, "G": 128, "BIAS": None} | ({} if is_int8 else {"SCALE": None})
    tile = gemv.default_mn_tile(facts, is_gated=True)
    wide = {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "EVEN_K": True, "IS_GATED": True, "ACTIVATION": "silu"}
    wide |= {"UP_BIAS": None} | ({} if is_int8 else {"UP_SCALE": None})
    constants = rows_of | wide | {"ZERO_SKIPPED": False, "ROWS_PAD": triton.next_power_of_2(rows)}
    yield build(gemv._gemv_mn, facts.capability, constants, tile.num_warps, 3, **types)
    for is_long in (False, True):
        tile = gemv.default_k_tile(facts, is_long=is_long)
        constants = rows_of | {"SEGMENT": 128, "BLOCK_N": tile.block_n, "UNROLL": tile.block_k // 128}
        yield build(gemv._gemv_k, facts.capability, constants, tile.num_warps, 3, **types)


def kernels_at(target: int, head_dims: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Compile all of them, attention for each size of heads, without and with what is rare."""
    facts = compile_kernels.facts_of(target)
    for head_dim in head_dims:
        yield prefill_at(facts, head_dim, edges=False, runs=True) | {"head_dim": head_dim, "edges": True}
        for edges in (False, True):
            for result in (prefill_at(facts, head_dim, edges=edges), decode_at(facts, head_dim, edges=edges)):
                yield result | {"head_dim": head_dim, "edges": edges}
    yield from (merge_at(facts), *gemv_at(facts, 1), *gemv_at(facts, 4))
    for rows in (1, 4):
        yield from gemv_at(facts, rows, "i8")
