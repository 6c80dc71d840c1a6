"""Compiles all kernels of Triton for one target without a GPU; prints one JSON object per kernel. Run as a program.

Its arguments are the target and the sizes of heads.

Triton decides at import whether it interprets or compiles, so this needs a process of its own: one for all kernels.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import compile_decode
import compile_glue
import compile_kernels


def _kernels(target: int, head_dims: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    for program in (compile_kernels, compile_glue):
        for result in program.kernels_at(target):
            yield program.__name__, result
    for result in compile_decode.kernels_at(target, head_dims):
        yield compile_decode.__name__, result


if __name__ == "__main__":
    for name, found in _kernels(int(sys.argv[1]), list(map(int, sys.argv[2:]))):
        sys.stdout.write(json.dumps(found | {"program": name}) + "\n")
