"""The Hopper kernel of prefill attention, compiled; `compile_targets.py` runs it."""

import re
from collections.abc import Iterator
from typing import Any

import triton
from machine_code import described
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from wide.kernels.attention_prefill import _gluon as prefill

TYPES = {"Q": "*bf16", "OUT": "*bf16", "INDEX": "*i32", "COUNTS": "*i32", "scale": "fp32"}
HEADS = {"NUM_UNITS": 8, "NUM_GROUPS": 8, "NUM_KV_HEADS": 8, "HEADS": 4, "BLOCK_M": 128}


def build(head_dim: int, block_n: int, stages: int, *, takes_turns: bool) -> dict[str, Any]:
    """Compile one variant and read what it uses from its machine code."""
    kernel = prefill._attention_prefill
    constants = HEADS | {"D": head_dim, "BLOCK_N": block_n, "STAGES": stages}
    constants |= {"TAKES_TURNS": takes_turns}
    layout = gl.NVMMASharedLayout.get_default_for([1, block_n, 1, head_dim], gl.bfloat16)
    box = f"tensordesc<bf16[1, {block_n}, 1, {head_dim}],{layout!r}>"
    known = TYPES | {"K": box, "V": box}
    signature = {arg: "constexpr" if arg in constants else known.get(arg, "i32") for arg in kernel.arg_names}
    aligned = [arg for arg, kind in signature.items() if kind.startswith("*") or arg.startswith("stride")]
    source = GluonASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(arg),): value for arg, value in constants.items()},
        {(kernel.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    code, usage = described(compiled.asm["cubin"])
    found = re.search(r"STACK:(\d+)", usage)
    return {
        "variant": [head_dim, block_n, stages, takes_turns],
        "shared": compiled.metadata.shared,
        "stack": int(found.group(1)) if found else -1,
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        # Where barriers are made, and where worker warps find their arguments.
        "barriers": sorted(set(re.findall(r"SYNCS\.EXCH\.64 URZ, \[UR\d+\+(0x[0-9a-f]+)\]", code))),
        "handed": sorted(set(re.findall(r"STS\.64 \[UR\d+\+(0x[0-9a-f]+)\]", code))),
        "code": {word: len(re.findall(word, code)) for word in ("HGMMA", "UTMALDG", "MUFU.EX2")},
    }


def kernels() -> Iterator[dict[str, Any]]:
    """Compile the default tile of both head sizes, and the variants that the bench times."""
    for head_dim in (64, 128):
        yield build(head_dim, 128, 2, takes_turns=False)
    for block_n, stages, takes_turns in ((128, 2, True), (64, 4, False)):
        yield build(128, block_n, stages, takes_turns=takes_turns)
