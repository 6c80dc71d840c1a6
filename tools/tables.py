"""Tables and pictures of figures in the pages, made from records.

Usage: python tools/tables.py [--check]

A page names a table between `<!-- table: NAME -->` and `<!-- end -->`; what stands there is replaced by that table.
`--check` writes nothing and ends with 1 where a page is stale. Studies' records are in `docs/results`, rows of
targets in `docs/measurements/targets`.
"""

import argparse
import gzip
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from wide.records import Cell, Record, Stage, read_records
from wide.report.drawing import draw, style
from wide.report.figure import Figure
from wide.report.reading import read_profile
from wide.report.selection import Selection
from wide.report.speed import SPEED_FIGURES
from wide.report.table import Table
from wide.writing import replacing

ROOT = Path(__file__).parents[1]
TARGETS = ROOT / "docs/measurements/targets"
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_PERPLEXITY, _WORK = "token_perplexity", "sparsity.linear_flops_layers"
_SEEDS = (17, 18, 19)
_METHODS = {
    "dense": "dense",
    "wide-fitted": "WIDE, `fitted-50`, G = 128",
    "tyr": "Týr",
    "wide": "WIDE, the paper's recipe, G = 128",
    "wide-uniform": "WIDE-uniform, G = 128",
    "ddp": "DDP",
    "slicegpt": "SliceGPT",
    "blockpruner": "BlockPruner",
    "shortened-ppl": "Shortened, perplexity",
    "cooppruner": "CoopPruner",
    "shortened-taylor": "Shortened, Taylor",
    "dllm-original": "D-LLM, original form",
    "skipgpt": "SkipGPT, as the WIDE paper runs it",
    "dllm": "D-LLM, as the WIDE paper runs it",
}
# Runs at half of the work: of several the first with a finished cell counts.
_HALF = ("f50", "f50-fitted", "f50-groups", "f50-tasks", "f50-seeds", "f50-seeds-fitted")
# Whole layers are the same share of the work as of the nominal target, whose runs have them.
_NOMINAL = ("n50", "n50-rest")
_WHOLE_LAYERS = ("cooppruner", "shortened-ppl", "shortened-taylor")
_AGAIN = (*_WHOLE_LAYERS, "slicegpt", "dllm-original")
_PARTS = {
    "all of it (`fitted-50`)": ("f50-fitted", "wide-fitted"),
    "without fitted start and bias": ("parts", "no-bias"),
    "first temperature of 5": ("parts-hot", "no-low-temperature"),
    "clustered groups alone": ("parts-plain", "clustered-only"),
    "without the smooth term": ("parts-sharp", "no-smoothing"),
    "without clustered groups": ("parts", "no-clustering"),
    "fitted start alone": ("parts-plain", "fitted-start-only"),
    "the paper's": ("parts-plain", "published"),
}
_SIZES = {
    "16 / 192": ("g-sweep", "f16-a192"),
    "32 / 192": ("n50", "wide-32"),
    "128 / 192": ("n50", "wide"),
    **{f"128 / {size}": ("g-sweep", f"f128-a{size}") for size in (64, 768)},
}
_SWEEP = {0.25: "n25", 0.5: "n50"}


@cache
def study(name: str = "lab-88m") -> dict[str, Selection]:
    """Return the records of a study of methods by run."""
    records = read_records(ROOT / f"docs/results/{name}/records.jsonl.gz")[0]
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record.run, []).append(record)
    return {name: Selection(found) for name, found in runs.items()}


def number(run: str, method: str, metric: str, target: float, *, seed: int = 17, lora: bool = False) -> float | None:
    """Return a figure of a finished cell, None where there is none."""
    stage = Stage(Cell(method, 0.0 if method == "dense" else target, seed), recovered=lora)
    found = study()[run]
    return found.number(stage, metric) if found.text(stage, "status") == "finished" else None


def quality() -> Table:
    """Return perplexities by method; ± is the standard deviation over seeds 17, 18 and 19, where all were measured."""
    rows = [(name, *(_of_seeds(method, lora) for lora in (False, True))) for method, name in _METHODS.items()]
    return Table(header=("method", "half of the work", "with LoRA"), rows=tuple(rows))


