"""Reads the profiler's counters for every kernel of one layer, as `auto` runs it and dense: what limits each operator.

Usage: python tools/counters.py --out DIR [--prompt 4096,16384] [--decode 2048] [--rates 0.5,0.5]

Needs Nsight Compute (ncu) and the right to read counters. One layer of Llama-3.1-8B's shapes with random weights runs
under the profiler, which repeats each kernel for groups of counters with cold caches, clocks as they are. DIR gets
everything that the profiler says (counters.csv) and what is usually looked at (counters.json), a row for each kernel.
"""

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",
    "ComputeWorkloadAnalysis",
    "WarpStateStats",
)
KEPT = re.compile(
    r"^(gpu__time_duration\.sum|gpc__cycles_elapsed\.avg\.per_second|dram__bytes_(read|write)\.sum"
    r"|(sm|lts|l1tex|gpu__dram|gpu__compute_memory)_*throughput\.avg\.pct_of_peak_sustained_(elapsed|active)"
    r"|sm__inst_executed_pipe_tensor.*pct_of_peak_sustained_(active|elapsed)"
    r"|lts__t_sectors_op_(read|write|red|atom)\.sum|lts__t_sector_hit_rate\.pct"
    r"|breakdown:.*|(lts__lts2xbar|lts__xbar2lts|l1tex__m_l1tex2xbar|l1tex__m_xbar2l1tex).*pct.*)$"
)


def ncu_command(out: Path, program: Sequence[str]) -> list[str]:
    """Return the command that runs a program of ours under the profiler.

    Raises:
        SystemExit: If there is no profiler.
    """
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        raise SystemExit("counters: ncu was not found; install Nsight Compute or put it on PATH")
    sections = [word for section in SECTIONS for word in ("--section", section)]
    flags = ["--profile-from-start", "off", "--clock-control", "none", "--nvtx", "--csv", "--page", "raw"]
    return [ncu, *flags, *sections, "--log-file", str(out / "counters.csv"), *program]


def read_rows(text: str) -> Iterator[dict[str, Any]]:
    """Yield one row per kernel of the profiler's raw table: its name, grid, range, and the counters that are kept."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = csv.DictReader(lines)
    for number, row in enumerate(table):
        if number == 0 and not row.get("ID"):
            # The line of units.
            continue
        ranges = [value for name, value in row.items() if name and "Push/Pop" in name and value]
        counters = {}
        for name, value in row.items():
            if name and KEPT.match(name) and value:
                counters[name] = _number(value)
        yield {
            "kernel": row.get("Kernel Name", ""),
            "grid": row.get("Grid Size", ""),
            "range": " ".join(ranges),
            "counters": counters,
        }


def _number(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


def launch(prompts: Sequence[int], decodes: Sequence[int], rates: tuple[float, float]) -> None:
    """Run each forward of one layer twice, the second time for the profiler."""
    import torch

    from wide.config import WideConfig
    from wide.models.attach import attach
    from wide.profiling.endtoend_races import operator_table
    from wide.profiling.synthetic import random_masks, random_model
    from wide.runtime.decoder import Decoder
    from wide.runtime.run import Run

    device = torch.device("cuda")
    torch.manual_seed(17)
    model = random_model("llama-3.1-8b", num_layers=1, device=device, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    attach(model, WideConfig(ffn_group_size=128))
    decoder = Decoder(model.eval(), max_length=max(*prompts, *decodes, 1) + 8, checked=False)
    table = operator_table(decoder, rates)
    for what, length in [*(("prefill", n) for n in prompts), *(("decode", n) for n in decodes)]:
        tokens = length if what == "prefill" else 1
        cache = decoder.new_cache(1, length + 8)
        cache.k.normal_()
        cache.v.normal_()
        ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)
        lengths = torch.full((1,), length, dtype=torch.int32, device=device)
        forced = random_masks(decoder.layers, tokens, rates)
        for name, run in (
            ("dense", Run(routed=False, table=table)),
            ("routed", Run(table=table, forced=forced)),
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the profiler and write what it found; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for counters.csv and counters.json")
    parser.add_argument("--prompt", default="4096,16384", help="prompt lengths of prefills")
    parser.add_argument("--decode", default="2048", help="tokens cached before a decode step")
    parser.add_argument("--rates", default="0.5,0.5", help="skipped attention,FFN")
    parser.add_argument("--launch", action="store_true", help="run the kernels only, for a profiler")
    options = parser.parse_args(arguments)
    prompts, decodes = ([int(n) for n in text.split(",") if n] for text in (options.prompt, options.decode))
    attention, ffn = (float(rate) for rate in options.rates.split(","))
    if options.launch:
        launch(prompts, decodes, (attention, ffn))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    given = list(sys.argv[1:] if arguments is None else arguments)
    code = subprocess.run(
        ncu_command(options.out, [sys.executable, __file__, "--launch", *given]), check=False
    ).returncode
    rows = list(read_rows((options.out / "counters.csv").read_text(encoding="utf-8")))
    (options.out / "counters.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        time = row["counters"].get("gpu__time_duration.sum", "?")
        sys.stdout.write(f"{row['range']:28s} {row['kernel'][:48]:48s} {time}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
