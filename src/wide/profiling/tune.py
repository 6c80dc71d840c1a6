"""Fills a tuning table with the fastest measured candidate of each shape, dense included.

Usage: python -m wide.profiling.tune --out FILE [--records operators.json attention.json] [--quick]
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wide.kernels.contract import Case
from wide.kernels.tuning import Choice, TuningTable, shape_key, tuning_key
from wide.profiling.operators import run, sweeps

_STACKED = 2
# A candidate must beat dense by more than the noise of a run.
_NOISE = 1.02


def fastest(records: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, Case, Choice]]:
    """Return operator, case and fastest choice by `shape_key` from records of the operator and attention benches.

    Gated products have two entries: with the option `stacked` the up weight lies right behind the gate weight in
    memory, which some tiles need.

    Args:
        records: As `operators.run` and `attention.run` return them; those without a choice or a time are ignored, and
            so are shapes of which only the dense product was timed with a choice.
    """
    best: dict[str, tuple[str, Case, Choice]] = {}
    dense: dict[str, float] = {}
    contested: set[str] = set()
    for record in records:
        if "choice" not in record or "median_us" not in record:
            continue
        described = record["case"]
        fields = {**record["choice"], "tile": tuple(record["choice"]["tile"]), "median_us": record["median_us"]}
        choice = Choice(**fields)
        for options in _variants(described, choice):
            case = Case(
                sizes=described["sizes"],
                dtype=getattr(torch, described["dtype"]),
                active=described["active"],
                options=options,
            )
            key = shape_key(described["operator"], case)
            if choice.backend == "dense":
                dense[key] = choice.median_us
            else:
                contested.add(key)
            if key not in best or _cost(choice) < _cost(best[key][2]):
                best[key] = (described["operator"], case, choice)
    return {
        key: (operator, case, replace(choice, dense_us=dense.get(key, 0.0)))
        for key, (operator, case, choice) in best.items()
        if key in contested
    }


def _cost(choice: Choice) -> float:
    return choice.median_us if choice.backend == "dense" else choice.median_us * _NOISE


def _variants(described: Mapping[str, Any], choice: Choice) -> list[dict[str, Any]]:
    options = dict(described["options"])
    if not options.get("gated"):
        return [options]
    stacked = {**options, "stacked": True}
    return [stacked] if choice.tile and choice.tile[-1] == _STACKED else [options, stacked]


def main(arguments: list[str] | None = None) -> int:
    """Tune on this machine's GPU, or turn records of an earlier run into the table the package ships."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the table to add to")
    parser.add_argument("--records", type=Path, nargs="*", help="records of earlier runs; none: measure GEMMs now")
    parser.add_argument("--rows", default="1024,4096,16384", help="comma-separated numbers of tokens")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and variants")
    options = parser.parse_args(arguments)
    if options.records:
        found = fastest(record for path in options.records for record in json.loads(path.read_text())["records"])
        # Shipped entries name no versions: they are the layer below what a user measures.
        choices = {key: choice for key, (_, _, choice) in found.items()}
    else:
        torch.manual_seed(17)
        rows = tuple(int(count) for count in options.rows.split(","))
        measured = [run(sweep, 10) for sweep in sweeps(["gemm_mn", "gemm_k"], rows, options.quick)]
        found = fastest(record for records in measured for record in records)
        device = torch.device("cuda")
        choices = {tuning_key(name, device, case): choice for name, case, choice in found.values()}
    TuningTable(options.out).store_all(choices)
    for key, choice in sorted(choices.items()):
        sys.stdout.write(f"{choice.median_us:9.1f} us {choice.backend} {choice.block_m} {choice.tile}: {key}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
