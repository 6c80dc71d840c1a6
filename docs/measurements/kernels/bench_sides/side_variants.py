"""Variants of down_sorted.cu for sums by halves of the cache; build.sh compiles them, bench.py runs them."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bench_sorted"))
from variants import C2, R2, X22, Variant, _v  # noqa: E402

SIDES = {"SIDES": 1}
SHAPES = {"ping128-c2": (1, 128, 6, C2), "coop256-r2": (0, 256, 4, R2), "coop256-c2": (0, 256, 4, C2), "ping128-x22": (1, 128, 6, X22), "ping128": (1, 128, 6, {})}
VARIANTS: list[Variant] = []
for name, (mode, bn, stages, shape) in SHAPES.items():
    for more, words in (({}, ""), ({"HINT_R": 1}, " keep"), ({"HINT_A": 0}, " nohint")):
        for side, label in (({}, " straight"), (SIDES, " straight sides")):
            VARIANTS.append(_v(name + label + words, mode, bn, stages, ZIGZAG=0, **shape, **more, **side))
        VARIANTS.append(_v(name + " sides" + words, mode, bn, stages, **shape, **more, **SIDES))


def file_name(v):
    return v.name.replace(" ", "-") + ".cubin"


if __name__ == "__main__":
    for v in VARIANTS:
        print(file_name(v), " ".join(f"-D{k}={x}" for k, x in v.macros.items()))
