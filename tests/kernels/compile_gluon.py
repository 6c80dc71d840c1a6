"""Compiles the Hopper kernels without a GPU; prints one JSON object per kernel. Run as a program, not under pytest.

Triton decides at import whether it interprets or compiles, so this needs a process of its own.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from wide.kernels.gemm_k import _gluon as gemm_k
from wide.kernels.gemm_k import tiles as k_tiles
from wide.kernels.gemm_mn import _gluon as gemm_mn

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INT_POINTERS = ("INDEX", "COUNTS", "OFFSETS", "TILES", "NUM_TILES", "PATTERNS", "ITEMS", "NUM_ITEMS")
VALUE_POINTERS = ("X", "H", "BIAS", "UP_BIAS", "OUT")
BYTE_POINTERS = ("MASK",)
DIVISIBLE = ("stride_x", "stride_h", "stride_out", "stride_m", "slots_per_row", "first_out_column")
WORDS = ("HGMMA", "LDGSTS", "UTMALDG", "F32x2", "F32x4", r"LDG\.E\.U8", r"STG\.E\.128 .*RZ ")
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def build(name: str, kernel: Any, constants: dict[str, Any], box: int, **types: str) -> dict[str, Any]:
    """Compile one kernel for sm_90 and read what it uses from its machine code."""
    weights = f"tensordesc<bf16[{box}, 64],{LAYOUT!r}>"
    known = dict.fromkeys(INT_POINTERS, "*i32") | dict.fromkeys(VALUE_POINTERS, "*bf16")
    known |= dict.fromkeys(BYTE_POINTERS, "*u8")
    known |= {"W": weights, "W_UP": weights} | types
    signature = {arg: "constexpr" if arg in constants else known.get(arg, "i32") for arg in kernel.arg_names}
    aligned = [arg for arg, kind in signature.items() if kind.startswith("*") or arg in DIVISIBLE]
    source = GluonASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(arg),): value for arg, value in constants.items()},
        {(kernel.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        code = _tool("nvdisasm", "-c", file.name)
        usage = _tool("cuobjdump", "-res-usage", file.name)
    found = re.search(r"STACK:(\d+)", usage)
    return {
        "name": name,
        "shared": compiled.metadata.shared,
        "stack": int(found.group(1)) if found else -1,
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "frozen_arrivals": _frozen_arrivals(compiled.asm["ttgir"]),
        "code": {word: len(re.findall(word, code)) for word in WORDS},
    }


def _frozen_arrivals(ttgir: str) -> int:
    """Count arrivals in a loop at a barrier that is chosen outside of it, so that the ring would stand still."""
    lines = ttgir.splitlines()
    arrivals = [(at, re.match(r"( *)ttng\.arrive_barrier (%\w+)", line)) for at, line in enumerate(lines)]
    frozen = 0
    for at, arrival in arrivals:
        if arrival is None:
            continue
        loops = [i for i in range(at) if re.match(rf" {{0,{len(arrival[1]) - 1}}}\S.*scf\.for", lines[i])]
        body = "\n".join(lines[loops[-1] : at])
        index = re.search(rf"{arrival[2]} = ttg\.memdesc_index %\w+\[(%\w+)", body)
        frozen += index is None or re.search(rf"{index[1]}(:\d+)? = ", body) is None
    return frozen


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def mn(name: str, tile: tuple[int, int, int, int], *, gated: bool, clears: bool = False) -> dict[str, Any]:
    """Compile GEMM-MN with a `HopperMnTile`; `clears` writes zeros to skipped channels."""
    _, block_n, stages, wide_stores = tile
    columns = block_n // 2 if gated else block_n
    size = 128 if gated else 512
    constants = {
        "G": size,
        "PARTS": size // columns,
        "BLOCK_N": block_n,
        "STAGES": stages,
        "GATED": gated,
        "ACTIVATION": "silu" if gated else "none",
        "HAS_BIAS": False,
        "HAS_UP_BIAS": False,
        "PACKED": False,
        "WIDE": wide_stores,
        "CLEARS": clears,
        "stride_g": 1,
    }
    return build(name, gemm_mn._gemm_mn_kernel, constants, columns)


def k(name: str, tile: tuple[int, int, int], size: int, writes: int) -> dict[str, Any]:
    """Compile GEMM-K with the beginning of a `HopperKTile`; `writes` as in the kernel's file."""
    _, block_n, stages = tile
    constants = {
        "S": 8,
        "G": size,
        "BLOCK_N": block_n,
        "STAGES": stages,
        "WRITES": writes,
        "HAS_BIAS": False,
    }
    types = {} if writes == k_tiles.STORE else {"OUT": "*fp32"}
    return build(name, gemm_k._gemm_k_kernel, constants, block_n, **types)


def main() -> None:
    """Compile everything."""
    for result in (
        mn("gate_up 128 rows", (2, 256, 4, 1), gated=True),
        mn("gate_up with zeros", (2, 256, 4, 1), gated=True, clears=True),
        mn("gate_up without rearranging", (2, 256, 4, 0), gated=True),
        mn("query 128 rows", (2, 256, 4, 1), gated=False),
        k("down pairs", (2, 256, 4), 128, k_tiles.REDUCE_PAIRS),
        k("down quads", (2, 256, 4), 128, k_tiles.REDUCE_QUADS),
        k("output", (2, 256, 4), 512, k_tiles.STORE),
    ):
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
