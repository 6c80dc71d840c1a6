"""Operator bench: agreement first, then variants and dense peers timed in one run on a GPU.

Usage: python -m wide.profiling.operators --operators reorder,gemm_mn,gemm_k --out DIR [--quick]
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from wide.kernels.contract import Operator
from wide.kernels.gemm_k import GEMM_K
from wide.kernels.gemm_k_rows import GEMM_K_ROWS
from wide.kernels.gemm_mn import GEMM_MN
from wide.kernels.reorder import REORDER, REORDER_PATTERNS, REORDER_SEQUENCES
from wide.kernels.reorder_rows import REORDER_ROWS
from wide.profiling.accuracy import describe_accuracy, measure_accuracy
from wide.profiling.agreement import verdicts
from wide.profiling.backends import TIMED, add_backend_flag, only_backends, parse_backends
from wide.profiling.described import add_shape_flags, describe_case, only_shape
from wide.profiling.hopper_cases import with_hopper_cases
from wide.profiling.reorder_sweeps import reorder_sweeps
from wide.profiling.sweeps import GATE, Sweep, gemm_k_sweeps, gemm_mn_sweeps
from wide.profiling.timing import time_interleaved

_OPERATORS: dict[str, tuple[Operator, ...]] = {
    "reorder": (REORDER, REORDER_SEQUENCES, REORDER_PATTERNS, REORDER_ROWS),
    "gemm_mn": (GEMM_MN,),
    "gemm_k": (GEMM_K, GEMM_K_ROWS),
}
_BEST_SHOWN = 5
# Below, the K-axis product is left to the dense candidate, and reordering is launch time.
_LEAST_ROWS_K = 4096


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def check(names: list[str], backends: Sequence[str] = TIMED) -> list[dict[str, Any]]:
    """Return the red verdicts of the named operators and backends on the GPU in bfloat16 and float16."""
    operators = [with_hopper_cases(operator) for name in names for operator in _OPERATORS[name]]
    dtypes = (torch.bfloat16, torch.float16)
    red = []
    total = 0
    for verdict in verdicts(operators, torch.device("cuda"), backends=(*backends, "dense"), dtypes=dtypes):
        total += 1
        if not verdict.agrees:
            red.append(
                {
                    "operator": verdict.operator,
                    "backend": verdict.backend,
                    "case": str(verdict.case),
                    "error": verdict.error,
                    "tolerance": verdict.tolerance,
                    **({"failure": verdict.failure} if verdict.failure else {}),
                }
            )
    _say(f"agreement: {total - len(red)} of {total} cases agree")
    for entry in red[:20]:
        _say(f"  RED {entry}")
    return red


def sweeps(
    names: list[str], rows: tuple[int, ...], quick: bool, only: tuple[int, float] | None = None
) -> Iterator[Sweep]:
    """Yield the sweeps of the named operators.

    Args:
        names: Of `reorder`, `gemm_mn` and `gemm_k`.
        rows: Numbers of tokens, M.
        quick: Fewer shapes; `reorder` and `gemm_k` at 4096 rows and more only.
        only: Group size of the FFN and share that executes, as in `gemm_mn_sweeps`; nothing to `reorder`.
    """
    if "reorder" in names:
        yield from reorder_sweeps(tuple(n for n in rows if not quick or n >= _LEAST_ROWS_K))
    if "gemm_mn" in names:
        yield from gemm_mn_sweeps(rows, quick, only)
    if "gemm_k" in names:
        yield from gemm_k_sweeps(tuple(n for n in rows if not quick or n >= _LEAST_ROWS_K), quick, only)


def least_bytes(sweep: Sweep) -> int:
    """Return the bytes that a sweep's operator must move at least: inputs and weights once, executing outputs once."""
    if sweep.case is None:
        return 0
    operator = {"gemm_mn": GEMM_MN, "gemm_k": GEMM_K}[sweep.operator]
    work = operator.work(sweep.case)
    return work.bytes_read + work.bytes_written