def real(name: str, *, bare: bool = True) -> Table:
    """Return the scores of a public model's rows, with LoRA and, where `bare` is set, without."""
    model, share, rows = _REAL_ROWS[name]
    lines = []
    for title, (run, adapted_run, method) in rows.items():
        target = 0.0 if method == "dense" else share
        plain, adapted = (
            (study(model)[each], Stage(Cell(method, target, 17), recovered=lora))
            for each, lora in ((run, False), (adapted_run, True))
        )
        without = (_work(*plain), *_scores(*plain)) if bare else ()
        lines.append((title, *without, *_scores(*adapted), _without_boolq(*adapted)))
    titles = ("work skipped, %", "perplexity", "accuracy, %") if bare else ()
    scores = tuple(f"{'LoRA: ' * bare}{score}" for score in ("perplexity", "accuracy, %", "without BoolQ, %"))
    return Table(header=("", *titles, *scores), rows=tuple(lines))


def real_short() -> Table:
    """Return the main rows of both public models, with LoRA."""
    scores = ("perplexity", "accuracy, %", "without BoolQ, %")
    header = ("half of the work, with LoRA", f"135 M: {scores[0]}", *scores[1:], f"1.5 B: {scores[0]}", *scores[1:])
    smaller, larger = (
        {row[0]: row[1:] for name in names for row in real(name, bare=False).rows}
        for names in (("half", "longer"), ("larger",))
    )
    lines = [(title, *smaller[one], *larger[other]) for title, (one, other) in _REAL_FEW.items()]
    return Table(header=header, rows=tuple(lines))


def real_columns() -> Table:
    """Return the scores of the smaller public model at the other two targets."""
    quarter, nominal = (real(name).rows for name in ("quarter", "nominal"))
    lines = [(*one[:-1], *other[1:-1]) for one, other in zip(quarter, nominal, strict=True)]
    titles = ("perplexity", "accuracy, %", "LoRA: perplexity", "LoRA: accuracy, %")
    header = ("", "a quarter: work skipped, %", *titles, "50 % nominal: work skipped, %", *titles)
    return Table(header=header, rows=tuple(lines))


def real_seeds() -> Table:
    """Return perplexity and accuracy of the smaller public model at half of the work by seed."""
    lines = []
    for title, (runs, method, lora) in _REAL_SEEDS.items():
        cells = [
            _scores(study("smollm2-135m")[run], Stage(Cell(method, 0.5, seed), recovered=lora))
            for run, seed in zip(runs, (17, 18, 19), strict=True)
        ]
        lines.append((title, *("-" if words == "-" else f"{words}; {accuracy}" for words, accuracy in cells)))
    return Table(header=("perplexity; accuracy, %", *(f"seed {seed}" for seed in (17, 18, 19))), rows=tuple(lines))


def _scores(records: Selection, stage: Any) -> tuple[str, str]:
    """Return word perplexity and accuracy of a stage, where it was scored."""
    words, accuracy = (records.number(stage, name) for name in ("word_perplexity", "accuracy.average"))
    shown = "-" if words is None else f"{words:.1e}" if words >= 1e6 else f"{words:,.1f}"
    return shown, "-" if accuracy is None else f"{100 * accuracy:.1f}"


def _work(records: Selection, stage: Any) -> str:
    work = records.number(stage, _WORK)
    return "-" if work is None else f"{100 * work:.1f}"


def _without_boolq(records: Selection, stage: Any) -> str:
    found = [records.number(stage, f"accuracy.{task}") for task in _SIX_TASKS]
    return "-" if None in found else f"{100 * statistics.fmean(value for value in found if value is not None):.1f}"


def eight_bits() -> Table:
    """Return what the engine's kernels and eight bits change in the perplexity of the routed and the dense models."""
    lines = []
    for form, words in (("engine", "bf16 kernels"), ("int8", "int8"), ("w8a8", "w8a8")):
        cells = [words]
        for name in ("smollm2-135m", "qwen2.5-coder-1.5b"):
            records = study(name)["eight-bits-gpu"]
            for who in ("routed", "dense"):
                stage = f"{who}, {form}"
                change, error = (records.number(stage, f"log_perplexity.change{end}") for end in ("", ".stderr"))
                known = change is not None and error is not None
                cells.append(f"{100 * change:+.2f} ± {100 * error:.2f} %" if known else "-")
        lines.append(tuple(cells))
    header = ("", *(f"{size}, {who}" for size in ("135 M", "1.5 B") for who in ("routed", "dense")))
    return Table(header=header, rows=tuple(lines))


