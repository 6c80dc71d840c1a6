"""Reads the profiler's counters for every kernel of one layer, as `auto` runs it and dense: what limits each operator.

Usage: python -m benchmarks.counters --out DIR [--prompt 4096,16384] [--decode 2048] [--rates 0.5,0.5] [--limit S]
           [--tables]
       python -m benchmarks.counters --out DIR --naive 1024,2048 [--limit S]
       python -m benchmarks.counters --out DIR --csv DIR/counters.csv [--naive 1024,2048]

Needs Nsight Compute (ncu) and the right to read counters. One layer of Llama-3.1-8B's shapes with random weights runs
under the profiler, which repeats each kernel for groups of counters with cold caches, clocks as they are. DIR gets
the profiler's own table (counters.csv) and what is looked at (counters.json), a row for each kernel, also where the
profiler is stopped before its end. The second form counts what pruned products move, naive and fused, at each size: DIR
gets naive-bytes.json, sums over the kernels of each way, sorting included, and the names of the ways that have none,
such as those that did not fit in memory. The third form reads a table that is there, of pruned products with --naive
and their sizes; its machine and date are not known.
"""

import argparse
import csv
import datetime
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# With these the profiler asks for hundreds of counters more, and runs each kernel several times as often.
SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",
    "ComputeWorkloadAnalysis",
    "WarpStateStats",
)
_PEAK = "avg.pct_of_peak_sustained_elapsed"
_STALLS = ("barrier", "gmma", "long_scoreboard", "short_scoreboard", "mio_throttle", "wait")
# Name and factor of each counter of counters.json. Stalls: warps that wait so, for each instruction that is issued.
KEPT: dict[str, tuple[str, float]] = {
    "gpu__time_duration.sum": ("time_us", 1e-3),
    "gpc__cycles_elapsed.avg.per_second": ("clock_mhz", 1e-6),
    f"sm__pipe_tensor_cycles_active.{_PEAK}": ("tensor_pct", 1),
    f"l1tex__throughput.{_PEAK}": ("l1_pct", 1),
    f"lts__throughput.{_PEAK}": ("l2_pct", 1),
    "lts__t_sector_hit_rate.pct": ("l2_hit_pct", 1),
    f"gpu__dram_throughput.{_PEAK}": ("dram_pct", 1),
    "dram__bytes_read.sum": ("dram_read_mb", 1e-6),
    "dram__bytes_write.sum": ("dram_written_mb", 1e-6),
    "smsp__issue_active.avg.per_cycle_active": ("issued_per_cycle", 1),
    **{f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": (f"stall_{name}", 1) for name in _STALLS},
}
# Ours begin with an underscore; the rest are products and attention of the libraries. Written to mean the same whether
# it is searched for or matched as a whole.
KERNELS = r"^(_.*|gemm_.*|rows_.*|nvjet.*|cudnn.*|.*(gemv|splitK|cutlass|cublas|flash).*)$"
ANY_KERNEL = ".*"
# Sectors have 32 bytes. Whatever a kernel asks of the second-level cache, and what of it comes from or goes to memory.
MOVED: dict[str, tuple[str, float]] = {
    "gpu__time_duration.sum": ("time_us", 1e-3),
    "lts__t_sectors.sum": ("l2_bytes", 32),
    "dram__bytes_read.sum": ("dram_read_bytes", 1),
    "dram__bytes_write.sum": ("dram_written_bytes", 1),
}
# The problem and the backend of pruned products.
_GROUP_SIZE, _ACTIVE, _BACKEND = 128, 0.5, "triton"
_GRACE_S = 60.0


def ncu_command(
    out: Path,
    program: Sequence[str],
    *,
    tables: bool = False,
    counters: Mapping[str, tuple[str, float]] = KEPT,
    kernels: str = KERNELS,
) -> list[str]:
    """Return the command that runs a program of ours under the profiler.

    Args:
        out: Folder for counters.csv.
        program: With its arguments.
        tables: Whether to read whole sections beside the counters that are kept.
        counters: That are kept.
        kernels: Pattern of the names of those that are looked at.

    Raises:
        SystemExit: If there is no profiler.
    """
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        raise SystemExit("counters: ncu was not found; install Nsight Compute or put it on PATH")
    asked = ["--metrics", ",".join(counters)]
    if tables:
        asked += [word for section in SECTIONS for word in ("--section", section)]
    flags = ["--profile-from-start", "off", "--clock-control", "none", "--nvtx", "--csv", "--page", "raw"]
    flags += ["--print-units", "base", "--kernel-name-base", "demangled", "--kernel-name", f"regex:{kernels}"]
    return [ncu, *flags, *asked, "--log-file", str(out / "counters.csv"), *program]


def profile(command: Sequence[str], limit_s: float | None = None) -> int:
    """Run the profiler to its end, at most `limit_s` seconds; return its exit code, never 0 where it was stopped."""
    process = subprocess.Popen(command)
    try:
        return process.wait(limit_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        # Asked to end, the profiler still writes the kernels that it has.
        process.terminate()
    try:
        return process.wait(_GRACE_S) or 1
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait() or 1


def read_rows(
    text: str, counters: Mapping[str, tuple[str, float]] = KEPT, kernels: str = KERNELS
) -> Iterator[dict[str, Any]]:
    """Yield one flat row per kernel of the profiler's raw table: range, name, grid, and the counters that are kept.

    A counter that is missing or not a number is left out; so is a last line that was cut off.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    for row in csv.DictReader(lines):
        # The line of units has no ID, and a line that was cut off lacks columns.
        if not row["ID"] or None in row.values() or not re.match(kernels, row["Kernel Name"]):
            continue
        # Each range: "domain:name:...", behind the thread's number.
        ranges = (re.findall(r'"[^":]*:([^":]*)', value) for name, value in row.items() if "Push/Pop" in name)
        named = {
            "range": " ".join(name for found in ranges for name in found),
            "kernel": row["Kernel Name"],
            "grid": row["Grid Size"],
        }
        numbers = {name: _number(row.get(metric, ""), factor) for metric, (name, factor) in counters.items()}
        yield named | {name: number for name, number in numbers.items() if number is not None}


def _number(text: str, factor: float) -> float | None:
    try:
        return round(float(text.replace(",", "")) * factor, 2)
    except ValueError:
        return None


def launch(prompts: Sequence[int], decodes: Sequence[int], rates: tuple[float, float]) -> None:
    """Run each forward of one layer twice, the second time for the profiler."""
    import torch

    from wide.config import WideConfig
    from wide.inference.choice.measured import measured_table
    from wide.inference.choice.tuning.tune import tuned_layers
    from wide.inference.engine.decoder import Decoder
    from wide.inference.engine.layer import ForwardOptions, force
    from wide.models.attach import attach, attachment
    from wide.profiling.synthetic import random_model

    device = torch.device("cuda")
    torch.manual_seed(17)
    model = random_model("llama-3.1-8b", num_layers=1, device=device, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    attach(model, WideConfig(ffn_group_size=128))
    decoder = Decoder(model.eval(), max_length=max(*prompts, *decodes, 1) + 8)
    state = attachment(model)
    sizes = tuned_layers(state.specs, state.plan)[0].sizes
    table = measured_table(sizes, device=device, dtype=torch.bfloat16, executed=(1.0 - rates[0], 1.0 - rates[1]))
    groups = [(router.num_groups, rate) for router, rate in zip(state.routers(), rates, strict=True)]
    for what, length in [*(("prefill", n) for n in prompts), *(("decode", n) for n in decodes)]:
        tokens = length if what == "prefill" else 1
        cache = decoder.new_cache(1, length + 8)
        cache.k.normal_()
        cache.v.normal_()
        ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)
        lengths = torch.full((1,), length, dtype=torch.int32, device=device)
        masks = [torch.rand(tokens, count, device=device) >= rate for count, rate in groups]
        forced = force(decoder.layers, [(masks[0], masks[1])])
        for name, run in (
            ("dense", ForwardOptions(routed=False, table=table)),
            ("routed", ForwardOptions(table=table, forced=forced)),
        ):
            for profiled in (False, True):
                cache.lengths.fill_(length)
                torch.cuda.synchronize()
                if profiled:
                    torch.cuda.profiler.start()
                    torch.cuda.nvtx.range_push(f"{what} {length} {name}")
                if what == "prefill":
                    decoder.prefill(ids, lengths, cache, run)
                else:
                    decoder.step(ids[0], cache, run)
                torch.cuda.synchronize()
                if profiled:
                    torch.cuda.nvtx.range_pop()
                    torch.cuda.profiler.stop()


def launch_naive(sizes: Sequence[int]) -> None:
    """Run each pruned product twice, the second time for the profiler."""
    import torch

    from benchmarks.naive_products import AXES, implementations, make_problem, work

    device = torch.device("cuda")
    for size in sizes:
        for axis in AXES:
            problem = make_problem(
                axis, size, group_size=_GROUP_SIZE, active=_ACTIVE, dtype=torch.bfloat16, device=device
            )
            for name, call in implementations(problem, backend=_BACKEND).items():
                # Gathered weights may be copied once more.
                stored = 2.5 * work(axis, name, size, _GROUP_SIZE, _ACTIVE).storage * problem.a.element_size()
                if stored > torch.cuda.mem_get_info(device)[0]:
                    continue
                call()
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                torch.cuda.nvtx.range_push(f"{axis} {size} {name}")
                call()
                torch.cuda.synchronize()
                torch.cuda.nvtx.range_pop()
                torch.cuda.profiler.stop()
                torch.cuda.empty_cache()


def sum_ranges(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a record for each pruned product, with what all its kernels moved; one with a gap in it is left out.

    The profiler empties the caches before each kernel, so that what one kernel leaves for the next is counted as read
    from memory, as the accounting of naive products does.
    """
    found: dict[str, dict[str, Any]] = {}
    names = [name for name, _ in MOVED.values()]
    for row in rows:
        if row["range"].count(" ") < 2:
            # Of a kernel outside of every product.
            continue
        axis, size, candidate = row["range"].split(" ", 2)
        record = found.setdefault(
            row["range"],
            {"axis": axis, "size": int(size), "candidate": candidate, "kernels": 0} | dict.fromkeys(names, 0),
        )
        record["kernels"] += 1
        for name in names:
            record[name] += row.get(name, math.nan)
    return [record for record in found.values() if all(math.isfinite(record[name]) for name in names)]


def left_out(sizes: Iterable[int], records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the pruned products of these sizes that have no record, each as 'AXIS SIZE CANDIDATE'."""
    from benchmarks.naive_products import AXES, NAMES

    found = {(record["axis"], record["size"], record["candidate"]) for record in records}
    asked = ((axis, size, name) for size in dict.fromkeys(sizes) for axis in AXES for name in NAMES)
    # Whole tokens have no grouped product.
    return [" ".join(map(str, way)) for way in asked if way not in found and way[::2] != ("M", "grouped product")]


def measured_on() -> dict[str, str]:
    """Return the GPU, if there is one, torch and today's date, as a report says them."""
    import torch

    device = {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return device | {"torch": torch.__version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def _report(table: Path, out: Path, facts: Mapping[str, str], code: int) -> None:
    """Write counters.json, with these facts, from the profiler's table and print a line for each kernel."""
    text = table.read_text(encoding="utf-8") if table.exists() else ""
    rows = list(read_rows(text))
    report = {**facts, "complete": code == 0 and "==ERROR==" not in text, "records": rows}
    (out / "counters.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    shown = ("time_us", "clock_mhz", "tensor_pct", "l2_pct", "dram_pct")
    sys.stdout.write(f"{'':28s} {'':40s}" + "".join(f"{name:>11s}" for name in shown) + "\n")
    for row in rows:
        numbers = "".join(f"{row.get(name, '-'):>11}" for name in shown)
        sys.stdout.write(f"{row['range']:28s} {row['kernel'][:40]:40s}{numbers}\n")
    if code:
        sys.stderr.write(f"counters: the profiler ended with {code}; {len(rows)} kernels until then are written\n")


def _report_naive(table: Path, out: Path, facts: Mapping[str, str], code: int, sizes: Sequence[int]) -> None:
    """Write naive-bytes.json, with these facts, from the profiler's table and print a line for each way."""
    text = table.read_text(encoding="utf-8") if table.exists() else ""
    records = sum_ranges(read_rows(text, MOVED, ANY_KERNEL))
    if code and records:
        # Of the last one some kernels may be missing.
        records.pop()
    lacking = left_out(sizes, records)
    complete = code == 0 and "==ERROR==" not in text
    ran = {"group_size": _GROUP_SIZE, "active": _ACTIVE, "backend": _BACKEND}
    report = {**facts, **ran, "complete": complete, "left_out": lacking, "records": records}
    (out / "naive-bytes.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for record in records:
        moved = "".join(f"{record[name] / 2**20:14,.1f} MiB" for name, _ in MOVED.values() if name.endswith("bytes"))
        sys.stdout.write(f"{record['axis']} {record['size']:6d} {record['candidate']:16s}{moved}\n")
    if lacking:
        sys.stdout.write(f"without a record: {', '.join(lacking)}\n")
    if code:
        sys.stderr.write(f"counters: the profiler ended with {code}; {len(records)} products until then are written\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the profiler and write what it found; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for counters.csv and counters.json")
    parser.add_argument("--prompt", default="4096,16384", help="prompt lengths of prefills")
    parser.add_argument("--decode", default="2048", help="tokens cached before a decode step")
    parser.add_argument("--rates", default="0.5,0.5", help="skipped attention,FFN")
    parser.add_argument("--limit", type=float, default=None, help="seconds after which the profiler is stopped")
    parser.add_argument("--tables", action="store_true", help="whole sections into counters.csv, several times as long")
    parser.add_argument("--csv", type=Path, default=None, help="a table of the profiler to read instead of running it")
    parser.add_argument("--naive", default="", metavar="SIZES", help="M = N = K of pruned products to look at instead")
    parser.add_argument("--launch", action="store_true", help="run the kernels only, for a profiler")
    options = parser.parse_args(arguments)
    naive = [int(n) for n in options.naive.split(",") if n]
    prompts, decodes = ([int(n) for n in text.split(",") if n] for text in (options.prompt, options.decode))
    attention, ffn = (float(rate) for rate in options.rates.split(","))
    if options.launch and naive:
        launch_naive(naive)
        return 0
    if options.launch:
        launch(prompts, decodes, (attention, ffn))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    given = list(sys.argv[1:] if arguments is None else arguments)
    facts = {"command": " ".join(["python -m benchmarks.counters", *given])}
    table, code = options.csv, 0
    if table is None:
        facts |= measured_on()
        table = options.out / "counters.csv"
        table.unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, _stop)
        program = [sys.executable, "-m", "benchmarks.counters", "--launch", *given]
        if naive:
            command = ncu_command(options.out, program, counters=MOVED, kernels=ANY_KERNEL)
        else:
            command = ncu_command(options.out, program, tables=options.tables)
        code = profile(command, options.limit)
    if naive:
        _report_naive(table, options.out, facts, code, naive)
    else:
        _report(table, options.out, facts, code)
    return code


if __name__ == "__main__":
    sys.exit(main())
