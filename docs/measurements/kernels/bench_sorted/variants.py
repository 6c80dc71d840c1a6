"""Variants of down_sorted.cu: macros, runs (tiles of a slab), which cases. build.sh compiles them, bench.py runs them."""

from typing import NamedTuple


class Variant(NamedTuple):
    name: str
    macros: dict
    parts: tuple = (1,)  # column tiles (of each column neighbour) swept at a time
    core: bool = False  # run in every case, else only at 16384 rows, G = 128, s = 8
    whole: bool = True  # computes the product: checked before it is timed


def _v(name, mode, bn, stages, *, parts=(1,), core=False, whole=True, **more):
    regs = (40, 232) if mode in (1, 2) and bn == 192 else (72, 216) if mode == 3 else (56, 224)
    macros = {"MODE": mode, "BN": bn, "STAGES": stages, "PREGS": regs[0], "CREGS": regs[1], **more}
    return Variant(name, macros, parts, core, whole)


R2, C2, X22 = {"CL_ROWS": 2}, {"CL_COLS": 2}, {"CL_ROWS": 2, "CL_COLS": 2}
B16 = {"SUM16": 1}
F16 = {"SUM16": 2}
HOLD = {"PIECE": 32}
PART = {"PARTIAL": 1, "SUM16": 2}

