"""What docs/results/lab-88m.md says of seeds, of half of the work and of measured speed is what was measured."""

import json
import math
import statistics
from pathlib import Path

import pytest

from wide.report.comparison import PERPLEXITY, Row
from wide.report.comparison_page import read_comparison

DOCS = Path(__file__).parents[2] / "docs"
LAB = DOCS / "results/lab-88m"
PAGE = (DOCS / "results/lab-88m.md").read_text()
GRIDS = {
    name: read_comparison(LAB / name / "compare.jsonl")
    for name in ("n50", "n50-fitted", "f50", "f50-fitted", "seeds", "seeds-fitted")
}
WORD, WORK = "word_perplexity", "sparsity.linear_flops_layers"
NAMES = {
    "dense": "dense",
    "**WIDE, G = 128, `fitted-50`**": "wide-fitted",
    "**WIDE, G = 128, as published**": "wide",
    "**WIDE-uniform, G = 128**": "wide-uniform",
    "Týr (scaled, below)": "tyr",
    "DDP": "ddp",
    "SliceGPT": "slicegpt",
    "SkipGPT (as the WIDE paper runs it)": "skipgpt",
}
SEEDS = (17, 18, 19)
SHAPES = (("prefill", 1), ("prefill", 64), ("decode", 1), ("decode", 64))


def section(title):
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def table(title):
    lines = [line for line in section(title).splitlines() if line.startswith("|")][2:]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}


def number(grid, method, metric, *, seed=17, recovered=False):
    subject = f"{method}/{0 if method == 'dense' else 0.5}/{seed}/{'recovered' if recovered else 'calibrated'}"
    return GRIDS[grid].run.number(subject, metric)


def of_seeds(method, metric, *, recovered=False):
    fitted = "-fitted" if method == "wide-fitted" else ""
    grids = [f"n50{fitted}", f"seeds{fitted}", f"seeds{fitted}"]
    found = [number(g, method, metric, seed=s, recovered=recovered) for g, s in zip(grids, SEEDS, strict=True)]
    return [value for value in found if value is not None]


def spread(values, digits):
    if len(values) == 1:
        return f"{values[0]:.{digits}f} (1 seed)"
    few = " (2 seeds)" if len(values) == 2 else ""
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}{few}"


def gap(value, dense):
    return math.log(value / dense)


def test_the_table_of_seeds_is_that_of_the_records():
    for name, cells in table("Three seeds").items():
        method = NAMES[name]
        wanted = [f"{value:.2f}" for value in of_seeds(method, PERPLEXITY)]
        for metric, digits in ((PERPLEXITY, 2), (WORD, 1)):
            wanted += [spread(of_seeds(method, metric, recovered=r), digits) for r in (False, True)]
        work = [[100 * value for value in of_seeds(method, WORK, recovered=r)] for r in (False, True)]
        wanted += [f"{statistics.fmean(shares):.1f}{' (1 seed)' * (len(shares) == 1)}" for shares in work]
        assert cells == wanted, name


def test_the_order_of_methods_is_that_of_every_seed():
    for recovered, methods in (
        (False, ("wide-fitted", "wide", "ddp", "slicegpt")),
        (True, ("wide", "ddp", "slicegpt")),
    ):
        # SliceGPT with LoRA has no seed 17.
        columns = [of_seeds(method, PERPLEXITY, recovered=recovered)[-2:] for method in methods]
        assert all(list(row) == sorted(row) for row in zip(*columns, strict=True))