_SIX_TASKS = ("arc_easy", "arc_challenge", "winogrande", "piqa", "openbookqa", "hellaswag (302-item subset)")
_SMALLER_ROWS = {
    "dense": ("half", "half", "dense"),
    "dense, long LoRA": ("half", "longer", "dense"),
    "WIDE, `fitted-50`, long LoRA": ("shipped", "shipped", "wide-fitted"),
    "WIDE, the paper's recipe, G = 128": ("half", "half", "wide"),
    "WIDE, the paper's recipe, G = 64": ("more-lora", "more-lora", "wide-64"),
    "WIDE, the paper's recipe, G = 32": ("more-lora", "more-lora", "wide-32"),
    "WIDE-uniform": ("more-lora", "more-lora", "wide-uniform"),
    "Týr": ("half", "half", "tyr"),
    "Shortened, perplexity": ("more-lora", "more-lora", "shortened-ppl"),
    "BlockPruner": ("half", "half", "blockpruner"),
    "SliceGPT": ("half", "half", "slicegpt"),
    "Shortened, Taylor": ("half", "half", "shortened-taylor"),
    "CoopPruner": ("half", "half", "cooppruner"),
    "DDP": ("more-lora", "more-lora", "ddp"),
    "D-LLM": ("more-lora", "more-lora", "dllm"),
    "SkipGPT": ("more-lora", "more-lora", "skipgpt"),
}
# Static rows with as many steps as routed rows train in all, beside ours.
_LONGER_ROWS = {
    "WIDE, `fitted-50`, long LoRA": ("shipped", "shipped", "wide-fitted"),
    "Týr, long LoRA of 2000 steps": ("half-longest", "half-longest", "tyr"),
    "Týr": ("half", "tyr-longer", "tyr"),
    "Shortened, perplexity": ("half-longer", "half-longer", "shortened-ppl"),
    "BlockPruner": ("half-longer", "half-longer", "blockpruner"),
    "DDP": ("half-longer", "half-longer", "ddp"),
    "Shortened, Taylor": ("half-longer", "half-longer", "shortened-taylor"),
    "CoopPruner": ("half-longer", "half-longer", "cooppruner"),
    "SliceGPT": ("half-longer", "half-longer", "slicegpt"),
}
_LARGER_ROWS = {
    "dense": ("half", "half-fitted-lora", "dense"),
    "dense, long LoRA": ("half", "dense-longer", "dense"),
    "WIDE, `fitted-50`, long LoRA": ("shipped", "shipped", "wide-fitted"),
    "Týr": ("half-lora", "half-lora", "tyr"),
    "DDP": ("half-lora", "half-lora", "ddp"),
    "SliceGPT": ("half-lora", "half-lora", "slicegpt"),
    "Shortened, Taylor": ("half-lora", "half-lora", "shortened-taylor"),
    "WIDE, the paper's recipe, G = 128": ("half-lora", "half-lora", "wide"),
    "SkipGPT": ("half-lora", "half-lora", "skipgpt"),
}
_OTHER_LORA = {("nominal", "shortened-ppl"): "more-lora", ("nominal", "shortened-taylor"): "half"}
_OTHER_LORA["nominal", "cooppruner"] = "half"  # whole layers: what is half of the work is half by name, too
_TRAINED_AGAIN = ("ddp", "dllm", "skipgpt")  # both stages are of the second training


def _other_rows(column: str) -> dict[str, tuple[str, str, str]]:
    """Return the rows of the smaller model at another share."""
    rows: dict[str, tuple[str, str, str]] = {}
    for title, (*_, method) in _SMALLER_ROWS.items():
        if method == "dense":
            rows |= {title: _SMALLER_ROWS[title]} if title == "dense" else {}
        elif method == "wide-fitted":
            rows[title] = (f"{column}-shipped", f"{column}-shipped", method)
        else:
            alone = f"{column}-lora" if method in _TRAINED_AGAIN else column
            rows[title] = (alone, _OTHER_LORA.get((column, method), f"{column}-lora"), method)
    return rows


