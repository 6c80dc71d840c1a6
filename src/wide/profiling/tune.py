"""Fills a tuning table with the fastest measured candidate of each shape, dense included.

`wide tune` measures the shapes of a model into the user's table. Records of benches become a table of the package:
Usage: python -m wide.profiling.tune --records operators.json attention.json --out FILE
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wide.inference.measured import ONE_SORT
from wide.kernels.contract import Case
from wide.kernels.reordering import PATTERN_GROUPS
from wide.kernels.tuning import Choice, TuningTable, shape_key, tuning_key
from wide.profiling.layer_shapes import TunedLayer, layer_measurements

_STACKED = 2
# A candidate must beat dense by more than the noise of a run.
_NOISE = 1.02
_ROUNDS, _QUICK_ROUNDS = 20, 10


def fastest(records: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, Case, Choice]]:
    """Return operator, case and fastest choice by `shape_key` from records of the operator and attention benches.

    Gated products have two entries: with the option `stacked` the up weight lies right behind the gate weight in
    memory, which some tiles need. A product over one sort of many groups has one of its own beside, faster or not, as
    'gemm_k_rows': what it takes depends on masks, and those at hand may be more alike than the measured ones.

    Args:
        records: As `operators.run` and `attention.run` return them; those without a choice or a time are ignored, and
            so are shapes of which only the dense product was timed with a choice.
    """
    best: dict[str, tuple[str, Case, Choice]] = {}
    dense: dict[str, float] = {}
    contested: set[str] = set()
    sorted_once: dict[str, tuple[str, Case, Choice]] = {}
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
                # The strongest of several dense peers is the one to beat.
                dense[key] = min(choice.median_us, dense.get(key, choice.median_us))
            else:
                contested.add(key)
            once = choice.backend == "cuda" and choice.groups_per_block > PATTERN_GROUPS
            if once and (key not in sorted_once or choice.median_us < sorted_once[key][2].median_us):
                sorted_once[key] = (ONE_SORT, case, choice)
            if key not in best or _cost(choice) < _cost(best[key][2]):
                best[key] = (described["operator"], case, choice)
    found = {
        key: (name, case, replace(choice, dense_us=dense.get(key, 0.0)))
        for key, (name, case, choice) in best.items()
        if key in contested
    }
    return found | {
        shape_key(ONE_SORT, case): (name, case, replace(choice, dense_us=dense[key]))
        for key, (name, case, choice) in sorted_once.items()
        if key in dense
    }


def _cost(choice: Choice) -> float:
    return choice.median_us if choice.backend == "dense" else choice.median_us * _NOISE


def _variants(described: Mapping[str, Any], choice: Choice) -> list[dict[str, Any]]:
    options = dict(described["options"])
    if not options.get("gated"):
        return [options]
    stacked = {**options, "stacked": True}
    return [stacked] if choice.tile and choice.tile[-1] == _STACKED else [options, stacked]


def tune(
    layers: Sequence[TunedLayer],
    *,
    table: TuningTable,
    device: torch.device,
    rows: Sequence[int],
    executed: tuple[float, float] = (0.5, 0.5),
    quick: bool = False,
    say: Callable[[str], None],
) -> dict[str, Choice]:
    """Measure the operators of layers and keep the fastest choices, under the keys that `wide.optimize` looks up.

    Equal layers are measured once. The table is written after every shape, so that a stopped run keeps what it
    measured. A shape that cannot be measured, for example for want of memory, is named and stays dense.

    Args:
        layers: Of the model.
        table: Where choices are kept.
        device: The GPU; must be the current one.
        rows: Numbers of tokens of a prompt.
        executed: Shares of (token, group) pairs that execute, in attention and FFN.
        quick: Fewer tiles and rounds.
        say: Takes a line for each shape.

    Returns:
        The choices by key.
    """
    kept: dict[str, Choice] = {}
    for layer in dict.fromkeys(layers):
        for measurement in layer_measurements(layer, rows, executed, quick=quick):
            try:
                records = measurement.run(_QUICK_ROUNDS if quick else _ROUNDS)
            # Kernels and libraries that do not take a shape have errors of their own kinds.
            except Exception as error:
                say(f"{measurement.name}: not measured, stays dense ({type(error).__name__}: {str(error)[:160]})")
                continue
            found = fastest(records)
            choices = {tuning_key(name, device, case): choice for name, case, choice in found.values()}
            table.store_all(choices)
            kept |= choices
            say(f"{measurement.name}: {_verdict(list(choices.values()), records)}")
            torch.cuda.empty_cache()
    return kept


def _verdict(choices: Sequence[Choice], records: Sequence[Mapping[str, Any]]) -> str:
    if not choices:
        failures = [record["failure"] for record in records if "failure" in record]
        return f"no kernel fits, stays dense{f' ({failures[0][:160]})' if failures else ''}"
    best = min(choices, key=_cost)
    if best.backend == "dense":
        return f"dense, {best.median_us:.1f} us"
    gain = f", {best.dense_us / best.median_us:.2f}x of dense" if best.dense_us else ""
    return f"{best.backend} {'x'.join(map(str, best.tile))}, {best.median_us:.1f} us{gain}"


def main(arguments: list[str] | None = None) -> int:
    """Turn records of an earlier run into the table that the package ships."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the table to add to")
    parser.add_argument("--records", type=Path, nargs="+", required=True, help="records of earlier runs")
    options = parser.parse_args(arguments)
    found = fastest(record for path in options.records for record in json.loads(path.read_text())["records"])
    # Shipped entries name no versions: they are the layer below what a user measures.
    choices = {key: choice for key, (_, _, choice) in found.items()}
    TuningTable(options.out).store_all(choices)
    for key, choice in sorted(choices.items()):
        sys.stdout.write(f"{choice.median_us:9.1f} us {choice.backend} {choice.block_m} {choice.tile}: {key}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
