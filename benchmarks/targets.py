"""The targets of the operators and of whole forwards, filled in from the records of benches.

Usage: python -m benchmarks.targets --records DIR... --out docs/measurements/targets/operators.json

A record folder holds operators.json, attention.json or endtoend.json. Where several hold the same row, the last named
folder counts. Rows that nothing measured keep `value` null.
"""

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wide.kernels.contract import Case
from wide.kernels.tuning import TuningTable, shape_key, shipped_path
from wide.profiling.bench import HOPPER_OPERATORS, candidate_backend

_BENCH = "wide bench --out DIR --timed_only true"
_ENDTOEND = "wide profile --shape llama-3.1-8b --out DIR --prompt 4096,16384 --generate 128 --rates 0.5,0.5"
_MIDDLE = 0.5
# Candidates that write or store in an order that no model runs with.
_ASIDE = ("packed", "grouped")
Record = Mapping[str, Any]
Value = Callable[[Sequence[Record]], float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One figure to reach.

    Args:
        what: In words.
        floor: Least acceptable value.
        goal: Wanted value.
        unit: 'us' (smaller is better) or 'ratio' of dense time to ours.
        command: How to measure it again.
        value: Finds the value among records.
    """

    what: str
    floor: float
    goal: float
    unit: str
    command: str
    value: Value


def _fastest(
    group: str, name: str, starts: tuple[str, ...], key: str, *, auto: bool = False, triton: bool = False
) -> Value:
    """Return a finder of the best candidate of a sweep or race.

    Args:
        group: 'sweep' or 'race'.
        name: Of it.
        starts: How the names of candidates begin that count.
        key: Field of the record.
        auto: Whether the dense fallback counts, too: what 'auto' would choose.
        triton: Whether kernels for Hopper alone do not count.
    """

    def find(records: Sequence[Record]) -> float | None:
        found = [
            record[key]
            for record in records
            if record.get(group) == name and key in record and record["candidate"].startswith(starts)
            if not (triton and candidate_backend(record["candidate"]) in HOPPER_OPERATORS)
            if not any(word in record["candidate"] for word in _ASIDE)
        ]
        if auto:
            found += [
                r[key] for r in records if r.get(group) == name and r["candidate"] == "dense on zeros" and key in r
            ]
        if not found:
            return None
        return float(min(found) if key.endswith("_us") else max(found))

    return find


def _shipped(race: str) -> Value:
    """Return a finder of the speed-up of the tile that ships in a race of a product of few rows.

    Records say it of the tile that shipped when they were made; of older ones the shipped table of their GPU says it.
    """

    def find(records: Sequence[Record]) -> float | None:
        timed = [r for r in records if r.get("race") == race and "speedup" in r and "choice" in r]
        flagged = [r for r in timed if r.get("shipped")]
        found = flagged or [r for r in timed if tuple(r["choice"]["tile"]) == _shipped_tile(r["case"])]
        return float(found[0]["speedup"]) if found else None

    return find


def _shipped_tile(described: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the tile that ships for the H200, the only GPU with a table, at the shape of a record."""
    case = Case(
        sizes=described["sizes"],
        dtype=getattr(torch, described["dtype"]),
        active=described["active"],
        options=described["options"],
    )
    choice = TuningTable(shipped_path("NVIDIA H200")).lookup(shape_key(described["operator"], case))
    return None if choice is None else choice.tile


def _endtoend(what: str, tokens: int, skipped: float) -> Value:
    """Return a finder of the speed-up of one batch-1 race at equal rates in both halves."""

    def find(records: Sequence[Record]) -> float | None:
        rates = {"attention": skipped, "ffn": skipped}
        found = [
            record["speedup"]
            for record in records
            if (record.get("what"), record.get("tokens"), record.get("batch")) == (what, tokens, 1)
            and record.get("skipped") == rates
            and record["candidate"] != "own routing"
            and "speedup" in record
        ]
        return max(found) if found else None

    return find


def _least(*finders: Value) -> Value:
    def find(records: Sequence[Record]) -> float | None:
        found = [finder(records) for finder in finders]
        known = [value for value in found if value is not None]
        return min(known) if len(known) == len(found) else None

    return find


def _ratio(what: str, floor: float, goal: float, command: str, value: Value) -> Target:
    return Target(what=what, floor=floor, goal=goal, unit="ratio", command=command, value=value)


def _operator_targets() -> list[Target]:
    tiles = ("16", "32", "64", "128", "256")
    rows = [
        Target(
            what="reorder, M=16384, 112 groups",
            floor=15.0,
            goal=6.0,
            unit="us",
            command=f"{_BENCH} --operators reorder",
            value=_fastest("sweep", "reorder M=16384", ("112 groups",), "median_us"),
        )
    ]
    command = f"{_BENCH} --operators gemm_mn"
    for m in (4096, 16384):
        value = _fastest("sweep", f"gate_up G=128 p=0.5 M={m}", tiles, "speedup", triton=True)
        what = f"gemm_mn gate+up+SwiGLU (Triton) against cuBLAS + fused SwiGLU, M={m}"
        rows.append(_ratio(what, 1.45, 1.6, command, value))
    command = f"{_BENCH} --operators gemm_k"
    for size, goal in ((128, 1.2), (256, 1.4)):
        value = _fastest("sweep", f"down G={size} p=0.5 M=16384", ("s=",), "speedup", auto=True)
        rows.append(_ratio(f"gemm_k down, G={size}, M=16384 (auto)", 1.0, goal, command, value))
    value = _fastest("sweep", "o G=512 p=0.5 M=16384", ("s=",), "speedup", auto=True)
    return [*rows, _ratio("O-proj, M=16384 (auto)", 1.2, 1.5, command, value)]


def _attention_targets() -> list[Target]:
    prefill = _fastest("race", "prefill T=16384 p=0.5", ("operator, reorder charged",), "speedup")
    command = f"{_BENCH} --operators prefill"
    rows = [_ratio("prefill attention T=16384 against cuDNN SDPA (Triton)", 1.4, 1.7, command, prefill)]
    command = f"{_BENCH} --operators decode"
    for batch, length in ((32, 4096), (8, 32768)):
        value = _fastest("race", f"decode B={batch} T={length} p=0.5", ("operator",), "speedup")
        rows.append(_ratio(f"decode attention B={batch} T={length} against SDPA", 1.6, 1.9, command, value))
    command = f"{_BENCH} --operators gemv"
    for name, size in (("gate_up", 128), ("down", 128), ("query", 512), ("output", 512)):
        value = _shipped(f"gemv {name} M=1 G={size} p=0.5")
        rows.append(_ratio(f"decode GEMV M=1, {name}, against cuBLAS", 1.5, 1.8, command, value))
    return rows


def targets() -> list[Target]:
    """Return all rows, in order."""
    rows = [*_operator_targets(), *_attention_targets()]
    value = _endtoend("decode", 2048, _MIDDLE)
    rows.append(_ratio("end-to-end decode B=1, prompt 2048", 1.4, 1.6, _ENDTOEND, value))
    for length in (4096, 16384):
        value = _endtoend("prefill", length, _MIDDLE)
        rows.append(_ratio(f"end-to-end prefill B=1 T={length}", 1.2, 1.5, _ENDTOEND, value))
    for what, tokens in (("prefill", 4096), ("prefill", 16384), ("decode", 2048)):
        value = _endtoend(what, tokens, 0.0)
        rows.append(_ratio(f"0 % sparsity against dense, {what} {tokens}", 0.95, 0.99, _ENDTOEND, value))
    every = [_endtoend(what, tokens, 0.0) for what, tokens in (("prefill", 4096), ("prefill", 16384), ("decode", 2048))]
    return [*rows, _ratio("0 % sparsity against dense, least of the above", 0.95, 0.99, _ENDTOEND, _least(*every))]


def fill(folders: Iterable[Path], *, commit: str, date: str) -> list[dict[str, Any]]:
    """Return one JSON-ready object per target.

    Args:
        folders: With records; later ones replace what earlier ones measured.
        commit: Of the code that was measured.
        date: Of the measurement.
    """
    reports = [json.loads(file.read_text()) for folder in folders for file in sorted(folder.glob("*.json"))]
    usable = [report for report in reports if isinstance(report, dict) and isinstance(report.get("records"), list)]
    rows = []
    for target in targets():
        value, device, model = None, None, None
        for report in usable:
            found = target.value(report["records"])
            if found is not None:
                value, device, model = found, report.get("device"), report
        row = {
            "what": target.what,
            "value": None if value is None else round(value, 4),
            "floor": target.floor,
            "goal": target.goal,
            "unit": target.unit,
            "reached": _reached(target, value),
            "device": device,
            "date": None if value is None else date,
            "commit": None if value is None else commit,
            "command": target.command,
        }
        if model is not None and "layers" in model:
            row["layers"] = model["layers"]
        rows.append(row)
    return rows


def _reached(target: Target, value: float | None) -> str:
    """Return 'goal', 'floor', 'missed' or 'not measured'."""
    if value is None:
        return "not measured"
    sign = -1.0 if target.unit == "us" else 1.0
    if sign * value >= sign * target.goal:
        return "goal"
    return "floor" if sign * value >= sign * target.floor else "missed"


def _head() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main(arguments: list[str] | None = None) -> int:
    """Fill in the targets and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, nargs="+", required=True, help="folders of bench records")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--commit", default=None, help="of the measured code; default: this checkout's")
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat(), help="YYYY-MM-DD")
    options = parser.parse_args(arguments)
    rows = fill(options.records, commit=options.commit or _head(), date=options.date)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        value = "-" if row["value"] is None else f"{row['value']:.3f}"
        sys.stdout.write(f"{row['what']:64s} {value:>9s} {row['floor']:6g} {row['goal']:6g}  {row['reached']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