# Table -> model, target and rows: title -> run of the scores without LoRA, run of those with it, and the method.
_REAL_ROWS = {
    "half": ("smollm2-135m", 0.5, _SMALLER_ROWS),
    "longer": ("smollm2-135m", 0.5, _LONGER_ROWS),
    "quarter": ("smollm2-135m", 0.25, _other_rows("quarter")),
    "nominal": ("smollm2-135m", 0.5, _other_rows("nominal")),
    "larger": ("qwen2.5-coder-1.5b", 0.5, _LARGER_ROWS),
    "family": (
        "gemma3-270m",
        0.5,
        {
            "dense": ("half", "half", "dense"),
            "`fitted-50`": ("shipped", "shipped", "wide-fitted"),
            "Týr": ("half", "half", "tyr"),
        },
    ),
}
# Title -> runs of three seeds, the method, and whether with LoRA.
_REAL_SEEDS = {
    "WIDE, `fitted-50`": (("shipped",) * 3, "wide-fitted", False),
    "the same, with long LoRA": (("shipped",) * 3, "wide-fitted", True),
    "WIDE, the paper's recipe, G = 128": (("half", "seeds", "seeds"), "wide", False),
    "Týr": (("half", "seeds", "seeds"), "tyr", False),
    "Týr, with LoRA": (("half", "seeds", "seeds"), "tyr", True),
    "DDP": (("half", "seeds", "seeds"), "ddp", False),
}
# Of the short table: title -> the rows of the smaller and of the larger model.
_REAL_FEW = {
    "dense": ("dense, long LoRA",) * 2,
    "WIDE, `fitted-50`": ("WIDE, `fitted-50`, long LoRA",) * 2,
    "Týr": ("Týr, long LoRA of 2000 steps", "Týr"),
    "DDP": ("DDP",) * 2,
    "WIDE, the paper's recipe": ("WIDE, the paper's recipe, G = 128",) * 2,
}


def _of_seeds(method: str, lora: bool) -> str:
    runs = _NOMINAL if method in _WHOLE_LAYERS else _HALF
    values = []
    for seed in _SEEDS if method != "dense" else _SEEDS[:1]:
        found = (number(run, method, _PERPLEXITY, 0.5, seed=seed, lora=lora) for run in _once(runs, method, seed))
        values.append(next((value for value in found if value is not None), None))
    if values[0] is None:
        return "-"
    if len(values) == len(_SEEDS) and None not in values:
        known = [value for value in values if value is not None]
        return f"{statistics.fmean(known):.1f} ± {statistics.stdev(known):.1f}"
    return f"{values[0]:.1f}"


def _once(runs: Sequence[str], method: str, seed: int) -> Sequence[str]:
    # The first run did not reach the LoRA of these rows: both of their stages are of the second one.
    return ("n50-rest",) if method in _AGAIN and "n50-rest" in runs and seed == _SEEDS[0] else runs


def parts() -> Table:
    """Return what each part of the better recipe brings: the change of log perplexity above dense."""
    dense = number("f50", "dense", _PERPLEXITY, 0.0) or math.nan
    values = {name: number(run, method, _PERPLEXITY, 0.5) or math.nan for name, (run, method) in _PARTS.items()}
    published = math.log(values["the paper's"] / dense)
    gaps = {name: round(100 * (math.log(value / dense) / published - 1)) for name, value in values.items()}
    rows = [(name, f"{value:.2f}", f"{gaps[name]} %" if gaps[name] else "0 %") for name, value in values.items()]
    rows[-1] = (*rows[-1][:2], "")
    return Table(header=("recipe", "perplexity", "of the published gap"), rows=tuple(rows))


def groups() -> Table:
    """Return perplexities over the size of groups; the last column is over the usual groups at the row's work."""
    rows = []
    for name, (run, method) in _SIZES.items():
        calibrated, adapted = (number(run, method, _PERPLEXITY, 0.5, lora=lora) for lora in (False, True))
        work = number(run, method, _WORK, 0.5, lora=True)
        if calibrated is None or adapted is None or work is None:
            raise ValueError(f"{method} of {run} was not measured")
        over = "1" if method == "wide" else f"{adapted / _at_work(work):.2f}x"
        rows.append((name, f"{calibrated:.4g}" if calibrated > 100 else f"{calibrated:.2f}", _short(adapted), over))
    header = ("FFN / attention group", "perplexity", "with LoRA", "with LoRA, at equal work")
    return Table(header=header, rows=tuple(rows))


