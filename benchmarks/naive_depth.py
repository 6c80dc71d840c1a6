"""Naive dynamic depth taken apart: what indices, gathering, sorting and scattering cost beside the product itself.

Usage: python -m benchmarks.naive_depth --out DIR [--rows 64,1024,4096,16384] [--products 4096x4096,4096x28672]

Whole tokens skip a product: executing rows are gathered, multiplied and scattered into zeros, beside the dense and the
fused product. Agreement first; what disagrees is not timed. On a CPU only agreement and the accounting are written.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases.contract import relative_error
from benchmarks.naive_products import Problem, executed, grouped_product, packed_rows, wanted
from wide.errors import ShapeError
from wide.inference.choice.tuning.timing import time_interleaved
from wide.kernels.gemm_mn.op import gemm_mn
from wide.kernels.reorder.op import reorder

DENSE = "dense"
INDICES, SORT, GATHER, GEMM, SCATTER = "indices", "sort", "gather", "GEMM", "scatter"
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


class Stage(NamedTuple):
    """One step of a way.

    Args:
        name: 'indices', 'sort', 'gather', 'GEMM' or 'scatter'.
        run: Takes what the stage before it returned, the first one None.
        waits: Whether the host waits for its result, so that no CUDA graph can hold it.
    """

    name: str
    run: Callable[[Any], Any]
    waits: bool = False


def depth_problem(
    rows: int, width_in: int, width_out: int, *, active: float, dtype: torch.dtype, device: torch.device
) -> Problem:
    """Return a product of [rows, width_in] with [width_out, width_in] that some rows skip, the same on every device.

    Raises:
        ShapeError: If no row would execute.
    """
    count = round(active * rows)
    if count < 1:
        raise ShapeError(f"{active:g} of {rows} rows are none; wanted at least one executing row")
    generator = torch.Generator().manual_seed(17)
    a = torch.randn(rows, width_in, generator=generator).to(device, dtype)
    b = torch.randn(width_out, width_in, generator=generator).to(device, dtype) / width_in**0.5
    indices = torch.randperm(rows, generator=generator)[:count].sort().values
    mask = torch.zeros(rows, 1, dtype=torch.bool)
    mask[indices] = True
    return Problem(axis="M", a=a, b=b, group_size=width_out, mask=mask.to(device), indices=indices.to(device))


def ways(problem: Problem, *, backend: str) -> Mapping[str, tuple[Stage, ...]]:
    """Return the ways to compute a problem, each as its stages in order.

    Args:
        problem: From `depth_problem`.
        backend: Of sort and fused product: 'triton', or 'torch' to check them on a CPU.
    """
    a, b = problem.a, problem.b

    def scatter(found: tuple[Tensor, Tensor]) -> Tensor:
        rows, parts = found
        out = a.new_zeros(a.shape[0], b.shape[0])
        out[rows] = parts
        return out

    def sort(_: None) -> tuple[Tensor, Tensor]:
        rows, _group, ends = packed_rows(problem, backend)
        return rows, ends

    return {
        DENSE: (Stage(GEMM, lambda _: a @ b.t()),),
        "gather-scatter": (
            Stage(INDICES, lambda _: problem.mask[:, 0].nonzero().squeeze(1), waits=True),
            Stage(GATHER, lambda rows: (rows, a[rows])),
            Stage(GEMM, lambda found: (found[0], found[1] @ b.t())),
            Stage(SCATTER, scatter),
        ),
        "grouped product": (
            Stage(SORT, sort),
            Stage(GATHER, lambda found: (*found, a[found[0]])),
            Stage(GEMM, lambda found: (found[0], grouped_product()(found[2], b.t().unsqueeze(0), offs=found[1]))),
            Stage(SCATTER, scatter),
        ),
        # Gathers while it loads and scatters while it stores; skipped rows stay unwritten.
        "fused": (
            Stage(SORT, lambda _: reorder(problem.mask, backend=backend)),
            Stage(GEMM, lambda order: gemm_mn(a, b, order, backend=backend)),
        ),
    }


def accounted(way: str, stage: str, rows: int, width_in: int, width_out: int, active: float) -> float:
    """Return the data elements that a stage must read and write; masks and indices are not counted.

    Those of 'gather-scatter' add up to the paper's 3 p M (N + K) + N K + M N.

    Source: paper, section 3 and appendix A.
    """
    share = 1.0 if way == DENSE else active
    copies = {GATHER: 2 * width_in, SCATTER: 2 * width_out}
    if stage == GEMM:
        return share * rows * (width_in + width_out) + width_in * width_out
    return share * rows * copies.get(stage, 0) + (rows * width_out if stage == SCATTER else 0)


def run_stages(stages: tuple[Stage, ...], value: Any = None) -> Any:
    """Return what the last stage returns; `value` goes into the first."""
    for stage in stages:
        value = stage.run(value)
    return value


def measure(problem: Problem, *, backend: str, rounds: int) -> list[dict[str, Any]]:
    """Return one record per way: error, accounted traffic by stage, and on a GPU time, whole and by stage.

    Args:
        problem: From `depth_problem`.
        backend: Of sort and fused product.
        rounds: Replays of each whole and of each stage.
    """
    reference = wanted(problem)
    sizes = (problem.a.shape[0], problem.a.shape[1], problem.b.shape[0])
    records: dict[str, dict[str, Any]] = {}
    agreeing: dict[str, tuple[Stage, ...]] = {}
    for name, stages in ways(problem, backend=backend).items():
        traffic = {
            stage.name: accounted(name, stage.name, *sizes, problem.active) * problem.a.element_size()
            for stage in stages
        }
        records[name] = dict(zip(("rows", "width_in", "width_out"), sizes, strict=True))
        records[name] |= {"active": problem.active, "candidate": name, "accounted_traffic_bytes": traffic}
        # A way that fails here is a result: it is reported, never hidden.
        try:
            result = executed(problem, name, run_stages(stages))
            records[name]["error"] = relative_error(result.float(), reference)
        except Exception as error:
            records[name]["failure"] = _words(error)
            continue
        if records[name]["error"] <= _TOLERANCE[problem.a.dtype]:
            agreeing[name] = stages
    if problem.a.device.type == "cuda" and DENSE in agreeing:
        del reference
        _time(agreeing, records, rounds)
    return list(records.values())


def _time(agreeing: Mapping[str, tuple[Stage, ...]], records: dict[str, dict[str, Any]], rounds: int) -> None:
    for name, stages in agreeing.items():
        waiting = [stage for stage in stages if stage.waits]
        captured = tuple(stage for stage in stages if not stage.waits)
        # What is waited for comes first in every way that waits: the graph begins behind it.
        host_us = {stage.name: _host_us(partial(stage.run, None), rounds) for stage in waiting}
        value = run_stages(tuple(waiting))
        calls: dict[str, Callable[[], object]] = {"whole": partial(run_stages, captured, value)}
        for stage in captured:
            calls[stage.name] = partial(stage.run, value)
            value = stage.run(value)
        dense = {} if name == DENSE else {DENSE: partial(run_stages, agreeing[DENSE])}
        # What cannot be captured is a result, too.
        try:
            times = time_interleaved({**dense, **calls}, rounds=rounds)
        except Exception as error:
            records[name]["failure"] = _words(error)
            torch.cuda.empty_cache()
            continue
        waited = sum(host_us.values())
        whole = times["whole"]
        records[name] |= {
            "median_us": whole.median_us + waited,
            "low_us": whole.low_us + waited,
            "high_us": whole.high_us + waited,
            "speedup": times[DENSE if dense else "whole"].median_us / (whole.median_us + waited),
            "parts_us": host_us | {stage.name: times[stage.name].median_us for stage in captured},
        }


def _host_us(call: Callable[[], object], rounds: int) -> float:
    """Return microseconds until the host may go on, median; it comes to an idle GPU."""
    samples = []
    # The first two only warm up.
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        samples.append(1e6 * (time.perf_counter() - began))
    return statistics.median(samples[2:])


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _table(records: list[dict[str, Any]]) -> str:
    first = records[0]
    lines = [
        f"== {first['rows']} rows, {first['width_in']} x {first['width_out']}, {100 * first['active']:.0f} % execute"
    ]
    for record in records:
        words = record.get("failure") or f"error {record['error']:.1e}"
        if "median_us" in record:
            parts = ", ".join(f"{name} {us:.1f}" for name, us in record["parts_us"].items())
            words = f"{record['median_us']:10.1f} us  x{record['speedup']:.3f}  ({parts})  {words}"
        lines.append(f"  {record['candidate']:16s} {words}")
    return "\n".join(lines)


def run(
    out: Path,
    *,
    rows: Sequence[int] = (64, 1024, 4096, 16384),
    products: Sequence[tuple[int, int]] = ((4096, 4096), (4096, 28672)),
    sparsity: float = 0.5,
    device: str = "cuda",
    quick: bool = False,
) -> bool:
    """Check and time the ways, write depth.json, and return whether all agree with their references.

    Args:
        out: Folder.
        rows: Tokens; 64 is a decode batch.
        products: Inputs and outputs of each product.
        sparsity: Share of rows that skip the product.
        device: 'cuda', or 'cpu', where nothing is timed.
        quick: Fewer rounds.
    """
    is_gpu = device == "cuda"
    dtype, backend = (torch.bfloat16, "triton") if is_gpu else (torch.float32, "torch")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "torch": torch.__version__,
        "records": [],
    }
    out.mkdir(parents=True, exist_ok=True)
    agrees = True
    for width_in, width_out in products:
        for count in rows:
            problem = depth_problem(
                count, width_in, width_out, active=1.0 - sparsity, dtype=dtype, device=torch.device(device)
            )
            found = measure(problem, backend=backend, rounds=8 if quick else 20)
            agrees = agrees and all(record.get("error", 0.0) <= _TOLERANCE[dtype] for record in found)
            result["records"] += found
            _say(_table(found))
            # Written after every problem, so that a stopped run keeps what it measured.
            (out / "depth.json").write_text(json.dumps(result, indent=1) + "\n")
    return agrees


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; return 1 if anything disagrees with its reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for depth.json")
    parser.add_argument("--rows", default="64,1024,4096,16384", help="tokens, comma-separated; 64 is a decode batch")
    parser.add_argument("--products", default="4096x4096,4096x28672", help="inputs x outputs, comma-separated")
    parser.add_argument("--sparsity", type=float, default=0.5, help="share of rows that skip the product")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu checks and times nothing")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; run it on one, or with --device cpu, which times nothing")
    products = [tuple(int(size) for size in word.split("x")) for word in options.products.split(",")]
    agrees = run(
        options.out,
        rows=[int(word) for word in options.rows.split(",")],
        products=[(inputs, outputs) for inputs, outputs in products],
        sparsity=options.sparsity,
        device=options.device,
        quick=options.quick,
    )
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
