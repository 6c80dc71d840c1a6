"""Attention and decode bench: agreement first, then tiles and dense peers timed in one run on a GPU.

Usage: python -m wide.profiling.attention --out DIR [--operators prefill,decode,gemv,decode_groups] [--quick]
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from wide.kernels.attention_decode import ATTENTION_DECODE
from wide.kernels.attention_prefill import ATTENTION_PREFILL
from wide.kernels.attention_prefill.tiles import PrefillTile
from wide.kernels.contract import Operator
from wide.kernels.gemv import GEMV_K, GEMV_MN
from wide.profiling.accuracy import describe_accuracy, measure_accuracy
from wide.profiling.agreement import PoisonedMemory, verdicts
from wide.profiling.backends import TIMED, add_backend_flag, only_backends, parse_backends
from wide.profiling.decode_groups import group_races
from wide.profiling.described import add_shape_flags, describe_case, only_shape
from wide.profiling.gemv_races import gemv_races
from wide.profiling.races import Race, decode_races, prefill_races
from wide.profiling.timing import time_interleaved

_OPERATORS: dict[str, tuple[Operator, ...]] = {
    "prefill": (ATTENTION_PREFILL,),
    "decode": (ATTENTION_DECODE,),
    "gemv": (GEMV_MN, GEMV_K),
    "decode_groups": (ATTENTION_DECODE,),
}
_RACES = {"prefill": prefill_races, "decode": decode_races, "gemv": gemv_races, "decode_groups": group_races}
_DTYPES = (torch.bfloat16, torch.float16)
# The dense peers round to bfloat16 as well; gated products (float32 reference) round once more.
_GATE = 1.5e-2
# Small enough for every head size, so that both ways of reading K and V meet every case.
_CHECK_TILES = (
    PrefillTile(block_m=64, block_n=32, num_warps=4, num_stages=2),
    PrefillTile(block_m=64, block_n=32, num_warps=4, num_stages=2, uses_tma=True),
)
_BEST_SHOWN = 5


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def check(names: list[str], backends: Sequence[str] = TIMED) -> list[dict[str, Any]]:
    """Return the red verdicts of the named operators and backends on the GPU, with poisoned memory."""
    operators = list({operator.name: operator for name in names for operator in _OPERATORS[name]}.values())
    found = [
        (v.operator, f"{v.backend} {v.case} {v.failure}".strip(), v.error, v.tolerance)
        for v in verdicts(operators, torch.device("cuda"), backends=(*backends, "dense"), dtypes=_DTYPES)
    ]
    if "prefill" in names and "triton" in backends:
        found += list(_tile_verdicts())
    red = [
        {"operator": operator, "case": case, "error": error, "tolerance": tolerance}
        for operator, case, error, tolerance in found
        if not error <= tolerance
    ]
    _say(f"agreement: {len(found) - len(red)} of {len(found)} cases agree")
    for entry in red[:20]:
        _say(f"  RED {entry}")
    return red


def _tile_verdicts() -> Iterator[tuple[str, str, float, float]]:
    operator = ATTENTION_PREFILL
    for tile in _CHECK_TILES:
        for case in operator.cases:
            half = dataclasses.replace(case, dtype=torch.bfloat16)
            with PoisonedMemory():
                arguments = operator.build(half, torch.device("cuda"))
                got = operator.backends["triton"].run(**arguments, tile=tile)
                error = operator.compare(arguments, got, operator.reference(**arguments))
            yield operator.name, f"{tile} {half}", error, operator.tolerance[torch.bfloat16]


def _error(got: torch.Tensor, wanted: torch.Tensor, executes: torch.Tensor | None) -> float:
    if executes is not None:
        got, wanted = got[executes], wanted[executes]
    error = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    return error if error == error else float("inf")


def run(race: Race, rounds: int) -> list[dict[str, Any]]:
    """Check each candidate of a race, time those that agree, return one record each."""
    wanted = race.wanted()
    errors: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, calls in race.candidates.items():
        try:
            got = calls[0]()
            # Dense peers compute in another layout; they are trusted and only timed.
            errors[name] = 0.0 if got.shape != wanted.shape else _error(got, wanted, race.executes)
        # A tile that does not fit the device is a result, reported below.
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {str(error)[:300]}"
    agreeing = {n: race.candidates[n] for n, error in errors.items() if error <= _GATE}
    times = time_interleaved(agreeing, rounds=rounds)
    peers = {name: timing for name, timing in times.items() if name.startswith("dense")}
    peer = min(peers, key=lambda name: peers[name].median_us)
    records = []
    for name in race.candidates:
        record: dict[str, Any] = {"race": race.name, "candidate": name, "peer": peer, **race.facts}
        if race.case is not None and name in race.choices:
            record["choice"] = dataclasses.asdict(race.choices[name])
            record["case"] = describe_case(race.operator, race.case)
        if name in failures:
            record["failure"] = failures[name]
        else:
            record["error"] = errors[name]
        if name in times:
            timing = times[name]
            record |= {"median_us": timing.median_us, "low_us": timing.low_us, "high_us": timing.high_us}
            record["speedup"] = times[peer].median_us / timing.median_us
            record["active_tflops"] = race.flop / timing.median_us / 1e6
            record["active_gbytes_per_s"] = race.bytes_moved / timing.median_us / 1e3
        records.append(record)
    return records


def _table(records: list[dict[str, Any]]) -> str:
    """Return peers, the operator, its best tiles and everything that failed, as text."""
    timed = sorted((e for e in records if "median_us" in e), key=lambda e: e["median_us"])
    best = [e for e in timed if e["candidate"].startswith("tile")][:_BEST_SHOWN]
    peers = [e for e in timed if e["candidate"].startswith("dense tile")][:2]
    shown = [e for e in timed if "tile" not in e["candidate"] or e in best or e in peers]
    lines = [f"== {records[0]['race']} (speed-up over {records[0]['peer']})"]
    lines += [
        f"  {e['candidate']:34s} {e['median_us']:9.1f} us [{e['low_us']:.1f}-{e['high_us']:.1f}] x{e['speedup']:.3f} "
        f"{e['active_tflops']:6.0f} TF {e['active_gbytes_per_s']:6.0f} GB/s err {e['error']:.1e}"
        for e in shown
    ]
    lines += [f"  RED {e['candidate']} error {e['error']}" for e in records if e.get("error", 0) > _GATE]
    lines += [f"  FAIL {e['candidate']}: {e['failure'][:160]}" for e in records if "failure" in e]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; return 1 if any operator disagrees with its reference or rounds worse than the dense path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", default="prefill,decode,gemv", help="comma-separated names")
    parser.add_argument("--out", type=Path, required=True, help="folder for attention.json")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, tiles and rounds")
    parser.add_argument(
        "--timed-only", action="store_true", help="check agreement at the timed shapes alone, not in all cases"
    )
    add_shape_flags(parser)
    add_backend_flag(parser)
    options = parser.parse_args(arguments)
    names = options.operators.split(",")
    backends = parse_backends(options.backends, names)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(17)
    red = [] if options.timed_only else check(names, backends)
    accurate = [] if options.timed_only else measure_accuracy(names, device=torch.device("cuda"), backends=backends)
    for entry in accurate:
        _say(describe_accuracy(entry))
    records: list[dict[str, Any]] = []
    for name in names:
        for race in _RACES[name](quick=options.quick, only=only_shape(options)):
            chosen = dataclasses.replace(race, candidates=only_backends(race.candidates, backends))
            found = run(chosen, 10 if options.quick else 20)
            records += found
            _say(_table(found))
            result = {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "agreement": "timed shapes" if options.timed_only else "all cases",
                "red": red,
                "accuracy": accurate,
                "records": records,
            }
            # Written after every race, so that a stopped run keeps what it measured.
            (options.out / "attention.json").write_text(json.dumps(result, indent=1))
            torch.cuda.empty_cache()
    return int(bool(red) or not all(entry["within"] for entry in accurate))


if __name__ == "__main__":
    sys.exit(main())