def _short(value: float) -> str:
    return f"{value:.1f}" if value > 100 else f"{value:.2f}"


def _at_work(work: float) -> float:
    """Return the perplexity of the usual groups with LoRA at a share of the work, between two targets of the sweep."""
    points = []
    for target in (0.1, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7):
        run = _SWEEP.get(target, "q-sweep")
        found = [number(run, "wide", metric, target, lora=True) for metric in (_WORK, _PERPLEXITY)]
        share, perplexity = found
        if share is None or perplexity is None:
            raise ValueError(f"{run} was not measured at {target}")
        points.append((share, math.log(perplexity)))
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= work <= right:
            return math.exp(low + (high - low) * (work - left) / (right - left))
    raise ValueError(f"a work of {work} lies outside of the sweep")


def targets(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of targets."""
    rows: list[dict[str, Any]] = json.loads((TARGETS / f"{name}.json").read_text(encoding="utf-8"))
    return rows


def speed() -> Table:
    """Return what a user gets through the public API."""
    shown = [row for row in targets("user") if row.get("shown") and row.get("ours") is not None]
    rows = tuple((row["shown"], *(_with_unit(row.get(key), row["unit_shown"]) for key in _SPEED)) for row in shown)
    return Table(header=("", *_SPEED.values()), rows=rows)


_SPEED = {"as_loaded": "dense, as loaded", "dense": "dense, same engine", "ours": "after `wide.optimize`"}


def aims(name: str) -> Table:
    """Return the rows of a file of targets: what was reached, and what was to be."""
    keys = ("value", "floor", "goal")
    rows = tuple((row["what"], *(_with_unit(row[key], row["unit"]) for key in keys)) for row in targets(name))
    return Table(header=("what", "today", "floor", "goal"), rows=rows)


def training() -> Table:
    """Return what steps of training take."""
    rows = tuple((row["what"], _with_unit(row["value"], row["unit"])) for row in targets("scale"))
    return Table(header=("what", "measured"), rows=rows)


def columns() -> Table:
    """Return what kernels in each language gain over dense."""
    rows = tuple(
        (
            f"{row['operator'].removesuffix(', over CUDA C++')}, {row['size']}",
            *_of_languages(row, _LANGUAGES),
        )
        for row in targets("columns")
        # Of few rows pages have other tables.
        if row["share"] == 0.5 and int(row["size"].split(" ")[0]) not in (16, 64, 256, 1024)
    )
    return Table(header=("operator, half skipped", *_LANGUAGES.values()), rows=rows)


def columns_drawn(_source: object = None) -> list[dict[str, Any]]:
    """Return what `columns.svg` shows: each operator by its size at half skipped, and by the share that is skipped."""
    rows = []
    for row in targets("columns"):
        if row["operator"].endswith("over CUDA C++"):
            continue
        size, share = row["size"].split(" ")[0], f"{row['share']:.0%}"
        is_product = row["size"].endswith(("row", "rows"))
        places = [(row["operator"], size)] if is_product and row["share"] == 0.5 else []
        if not is_product or size == "4096":
            places.append((f"{row['operator']}, {row['size']}", share))
        for panel, place in places:
            for key, name in _LANGUAGES.items():
                found = {"operator": panel, "place": place, "language": name, "speed-up": row["languages"].get(key)}
                rows.append(found | {"order": (row["share"], int(size))})
    return sorted(rows, key=lambda row: row["order"])


COLUMNS = Figure(
    name="columns",
    title="Languages side by side",
    rows=columns_drawn,
    x="place",
    y="speed-up",
    by="language",
    panel="operator",
    x_label="rows, half skipped; or the share that random masks skip",
    y_label="speed-up over cuBLAS or cuDNN",
    even=True,
    line_at=1.0,
    columns=3,
    height=2.0,
)


# What was timed of the larger public model's rows, with the tokens of its prompt or its requests -> its name.
_REGIMES = {
    ("first token", 4096): "prompt 4096: first token",
    ("token", 4096): "a token",
    ("first token", 16384): "prompt 16384: first token",
    ("token", 16384): "a token",
    ("requests", 1): "1 request",
    **{("requests", size): f"{size}" for size in (8, 32, 64)},
}
_TRAINED = ("wide", "ddp", "tyr", "shortened-taylor")
# Of the scores: all rows have LoRA. The seed of ours that is nearest to what was timed.
_TIMED_SEEDS = {"first token": 18, "token": 18, "requests": 17}
# Of `wide profile`, whose step counts half of the new tokens.
_KINDS = {"first_tokens": ("first token", 0), "records": ("token", 32), "batched": ("requests", 0)}
Regime = tuple[str, int]


@cache
def speeds() -> tuple[dict[Regime, float], dict[Regime, dict[str, float]]]:
    """Return the dense model's median over runs, ms or tokens/s, and the speed-ups of rows over that of their run.

    Of several runs of a row the last one counts, for both.
    """
    dense: dict[Regime, dict[str, float]] = {regime: {} for regime in _REGIMES}
    ratios: dict[Regime, dict[str, float]] = {regime: {} for regime in _REGIMES}
    for content in _lines(ROOT / "docs/results/qwen2.5-coder-1.5b/profiles.jsonl.gz"):
        for kind, (what, further) in _KINDS.items():
            for record in content.get(kind, ()) if "H200" in content["device"] else ():
                regime = (what, record["requests"] if what == "requests" else record["tokens"] - further)
                if regime not in ratios or record["what"] == "prefill" or record["candidate"] == "as loaded":
                    continue
                if record["candidate"] == "dense":
                    took = record["tokens_per_s"] if what == "requests" else record["median_us"] / 1000
                    dense[regime][content["method"]] = took
                else:
                    ratios[regime][content["method"]] = record["speedup"]
    return {regime: statistics.median(found.values()) for regime, found in dense.items()}, ratios


def _lines(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _rated(method: str, what: str) -> tuple[Selection, Any]:
    """Return the records of a row of the larger public model, and its stage with LoRA."""
    others = {"wide": ("shipped", "wide-fitted", 0.5, _TIMED_SEEDS[what]), "dense": ("dense-longer", "dense", 0.0, 17)}
    run, name, target, seed = others.get(method, ("half-lora", method, 0.5, 17))
    return study("qwen2.5-coder-1.5b")[run], Stage(Cell(name, target, seed), recovered=True)


def _timed_name(method: str) -> str:
    return "WIDE, `fitted-50`" if method == "wide" else _METHODS[method]


def beside() -> Table:
    """Return quality with LoRA beside speed of the larger public model's rows: the dense one's times, and speed-ups."""
    dense, ratios = speeds()
    times = [f"{value:.3g} ms" if what != "requests" else f"{value:,.0f} tok/s" for (what, _), value in dense.items()]
    rows = [(_METHODS["dense"], *_scores(*_rated("dense", "token")), *times)]
    for method in _TRAINED:
        cells = [f"{found[method]:.2f}x" if method in found else "-" for found in ratios.values()]
        rows.append((_timed_name(method), *_scores(*_rated(method, "token")), *cells))
    return Table(header=("", "word perplexity", "accuracy, %", *_REGIMES.values()), rows=tuple(rows))


def beside_drawn(regimes: dict[Regime, str]) -> list[dict[str, Any]]:
    """Return accuracy and perplexity of each row by how much faster than the dense model it is in these regimes."""
    rows = []
    for metric, name, scale in (("accuracy.average", "accuracy %", 100), ("word_perplexity", "perplexity", 1)):
        for regime, title in regimes.items():
            ratios = {"dense": 1.0, **speeds()[1][regime]}
            for method in ("dense", *_TRAINED):
                records, stage = _rated(method, regime[0])
                height = scale * (records.number(stage, metric) or math.nan)
                drawn = {"panel": f"{name}: {title}", "row": _timed_name(method).replace("`", "")}
                rows.append(drawn | {"speed-up": ratios.get(method, math.nan), "height": height})
    return rows


def _beside(name: str, regimes: dict[Regime, str]) -> Figure:
    return Figure(
        name=name,
        title="Quality beside speed",
        rows=lambda _: beside_drawn(regimes),
        x="speed-up",
        y="height",
        by="row",
        panel="panel",
        x_label="measured speed-up over the dense model in the same engine",
        log="wide",
        columns=len(regimes),
        height=2.4,
    )


FIGURES = (
    COLUMNS,
    replace(
        next(figure for figure in SPEED_FIGURES if figure.name == "parts"),
        name="breakdown",
        rows=lambda _: read_profile(ROOT / "docs/results/h200").parts(),
    ),
    _beside(
        "beside-one",
        {
            (what, size): f"{'prompt' if what == 'first token' else 'token'} {size // 1024}k"
            for size in (4096, 16384)
            for what in ("first token", "token")
        },
    ),
    _beside("beside-many", {("requests", size): f"{size} at once" for size in (1, 8, 32, 64)}),
)


def draw_figures() -> None:
    """Draw `FIGURES` beside the other pictures of the pages."""
    for figure in FIGURES:
        with style(), replacing(ROOT / f"docs/images/{figure.name}.svg") as unfinished:
            draw(figure, figure.table(None), None).savefig(unfinished, format="svg", metadata={"Date": None})


_LANGUAGES = {"triton": "Triton", "cuda": "CUDA C++", "tilelang": "TileLang", "cute": "CuTe"}


def _of_languages(row: dict[str, Any], names: dict[str, str]) -> list[str]:
    values = [row["languages"].get(key) for key in names]
    return ["-" if value is None else f"{value:.2f}" for value in values]


# Other columns show what these would.
_CARDS_LEFT_OUT = ("4 x 40", "4 x 80", "4 x 141", "8 x 80", "8 x 141")


def sizes() -> Table:
    """Return what models of several sizes need of cards, in GiB, as it was calculated."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in json.loads((TARGETS.parent / "sizes.json").read_text(encoding="utf-8")):
        cells = found.setdefault((row["model"], row["stage"]), {"tokens/s": "-"})
        marks = f"{'r' * (row['way'] == 'recomputed')}{'s' * row['sharded']}"
        if (cards := f"{row['gpus']} x {row['card']}") not in _CARDS_LEFT_OUT:
            cells[cards] = "-" if row["gib"] is None else f"{row['gib']:.0f} {marks}".strip()
        if row["tokens_per_second"] is not None:
            # Of the largest card that was looked at.
            cells["tokens/s"] = f"{row['tokens_per_second']:,}"
    header = ("model", "stage", *next(iter(found.values())))
    return Table(header=header, rows=tuple((*key, *cells.values()) for key, cells in found.items()))


def _with_unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,g}{f' {unit}' if unit not in ('', 'ratio') else ''}"