def test_what_the_better_recipe_takes_away_of_the_gap_is_worked_out_from_the_records():
    said = section("Three seeds")
    for metric, digits in ((PERPLEXITY, 1), (WORD, 1)):
        dense = number("n50", "dense", metric)
        pairs = zip(of_seeds("wide", metric), of_seeds("wide-fitted", metric), strict=True)
        gaps = [(gap(published, dense), gap(better, dense)) for published, better in pairs]
        shares = [100 * (1 - better / published) for published, better in gaps]
        assert f"{statistics.fmean(shares):.{digits}f} ± {statistics.stdev(shares):.{digits}f} %" in said
        if metric == PERPLEXITY:
            for (published, better), share in zip(gaps, shares, strict=True):
                assert f"from {published:.3f} to {better:.3f} (-{share:.1f} %)" in " ".join(said.split())
        found = [number(g, m, metric, recovered=True) for g, m in (("n50", "wide"), ("n50-fitted", "wide-fitted"))]
        published, better = (gap(value, number("n50", "dense", metric, recovered=True)) for value in found)
        assert f"-{100 * (1 - better / published):.1f} %" in said


def half_of_the_work(method):
    grid = "f50-fitted" if method == "wide-fitted" else "f50"
    both = (False, True)

    def pair(metric, *, scale=1.0):
        values = [scale * number(grid, method, metric, recovered=recovered) for recovered in both]
        return [f"{value:.{1 if value < 1000 else 0}f}" for value in values]

    found = [GRIDS[grid].value(Row(method, r), 0.0 if method == "dense" else 0.5, PERPLEXITY) for r in both]
    digits = [2 if value.mean < 100 else 1 for value in found]
    cells = [f"{v.mean:.{d}f} ± {v.error:.{d}f}" for v, d in zip(found, digits, strict=True)] + pair(WORD)
    shares = zip(*(pair(f"sparsity.{half}", scale=100) for half in ("attention", "ffn")), strict=True)
    cells += ["-", "-", "0", "0"] if method == "dense" else [*map(" / ".join, shares), *pair(WORK, scale=100)]
    cells.append(f"{100 * number(grid, method, 'sparsity.kv_cache_kept'):.0f}")
    seconds = [number(grid, method, "method.seconds", recovered=recovered) for recovered in both]
    return cells + [f"{value:.1f}" if 1 < value < 10 else f"{value:.0f}" for value in seconds]


def test_the_table_of_half_of_the_work_is_that_of_the_records():
    rows = table("Half of the work")
    assert {NAMES[name]: cells for name, cells in rows.items()} == {
        NAMES[name]: half_of_the_work(NAMES[name]) for name in NAMES
    }


def speeds(grid, method, *, seed=17):
    folder = LAB / grid / "cells" / f"{method}-0.5-seed{seed}" / "profile"
    records = json.loads((folder / "endtoend.json").read_text())["records"]
    found = {(r["what"], r["batch"], r["candidate"]): r for r in records}
    own = "own routing" if ("prefill", 1, "own routing") in found else "pruned"
    return [found[*shape, own]["speedup"] for shape in SHAPES], [found[*shape, "dense"] for shape in SHAPES]


def test_measured_speeds_are_those_of_the_records():
    said = table("Measured speed")
    better = [
        speeds("n50-fitted", "wide-fitted")[0],
        *(speeds("seeds-fitted", "wide-fitted", seed=s)[0] for s in (18, 19)),
    ]
    ranges = [sorted({f"{value:.2f}x" for value in column}) for column in zip(*better, strict=True)]
    assert said.pop("**WIDE, `fitted-50`, 50 % nominal, three seeds**") == [" to ".join(values) for values in ranges]
    for name, peer in (("dense, wide's runtime", "wide"), ("dense, Hugging Face in a CUDA graph", "tyr")):
        measured = [entry["median_us"] / 1e3 for entry in speeds("f50", peer)[1]]
        assert [float(cell.removesuffix(" ms")) for cell in said.pop(name)] == pytest.approx(measured, rel=0.01)
    methods = {name.partition(" (")[0]: method for name, method in NAMES.items()}
    assert said == {name: [f"{value:.2f}x" for value in speeds("f50", methods[name])[0]] for name in said}
    assert {methods[name] for name in said} == set(NAMES.values()) - {"dense", "wide-fitted"}
