"""Bench of the glue operators (norm, rope, router) on a GPU: agreement first, then times beside the memory's own.

Usage: python -m benchmarks.glue --out DIR

Decode shapes rotate through as many copies of the weights as a model has layers, so that none is found in the cache.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.agreement import verdicts
from benchmarks.cases.clear_skipped import CLEAR_SKIPPED
from benchmarks.cases.rms_norm import RMS_NORM
from benchmarks.cases.rope import ROPE
from benchmarks.cases.route import NORM_ROUTE, ROUTE
from wide.inference.choice.tuning.timing import time_interleaved
from wide.kernels.rms_norm.op import rms_norm
from wide.kernels.rope.op import rope_to_cache
from wide.kernels.route.op import norm_route, route
from wide.kernels.route.weights import RouteWeights, split_weights

_COPIES = 32
_WIDTH, _GROUPS, _RANK = 4096, 112, 32
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
Calls = dict[str, Any]


def _weights() -> RouteWeights:
    down = torch.randn(_RANK, _WIDTH, device="cuda") * _WIDTH**-0.5
    return split_weights(down, torch.randn(2 * _GROUPS, _RANK, device="cuda"), None, dtype=torch.bfloat16)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _read_once(x: torch.Tensor) -> torch.Tensor:
    """Read a tensor and write almost nothing: the floor of whatever reads it."""
    return x.view(torch.int32).amax()


def _many(rows: int) -> Calls:
    x, y, norm = _normal(rows, _WIDTH), _normal(rows, _WIDTH), _normal(_WIDTH)
    weights = _weights()
    qkv = _normal(1, rows, _HEADS + 2 * _KV_HEADS, _HEAD_DIM)
    q, k, v = qkv.split((_HEADS, _KV_HEADS, _KV_HEADS), 2)
    caches = [_normal(1, _KV_HEADS, rows, _HEAD_DIM).transpose(1, 2) for _ in range(2)]
    angles, start = _normal(rows, _HEAD_DIM), torch.zeros(1, dtype=torch.int32, device="cuda")
    return {
        "read x once (amax)": lambda: _read_once(x),
        "copy x": lambda: x.clone(),
        "route": lambda: route(x, weights, backend="triton"),
        "route, plain torch": lambda: route(x, weights, backend="torch"),
        "rms_norm with addend": lambda: rms_norm(x, norm, addend=y, backend="triton"),
        "rms_norm": lambda: rms_norm(x, norm, backend="triton"),
        "rope_to_cache": lambda: rope_to_cache(q, k, v, angles, angles, start, *caches, backend="triton"),
    }


def _few(rows: int) -> Calls:
    x, y, norm = _normal(rows, _WIDTH), _normal(rows, _WIDTH), _normal(_WIDTH)
    copies = [_weights() for _ in range(_COPIES)]
    qkv = _normal(rows, 1, _HEADS + 2 * _KV_HEADS, _HEAD_DIM)
    q, k, v = qkv.split((_HEADS, _KV_HEADS, _KV_HEADS), 2)
    caches = [_normal(rows, _KV_HEADS, 64, _HEAD_DIM).transpose(1, 2) for _ in range(2)]
    angles, start = _normal(64, _HEAD_DIM), torch.zeros(rows, dtype=torch.int32, device="cuda")
    return {
        "route": [lambda w=w: route(x, w, backend="triton") for w in copies],
        "norm_route with addend": [lambda w=w: norm_route(x, norm, w, addend=y, backend="triton") for w in copies],
        "rms_norm with addend": lambda: rms_norm(x, norm, addend=y, backend="triton"),
        "rope_to_cache": lambda: rope_to_cache(q, k, v, angles, angles, start, *caches, backend="triton"),
    }


def run(out: Path) -> bool:
    """Check and time the operators, write glue.json, and return whether all agree with their references."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(17)
    found = verdicts(
        (RMS_NORM, ROPE, ROUTE, NORM_ROUTE, CLEAR_SKIPPED),
        torch.device("cuda"),
        backends=("triton",),
        dtypes=(torch.bfloat16, torch.float16),
    )
    red = [verdict for verdict in found if not verdict.agrees]
    print(f"agreement: {len(red)} red cases")
    for verdict in red[:20]:
        print(f"  RED {verdict}")
    records: list[dict[str, Any]] = []
    for rows in (16384, 4096, 64, 4, 1):
        calls = _few(rows) if rows <= 4 else _many(rows)
        for name, timing in time_interleaved(calls).items():
            records.append({"rows": rows, "call": name, **dataclasses.asdict(timing)})
            print(f"{rows:6d} {name:24s} {timing.median_us:8.2f} us [{timing.low_us:.2f}-{timing.high_us:.2f}]")
    report = {"device": torch.cuda.get_device_name(), "red": [str(v) for v in red], "records": records}
    (out / "glue.json").write_text(json.dumps(report, indent=1) + "\n")
    return not red


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; return 1 if any operator disagrees with its reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for glue.json")
    return 0 if run(parser.parse_args(arguments).out) else 1


if __name__ == "__main__":
    sys.exit(main())
