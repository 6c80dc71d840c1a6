"""Products and sorts, compiled for a target; `compile_targets.py` runs it."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
from machine_code import described, usage_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from wide.kernels.device import DeviceFacts
from wide.kernels.gemm_k import _triton as gemm_k
from wide.kernels.gemm_k.op import KShape
from wide.kernels.gemm_mn import _triton as gemm_mn
from wide.kernels.gemm_mn.op import MnShape
from wide.kernels.linear_int8 import _triton as linear_int8
from wide.kernels.reorder import _triton as reorder
from wide.kernels.reordering import BLOCK_M

# Largest shared memory of one block in bytes.
SHARED = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
INT_POINTERS = ("INDEX", "PATTERNS", "COUNTS", "TILES", "NUM_TILES", "OFFSETS", "CHUNK_COUNTS", "HISTOGRAM")
INT_POINTERS += ("ITEMS", "NUM_ITEMS", "UNIONS", "PLACES", "FOUND")
SCALE_POINTERS = ("X_SCALE", "SCALE", "UP_SCALE")
BYTE_POINTERS = ("MASK", "COLUMNS", "CODES")
VALUE_POINTERS = ("X", "H", "W", "W_UP", "BIAS", "UP_BIAS", "OUT")
DIVISIBLE = (
    "M",
    "N",
    "stride_total",
    "stride_x",
    "stride_w",
    "stride_out",
    "stride_h",
    "K",
    "first_column",
    "first_out_column",
)


def build(
    kernel: Any,
    target: int,
    constants: dict[str, Any],
    warps: int,
    stages: int,
    divisible: Sequence[str] = (),
    *,
    is_read: bool = False,
    **types: str,
) -> dict[str, Any]:
    """Compile one kernel and read what it uses from its machine code, and where `is_read` its instructions, too.

    `divisible` names further multiples of 16.
    """
    pointers = dict.fromkeys(INT_POINTERS, "*i32") | dict.fromkeys(VALUE_POINTERS, "*bf16")
    pointers |= dict.fromkeys(BYTE_POINTERS, "*u8") | dict.fromkeys(SCALE_POINTERS, "*fp32") | types
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], Any] = {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else pointers.get(name, "i32")
        known = name in (*DIVISIBLE, *divisible) and not kernel.params[place].do_not_specialize
        if signature[name].startswith("*") or known:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    image = compiled.asm["cubin"]
    code, usage = described(image) if is_read else ("", usage_of(image))
    found = re.search(r"STACK:(\d+)", usage)
    return {
        "kernel": kernel.fn.__name__,
        "target": target,
        "shared": compiled.metadata.shared,
        "stack": int(found.group(1)) if found else -1,
        "order": "".join(re.findall(r"\b(LDG|STG|BAR)\b", code)),
        "code": {
            word: len(re.findall(word, code))
            for word in ("HGMMA", "IGMMA", "HMMA", "IMMA", "LDGSTS", "UTMALDG", "F32x4")
        },
    }


def facts_of(target: int) -> DeviceFacts:
    """Return what the default tiles ask of a device of a target."""
    return DeviceFacts(
        name="target", capability=target, num_sms=132, shared_memory_bytes=SHARED[target], l2_bytes=50 * 2**20
    )


def default_tile(module: Any, target: int, shape: Any, **options: Any) -> Any:
    """Return the tile that a backend takes where nothing was measured, as if a device of the target were here."""
    module.device_facts = lambda _: facts_of(target)
    return module.default_tile(torch.device("cpu"), shape, **options)


def gemm_mn_at(target: int, *, int8: bool = False) -> dict[str, Any]:
    """Compile the gated GEMM-MN with its default tile."""
    dtype, kind = (torch.int8, "i8") if int8 else (torch.bfloat16, "bf16")
    shape = MnShape(dtype, 128, 4096, gated=True)
    tile = default_tile(gemm_mn, target, shape, stacked=False)
    constants = {
        "G": 128,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GATED": True,
        "ACTIVATION": "silu",
        "BIAS": None,
        "UP_BIAS": None,
        "WEIGHTS_BY": tile.weights_by,
        "WHOLE_K": True,
        "PRECISION": "tf32",
    }
    constants |= {} if int8 else dict.fromkeys(SCALE_POINTERS)
    box = f"tensordesc<{kind}[{tile.block_n}, {tile.block_k}]>"
    weights = dict.fromkeys(("W", "W_UP"), box if tile.weights_by else f"*{kind}")
    types = {"X": f"*{kind}", **weights}
    return build(gemm_mn._gemm_mn_kernel, target, constants, tile.num_warps, tile.num_stages, is_read=True, **types)


def gemm_k_at(target: int, reduces: bool, run: int, *, int8: bool = False) -> dict[str, Any]:
    """Compile GEMM-K with its default tile; it stores bfloat16 or reduces into float32, `run` tiles in one loop."""
    dtype, kind = (torch.int8, "i8") if int8 else (torch.bfloat16, "bf16")
    tile = default_tile(gemm_k, target, KShape(dtype, 4096, 112, 128, 4096), block_m=BLOCK_M)
    constants = {
        "S": 8,
        "G": 128,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "RUN": run,
        "PIECES": 2,
        "REDUCES": reduces,
        "BIAS": None,
        "BY_TMA": tile.weights_by == 1,
        "PRECISION": "tf32",
    }
    constants |= {} if int8 else {"X_SCALE": None, "SCALE": None}
    box = f"tensordesc<{kind}[{tile.block_n}, {tile.block_k}]>"
    types = {"H": f"*{kind}", "W": box if tile.weights_by else f"*{kind}"}
    if reduces:
        types["OUT"] = "*fp32"
    return build(gemm_k._gemm_k_kernel, target, constants, tile.num_warps, tile.num_stages, is_read=True, **types)


def reorder_at(target: int) -> Iterator[dict[str, Any]]:
    """Compile the kernels of reorder."""
    lists = {"CHUNK": 256, "GROUP_TILE": 32, "stride_g": 1}
    place = {"WIDE": 1024, "CHUNKS_PLACED": 4, "ALL_GROUPS": 128, "BLOCK_M": 128, "BAND": 8}
    count = {"S": 8, "BITS": 8, "CHUNK": 512, "BINS": 256, "stride_g": 1}
    sort = {"CHUNK": 512, "STEP": 128, "BINS": 256, "ALL_BLOCKS": 16, "BLOCK_M": 128, "KEEPS_EMPTY": False}
    yield build(reorder._transpose_kernel, target, lists, 4, 3)
    yield build(reorder._place_kernel, target, place, 4, 3)
    yield build(reorder._histogram_kernel, target, count, 4, 3)
    yield build(reorder._sort_kernel, target, sort, 4, 3)
    yield build(reorder._tiles_kernel, target, {"BLOCK_M": 256, "BAND": 8, "ALL_GROUPS": 128}, 4, 3)


def items_at(target: int) -> Iterator[dict[str, Any]]:
    """Compile the description of tiles of GEMM-K."""
    units = {"UNITS": 2, "S": 8}
    yield build(gemm_k._one_list_kernel, target, units | {"TILES": 128}, 8, 3)
    yield build(gemm_k._unions_kernel, target, units, 1, 3)
    yield build(gemm_k._items_kernel, target, {}, 4, 3)


def drain_at(target: int) -> dict[str, Any]:
    """Compile the drain of GEMM-K that clears what it read; `ordered`: a barrier stands between its load and clear."""
    types = {"TOTAL": "*fp32"}
    constants = {"BIAS": None, "CLEARS": True, "BLOCK": 1024}
    return build(gemm_k._drain_kernel, target, constants, 4, 3, is_read=True, **types)


def int8_at(target: int) -> Iterator[dict[str, Any]]:
    """Compile the dense products of int8 weights, their expansion, and what makes int8 rows."""
    types = {"WEIGHT": "*i8"}
    for rows, width, int8 in ((1, 4096, 0), (64, 4096, 0), (64, 28672, 0), (256, 28672, 0), (4096, 4096, 1)):
        tile = linear_int8.default_tile(rows, width, facts_of(target), int8_rows=bool(int8))
        constants = {"ROWS": tile.rows, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
        flags = {"EVEN_K": True, "BIAS": None} | ({} if int8 else {"X_SCALE": None})
        kinds = {**types, "X": "*i8" if int8 else "*bf16"}
        how = {"divisible": ("stride_xm", "stride_wn"), "is_read": bool(int8)}
        yield build(
            linear_int8._linear_int8, target, constants | flags, tile.num_warps, tile.num_stages, **how, **kinds
        )
    yield build(linear_int8._expand_int8, target, {"BLOCK": 4096}, 4, 3, **types)
    for masked, segment, segments in ((False, 256, 16), (True, 128, 128), (True, 64, 256)):
        constants = {"G": 128, "SEGMENT": segment, "SEGMENTS": segments, "MASKED": masked, "ROTATES": segment == 64}
        strides = ("K", "stride_xm")
        yield build(
            linear_int8._quantise_rows,
            target,
            constants,
            4 if not masked else 16,
            3,
            strides,
            OUT="*i8",
            ROTATION="*bf16",
        )


def kernels_at(target: int) -> Iterator[dict[str, Any]]:
    """Compile all of them."""
    yield gemm_mn_at(target)
    yield gemm_k_at(target, False, 1)
    yield gemm_k_at(target, True, 4)
    yield gemm_mn_at(target, int8=True)
    yield gemm_k_at(target, False, 4, int8=True)
    yield gemm_k_at(target, True, 1, int8=True)
    yield drain_at(target)
    yield from reorder_at(target)
    yield from items_at(target)
    yield from int8_at(target)