VARIANTS = [
    # partial sums stored as scaled float16 in each block's own order, added by a kernel of its own
    _v("coop256-r2 partial", 0, 256, 4, parts=(4, 16, 1, 2, 8), core=True, **R2, **PART),
    _v("coop256-c2 partial", 0, 256, 4, parts=(4, 8, 1, 2), core=True, **C2, **PART),
    _v("coop256 partial", 0, 256, 4, parts=(4, 16, 1), core=True, **PART),
    _v("ping128-c2 partial", 1, 128, 6, parts=(4, 16, 1, 2, 8), core=True, **C2, **PART),
    _v("ping128-r2 partial", 1, 128, 6, parts=(8, 2), core=True, **R2, **PART),
    _v("coop192-r2 partial", 0, 192, 4, parts=(4,), **R2, **PART),
    _v("coop256-r2 partial nohint", 0, 256, 4, parts=(4,), **R2, **PART, HINT_A=0),
    # for lists in the order of super-blocks, which orders.py makes: nobody walks from both ends
    _v("coop256-r2 straight", 0, 256, 4, ZIGZAG=0, **R2),
    _v("coop256-c2 straight", 0, 256, 4, ZIGZAG=0, **C2),
    _v("ping128-c2 straight", 1, 128, 6, ZIGZAG=0, **C2),
    _v("ping192-c2 straight", 1, 192, 4, ZIGZAG=0, **C2),
    _v("coop256-r2 straight nohint", 0, 256, 4, ZIGZAG=0, HINT_A=0, **R2),
    _v("coop256-c2 straight nohint", 0, 256, 4, ZIGZAG=0, HINT_A=0, **C2),
    _v("ping128-c2 straight nohint", 1, 128, 6, ZIGZAG=0, HINT_A=0, **C2),
    _v("coop256-c2 straight keep", 0, 256, 4, ZIGZAG=0, HINT_R=1, **C2),
    _v("ping128-c2 straight keep", 1, 128, 6, ZIGZAG=0, HINT_R=1, **C2),
    _v("coop256-r2 straight no sums", 0, 256, 4, whole=False, ZIGZAG=0, FLUSH=0, **R2),
    _v("coop256-c2 straight no sums", 0, 256, 4, whole=False, ZIGZAG=0, FLUSH=0, **C2),
    # V2: both consumers on one tile; what fence and gather cost
    _v("coop256", 0, 256, 4, core=True),
    _v("coop256-r2", 0, 256, 4, parts=(1, 2), core=True, **R2),
    _v("coop256-c2", 0, 256, 4, core=True, **C2),
    _v("coop256-x22", 0, 256, 4, **X22),
    # V1/V3: pingpong
    _v("ping128", 1, 128, 6, parts=(2, 1, 4)),
    _v("ping128-r2", 1, 128, 6, parts=(2,), **R2),
    _v("ping128-c2", 1, 128, 6, parts=(1, 2), core=True, **C2),
    _v("ping128-x22", 1, 128, 6, parts=(1,), **X22),
    _v("ping192", 1, 192, 4, parts=(1, 2), core=True),
    _v("ping192-r2", 1, 192, 4, parts=(1, 2), core=True, **R2),
    _v("ping192-c2", 1, 192, 4, parts=(1,), core=True, **C2),
    _v("ping192-x22", 1, 192, 4, parts=(1,), **X22),
    _v("ping192-r2-f5", 1, 192, 5, FLUSH=5, **R2),
    _v("ping192-r2-nohint", 1, 192, 4, HINT_A=0, **R2),
    _v("ping192-r2-keep", 1, 192, 4, HINT_R=1, **R2),
    _v("ping192-r2-bulk", 1, 192, 4, FLUSH=2, **R2),
    # V6: a finished tile leaves in pieces between the products of the next
    _v("hold192", 2, 192, 4, core=True, **HOLD),
    _v("hold192-r2", 2, 192, 4, parts=(1, 2), core=True, **R2, **HOLD),
    _v("hold192-c2", 2, 192, 4, core=True, **C2, **HOLD),
    # sums of 16 bits: half the bytes, bfloat16 needs no drain
    _v("coop256-r2-b16", 0, 256, 4, parts=(2, 1, 4), core=True, **R2, **B16),
    _v("coop256-r2-f16", 0, 256, 4, parts=(2,), **R2, **F16),
    _v("ping192-r2-b16", 1, 192, 5, parts=(2, 1), core=True, **R2, **B16),
    _v("hold192-r2-b16", 2, 192, 5, parts=(2, 1), core=True, **R2, **B16),
    _v("ping128-c2-b16", 1, 128, 6, parts=(2,), **C2, **B16),
    # a finished tile goes to shared memory whole, three warps of their own reduce it
    _v("staged192", 3, 192, 3),
    _v("staged192-r2", 3, 192, 3, parts=(1, 2), core=True, **R2),
    _v("staged192-c2", 3, 192, 3, core=True, **C2),
    _v("staged192-x22", 3, 192, 3, **X22),
    _v("staged128-x22", 3, 128, 5, **X22),
    _v("staged256-r2-b16", 3, 256, 3, parts=(2, 1), core=True, **R2, **B16),
    _v("staged192-r2-b16", 3, 192, 4, parts=(2,), core=True, **R2, **B16),
    # parts left out
    _v("coop256-r2 no sums", 0, 256, 4, whole=False, FLUSH=0, **R2),
    _v("ping128-c2 no sums", 1, 128, 6, whole=False, FLUSH=0, **C2),
    _v("ping192-r2 no sums", 1, 192, 4, whole=False, FLUSH=0, **R2),
    _v("ping192-x22 no sums", 1, 192, 4, whole=False, FLUSH=0, **X22),
    _v("coop256-r2 loads", 0, 256, 4, whole=False, FLUSH=0, MULTIPLY=0, **R2),
    _v("ping128-c2 loads", 1, 128, 6, whole=False, FLUSH=0, MULTIPLY=0, **C2),
    _v("ping192-r2 loads", 1, 192, 4, whole=False, FLUSH=0, MULTIPLY=0, **R2),
    _v("ping192-r2 loads+sums", 1, 192, 4, whole=False, MULTIPLY=0, **R2),
    _v("ping128 sums", 1, 128, 6, parts=(1, 2, 4), whole=False, LOADS=0, MULTIPLY=0),
    _v("ping192 sums", 1, 192, 4, whole=False, LOADS=0, MULTIPLY=0),
    _v("coop256 sums", 0, 256, 4, whole=False, LOADS=0, MULTIPLY=0),
    _v("coop256 sums-b16", 0, 256, 4, parts=(1, 2), whole=False, LOADS=0, MULTIPLY=0, **B16),
]


def file_name(variant):
    return variant.name.replace(" ", "_").replace("+", "_") + ".cubin"


if __name__ == "__main__":
    for v in VARIANTS:
        print(file_name(v), *[f"-D{k}={x}" for k, x in v.macros.items()])
