"""Naive beside fused: pruned products by gathering and scattering, as a grouped product, fused, and dense.

Usage: python -m benchmarks.naive --out DIR [--sizes 512,1024,2048] [--group-size 128] [--sparsity 0.5]
       [--backend triton] [--candidates dense,gather-scatter,"grouped product",fused]
       python -m benchmarks.naive --traffic --out DIR [--sizes 512,1024,2048,4096,8192]

Agreement first; what disagrees is not timed. On a CPU only agreement and the accounting of traffic are written. The
second form writes what the products must move and store by the paper's accounting alone, without computing them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.contract import relative_error
from benchmarks.naive_products import AXES, NAMES, Problem, executed, implementations, make_problem, wanted, work
from benchmarks.operators import TIMED
from wide.inference.choice.tuning.timing import time_interleaved

_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
# Gathered weights may be copied once more, into the layout that the product wants.
_COPIES = 2.5


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def measure(problem: Problem, *, backend: str, rounds: int, names: Sequence[str] = NAMES) -> list[dict[str, Any]]:
    """Return one record per implementation: error, time, throughput, peak memory, and the accounted traffic.

    Args:
        problem: What to compute; on a CPU nothing is timed.
        backend: Of the fused operators.
        rounds: Replays of each candidate.
        names: Of the implementations; 'dense' is what the others are compared with.
    """
    reference = wanted(problem)
    calls = {name: call for name, call in implementations(problem, backend=backend).items() if name in names}
    records = {name: _accounted(problem, name) for name in calls}
    if "fused" in records:
        records["fused"]["backend"] = backend
    agreeing: dict[str, Callable[[], Tensor]] = {}
    for name, call in calls.items():
        record = records[name]
        obstacle = _too_large(problem, record["accounted_storage_bytes"])
        if obstacle:
            record["not_run"] = obstacle
            continue
        # An implementation that fails here is a result: it is reported, never hidden.
        try:
            record["error"] = relative_error(executed(problem, name, call()).float(), reference)
        except Exception as error:
            record["failure"] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        if record["error"] <= _TOLERANCE[problem.a.dtype]:
            agreeing[name] = call
    if problem.a.device.type == "cuda":
        del reference
        _time(problem, agreeing, records, rounds)
    return list(records.values())


def _accounted(problem: Problem, name: str) -> dict[str, Any]:
    size, bytes_each = problem.a.shape[0], problem.a.element_size()
    return _counted(problem.axis, name, size, problem.group_size, problem.active, bytes_each)


def _counted(axis: str, name: str, size: int, group_size: int, active: float, bytes_each: int) -> dict[str, Any]:
    counted = work(axis, name, size, group_size, active)
    return {
        "axis": axis,
        "size": size,
        "group_size": group_size,
        "active": active,
        "candidate": name,
        "accounted_traffic_bytes": counted.traffic * bytes_each,
        "accounted_storage_bytes": counted.storage * bytes_each,
    }


def _too_large(problem: Problem, storage: float) -> str:
    if problem.a.device.type != "cuda":
        return ""
    free = torch.cuda.mem_get_info(problem.a.device)[0]
    return f"needs {_COPIES * storage / 2**30:.0f} GiB of {free / 2**30:.0f} GiB" if _COPIES * storage > free else ""


def _time(
    problem: Problem, calls: dict[str, Callable[[], Tensor]], records: dict[str, dict[str, Any]], rounds: int
) -> None:
    flop = 2.0 * problem.active * problem.a.shape[0] * problem.b.numel()
    for name, call in calls.items():
        records[name]["peak_memory_bytes"] = _peak(call)
    # One at a time beside the dense peer: graphs keep their memory, and gathered weights fill the device.
    for name, call in calls.items():
        peer = {} if name == "dense" else {"dense": calls["dense"]}
        try:
            times = time_interleaved({**peer, name: call}, rounds=rounds)
        # What cannot be captured, or does not fit a second time, is a result too.
        except Exception as error:
            records[name]["failure"] = f"{type(error).__name__}: {str(error)[:300]}"
            torch.cuda.empty_cache()
            continue
        torch.cuda.empty_cache()
        timing = times[name]
        records[name] |= {
            "median_us": timing.median_us,
            "low_us": timing.low_us,
            "high_us": timing.high_us,
            "speedup": times["dense"].median_us / timing.median_us,
            "active_tflops": flop / timing.median_us / 1e6,
        }


def _peak(call: Callable[[], Tensor]) -> int:
    """Return the most memory that a call holds beyond what was held before it, its result included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return int(torch.cuda.max_memory_allocated() - before)