def run(sweep: Sweep, rounds: int) -> list[dict[str, Any]]:
    """Check each candidate of a sweep against its peer, time those that agree, return one record each."""
    moved = least_bytes(sweep)
    wanted = sweep.candidates[sweep.wanted or sweep.peer]()
    errors: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, candidate in sweep.candidates.items():
        # A variant that does not fit the device is a result: it is reported, never hidden.
        try:
            got = candidate()
            # A dense peer of other inputs computes something else.
            compared = sweep.error is not None and not (sweep.wanted and name == sweep.peer)
            errors[name] = sweep.error(got, wanted) if compared and sweep.error else 0.0
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {str(error)[:300]}"
    agreeing = {name: sweep.candidates[name] for name, error in errors.items() if error <= GATE}
    times = time_interleaved(agreeing, rounds=rounds)
    records = []
    for name in sweep.candidates:
        record: dict[str, Any] = {"sweep": sweep.name, "candidate": name, **sweep.facts}
        if sweep.case is not None and name in sweep.choices:
            record["choice"] = dataclasses.asdict(sweep.choices[name])
            record["case"] = describe_case(sweep.operator, sweep.case)
        if name in failures:
            record["failure"] = failures[name]
        else:
            record["error"] = errors[name]
        if name in times:
            timing = times[name]
            record |= {"median_us": timing.median_us, "low_us": timing.low_us, "high_us": timing.high_us}
            record["speedup"] = times[sweep.peer].median_us / timing.median_us
            record["active_tflops"] = sweep.flop / timing.median_us / 1e6
            if moved:
                record["active_gbytes_per_s"] = moved / timing.median_us / 1e3
        records.append(record)
    return records


def _table(records: list[dict[str, Any]]) -> str:
    """Return the fastest candidates of each sweep, and everything that failed, as text."""
    lines = []
    for name, group in itertools.groupby(records, key=lambda record: record["sweep"]):
        entries = list(group)
        timed = sorted((e for e in entries if "median_us" in e), key=lambda e: e["median_us"])
        shown = timed if name.startswith("reorder") else timed[:_BEST_SHOWN]
        shown += [e for e in timed if e not in shown and ("dense" in e["candidate"] or " " in e["candidate"][4:])][:4]
        lines.append(f"== {name}")
        lines += [
            f"  {e['candidate']:36s} {e['median_us']:9.1f} us [{e['low_us']:.1f}-{e['high_us']:.1f}] "
            f"x{e['speedup']:.3f} {e['active_tflops']:6.0f} TF {e.get('active_gbytes_per_s', 0):6.0f} GB/s "
            f"err {e['error']:.1e}"
            for e in shown
        ]
        lines += [f"  RED {e['candidate']} error {e['error']}" for e in entries if e.get("error", 0) > GATE]
        lines += [f"  FAIL {e['candidate']}: {e['failure'][:160]}" for e in entries if "failure" in e]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; return 1 if any operator disagrees with its reference or rounds worse than the dense path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", default="reorder,gemm_mn,gemm_k", help="comma-separated names")
    parser.add_argument("--out", type=Path, required=True, help="folder for operators.json")
    parser.add_argument("--rows", default=None, help="comma-separated numbers of tokens; default 1024,4096,16384")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, variants and rounds")
    parser.add_argument(
        "--timed-only", action="store_true", help="check agreement at the timed shapes alone, not in all cases"
    )
    add_shape_flags(parser)
    add_backend_flag(parser)
    options = parser.parse_args(arguments)
    names = options.operators.split(",")
    backends = parse_backends(options.backends, names)
    rows = tuple(int(r) for r in options.rows.split(",")) if options.rows else (1024, 4096, 16384)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(17)
    red = [] if options.timed_only else check(names, backends)
    accurate = [] if options.timed_only else measure_accuracy(names, device=torch.device("cuda"), backends=backends)
    for entry in accurate:
        _say(describe_accuracy(entry))
    records: list[dict[str, Any]] = []
    for sweep in sweeps(names, rows, options.quick, only_shape(options)):
        chosen = dataclasses.replace(sweep, candidates=only_backends(sweep.candidates, backends))
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
        # Written after every sweep, so that a stopped run keeps what it measured.
        (options.out / "operators.json").write_text(json.dumps(result, indent=1))
    return int(bool(red) or not all(entry["within"] for entry in accurate))


if __name__ == "__main__":
    sys.exit(main())