TABLES: dict[str, Callable[[], Table]] = {
    "quality-full": quality,
    "quality-parts": parts,
    "quality-groups": groups,
    "quality-real": partial(real, "half"),
    "quality-real-longer": partial(real, "longer", bare=False),
    "quality-real-columns": real_columns,
    "quality-real-family": partial(real, "family"),
    "quality-real-short": real_short,
    "quality-real-larger": partial(real, "larger"),
    "quality-real-seeds": real_seeds,
    "quality-speed": beside,
    "eight-bits-real": eight_bits,
    "speed": speed,
    "columns": columns,
    "house": lambda: aims("house"),
    "people": lambda: aims("people"),
    "training": training,
    "training-sizes": sizes,
}
"""Name of a marker -> its table."""


def pages() -> Iterator[Path]:
    """Yield the pages that may hold tables."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def rendered(text: str) -> str:
    """Return a page with its tables made again.

    Raises:
        KeyError: If it names a table that there is not.
    """

    def table(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise KeyError(f"there is no table {found[2]!r}; there are {', '.join(TABLES)}")
        return f"{found[1]}{TABLES[found[2]]().to_markdown()}\n{found[3]}"

    return _MARKED.sub(table, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables of all pages, or say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where a page is stale")
    options = parser.parse_args(arguments)
    stale = [(page, new) for page in pages() if (new := rendered(text := page.read_text(encoding="utf-8"))) != text]
    for page, new in stale:
        sys.stdout.write(f"{'stale' if options.check else 'written'}  {page.relative_to(ROOT)}\n")
        if not options.check:
            page.write_text(new, encoding="utf-8")
    if not options.check:
        draw_figures()
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
