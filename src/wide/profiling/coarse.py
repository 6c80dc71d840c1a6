"""Coarse sweeps: every operator with the tiles it takes by default, over sizes, group sizes and sparsities.

Usage: python -m wide.profiling.coarse --out DIR [--rows 1024,4096,16384] [--limit 90]

One coordinate varies at a time around 4096 tokens, groups of 128 channels and 50 %. Each candidate is compared with its
dense peer at the timed shape before it is timed; all cases of the contract are the matter of wide bench.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wide.kernels.device import HOPPER_STEP, hopper_obstacle
from wide.kernels.gemm_k.tiles import default_hopper_tile as hopper_k_tile
from wide.kernels.gemm_k.tiles import default_tile as k_tile
from wide.kernels.gemm_mn.tiles import default_tile as mn_tile
from wide.profiling import attention, operators
from wide.profiling.gemv_races import gemv_k_race, gemv_mn_race
from wide.profiling.k_tiles import AnyKTile, stored_tiles
from wide.profiling.mn_tiles import mn_hopper_tiles
from wide.profiling.races import Race, decode_race, prefill_race
from wide.profiling.sweeps import ATTENTION_GROUP, FFN, GATE, HIDDEN, Sweep, k_sweep, mn_sweep, normal

_ROWS, _GROUP, _ACTIVE = 4096, 128, 0.5
_OTHER_GROUPS = (64, 256, 512, 32)
_OTHER_ACTIVE = (0.7, 0.3)
_BLOCK_M = 128
_ROUNDS = 8
# Groups of a super-block by group size: small groups leave little work to one of them.
_SUPER_BLOCKS = {32: 8, 64: 8, 128: 8, 256: 4, 512: 4}
_BATCHES = (1, 8, 32)

Part = tuple[str, Callable[[], list[dict[str, Any]]]]


def shapes(rows: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """Yield (tokens, FFN group size, executing share), the middle first, each once."""
    middle = [(count, _GROUP, _ACTIVE) for count in (_ROWS, *rows)]
    groups = [(_ROWS, size, _ACTIVE) for size in _OTHER_GROUPS]
    yield from dict.fromkeys([*middle, *[(_ROWS, _GROUP, active) for active in _OTHER_ACTIVE], *groups])


def parts(rows: Sequence[int]) -> Iterator[Part]:
    """Yield the file and the measurement of each part, in the order of `shapes`."""
    weights: dict[str, torch.Tensor] = {}
    for num_rows, group_size, active in shapes(rows):
        products = ["gate_up", "down"] if group_size != _GROUP else ["gate_up", "down", "q", "o"]
        for name in products:
            yield operators_part(name, num_rows, group_size, active, weights)
        if group_size == _GROUP:
            yield "attention.json", partial(_race, partial(prefill_race, num_rows, active, ()))
        if num_rows == _ROWS:
            yield "attention.json", partial(_race, partial(gemv_mn_race, "gate_up", 1, FFN, group_size, active, ()))
            yield "attention.json", partial(_race, partial(gemv_k_race, "down", 1, FFN, group_size, active, ()))
        if (num_rows, group_size) == (_ROWS, _GROUP):
            for batch in _BATCHES if active == _ACTIVE else _BATCHES[-1:]:
                yield "attention.json", partial(_race, partial(decode_race, batch, _ROWS, active, ()))


def _race(make: Callable[[], Race]) -> list[dict[str, Any]]:
    return attention.run(make(), _ROUNDS)


def operators_part(name: str, num_rows: int, group_size: int, active: float, weights: dict[str, torch.Tensor]) -> Part:
    """Return the measurement of a product; weights are made at its first use."""

    def measure() -> list[dict[str, Any]]:
        if name not in weights:
            weights[name] = _weight(name)
        make = _mn if name in ("gate_up", "q") else _k
        size = group_size if name in ("gate_up", "down") else ATTENTION_GROUP
        return operators.run(make(name, weights[name], num_rows, size, active), _ROUNDS)

    return "operators.json", measure


def _weight(name: str) -> torch.Tensor:
    shape = {"gate_up": (2, FFN, HIDDEN), "q": (1, HIDDEN, HIDDEN), "down": (HIDDEN, FFN), "o": (HIDDEN, HIDDEN)}[name]
    return normal(*shape, scale=shape[-1] ** -0.5)


def _mn(name: str, weight: torch.Tensor, num_rows: int, group_size: int, active: float) -> Sweep:
    x, gated = normal(num_rows, HIDDEN), name == "gate_up"
    tile = mn_tile(x.device, group_size=group_size, block_m=_BLOCK_M, gated=gated, stacked=gated, dtype=x.dtype)
    tiles = ((_BLOCK_M, tile), *mn_hopper_tiles(x.device, group_size, gated=gated))
    up = weight[1] if gated else None
    return mn_sweep(name, x, weight[0], up, group_size, active, tiles, with_variants=False)


def _k(name: str, weight: torch.Tensor, num_rows: int, group_size: int, active: float) -> Sweep:
    tile = k_tile(
        weight.device,
        group_size=group_size,
        num_rows=num_rows,
        width=weight.shape[0],
        block_m=_BLOCK_M,
        dtype=weight.dtype,
    )
    blocks = 8 if name == "o" else _SUPER_BLOCKS[group_size]
    variants: list[tuple[int, int, AnyKTile]] = [(blocks, _BLOCK_M, tile)]
    if hopper_obstacle(weight.device) is None and group_size % HOPPER_STEP == 0:
        variants.append((blocks, _BLOCK_M, hopper_k_tile(weight.shape[0])))
    groups = weight.shape[1] // group_size
    stored = stored_tiles(weight.device, group_size=group_size, num_groups=groups, width=weight.shape[0])
    variants += [(max(groups, blocks), m, t) for m, t in stored]
    return k_sweep(name, weight, num_rows, group_size, active, variants, with_variants=False)


def main(arguments: list[str] | None = None) -> int:
    """Run the sweeps; return 1 if a candidate disagreed with its peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for operators.json and attention.json")
    parser.add_argument("--rows", default="1024,4096,16384", help="numbers of tokens, comma-separated")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which nothing is begun")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(17)
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "agreement": "timed shapes"}
    found: dict[str, list[dict[str, Any]]] = {}
    began = time.perf_counter()
    for file, measure in parts(tuple(int(word) for word in options.rows.split(","))):
        if time.perf_counter() - began > options.limit:
            sys.stdout.write(f"the rest is left out: {options.limit:g} s have passed\n")
            break
        records = measure()
        found.setdefault(file, []).extend(records)
        # Written after every part, so that a stopped run keeps what it measured.
        (options.out / file).write_text(json.dumps({**facts, "red": [], "records": found[file]}, indent=1) + "\n")
        sys.stdout.write(_line(records) + "\n")
        sys.stdout.flush()
        torch.cuda.empty_cache()
    return int(any(record.get("error", 0.0) > GATE for records in found.values() for record in records))


def _line(records: Sequence[dict[str, Any]]) -> str:
    name = records[0].get("sweep") or records[0]["race"]
    timed = [record for record in records if "median_us" in record]
    words = [f"{record['candidate']} {record['median_us']:.1f} us x{record['speedup']:.2f}" for record in timed]
    words += [f"{record['candidate']} FAIL {record['failure'][:80]}" for record in records if "failure" in record]
    words += [f"{r['candidate']} RED {r['error']:.1e}" for r in records if r.get("error", 0.0) > GATE]
    return f"{name}: " + "; ".join(words)


if __name__ == "__main__":
    sys.exit(main())