def _table(records: list[dict[str, Any]]) -> str:
    first = records[0]
    lines = [f"== axis {first['axis']}, M = N = K = {first['size']}, {100 * first['active']:.0f} % executes"]
    for record in records:
        words = record.get("not_run") or record.get("failure") or f"error {record['error']:.1e}"
        if "median_us" in record:
            words = (
                f"{record['median_us']:10.1f} us  x{record['speedup']:.3f}  {record['active_tflops']:7.1f} TF  "
                f"{record['peak_memory_bytes'] / 2**20:10.1f} MiB  {words}"
            )
        lines.append(f"  {record['candidate']:16s} {words}")
    return "\n".join(lines)


def run(
    out: Path,
    *,
    sizes: Sequence[int] = (512, 1024, 2048),
    group_size: int = 128,
    sparsity: float = 0.5,
    device: str = "cuda",
    backend: str = "triton",
    candidates: Sequence[str] = NAMES,
    quick: bool = False,
    limit: float = float("inf"),
) -> bool:
    """Check and time the products, write naive.json, and return whether all agree with their references.

    Args:
        out: Folder.
        sizes: M = N = K.
        group_size: Channels of a group.
        sparsity: Share that is skipped.
        device: 'cuda', or 'cpu', where nothing is timed and references stand in for kernels.
        backend: Of the fused products on a GPU.
        candidates: Of `NAMES`; 'dense' among them.
        quick: Fewer rounds.
        limit: Seconds after which no size is begun.
    """
    is_gpu = device == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "torch": torch.__version__,
        "records": [],
    }
    out.mkdir(parents=True, exist_ok=True)
    agrees, began = True, time.perf_counter()
    for size in sizes:
        if time.perf_counter() - began > limit:
            _say(f"size {size} and larger ones are left out: {limit:g} s have passed")
            break
        for axis in AXES:
            problem = make_problem(
                axis, size, group_size=group_size, active=1.0 - sparsity, dtype=dtype, device=torch.device(device)
            )
            rounds = 8 if quick else 20
            found = measure(problem, backend=backend if is_gpu else "torch", rounds=rounds, names=candidates)
            agrees = agrees and all(record.get("error", 0.0) <= _TOLERANCE[dtype] for record in found)
            result["records"] += found
            _say(_table(found))
            # Written after every problem, so that a stopped run keeps what it measured.
            (out / "naive.json").write_text(json.dumps(result, indent=1) + "\n")
    return agrees


def traffic(
    out: Path,
    *,
    sizes: Sequence[int] = (512, 1024, 2048, 4096, 8192),
    group_size: int = 128,
    sparsity: float = 0.5,
) -> None:
    """Write naive.json with the accounting alone, in bfloat16, and print it; arguments as of `run`."""
    active, width = 1.0 - sparsity, torch.bfloat16.itemsize
    found = [_counted(axis, name, size, group_size, active, width) for size in sizes for axis in AXES for name in NAMES]
    out.mkdir(parents=True, exist_ok=True)
    (out / "naive.json").write_text(json.dumps({"device": "", "records": found}, indent=1) + "\n")
    for record in found:
        moved, stored = (record[f"accounted_{kind}_bytes"] / 2**20 for kind in ("traffic", "storage"))
        _say(f"{record['axis']}  {record['size']:6d}  {record['candidate']:16s} {moved:14,.1f} {stored:14,.1f} MiB")


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; return 1 if anything disagrees with its reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for naive.json")
    parser.add_argument("--sizes", help="M = N = K, comma-separated; default 512,1024,2048")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--sparsity", type=float, default=0.5, help="share that is skipped")
    parser.add_argument("--traffic", action="store_true", help="the accounting alone, also of 4096 and 8192")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu checks and times nothing")
    parser.add_argument(
        "--backend", choices=TIMED, default="triton", help="of the fused products; on the CPU their references run"
    )
    parser.add_argument("--candidates", default=",".join(NAMES), help="comma-separated; dense must be among them")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no size is begun")
    options = parser.parse_args(arguments)
    shape: dict[str, Any] = {"group_size": options.group_size, "sparsity": options.sparsity}
    if options.sizes is not None:
        shape["sizes"] = [int(word) for word in options.sizes.split(",")]
    if options.traffic:
        traffic(options.out, **shape)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; run it on one, or with --device cpu, which times nothing")
    names = options.candidates.split(",")
    if set(names) - set(NAMES) or "dense" not in names:
        parser.error(f"--candidates wants dense and any of {', '.join(NAMES[1:])}, got {options.candidates}")
    how = {"device": options.device, "backend": options.backend, "quick": options.quick, "limit": options.limit}
    return 0 if run(options.out, candidates=names, **shape, **how) else 1


if __name__ == "__main__":
    sys.exit(main())
