"""What docs/results/lab-88m.md says of a quarter, of seeds, of half of the work and of speed is what was measured."""

import json
import math
import statistics
from pathlib import Path

import pytest

from wide.report.bootstrap import ratio_error
from wide.report.comparison import DENSE, PERPLEXITY, Row
from wide.report.comparison_page import read_comparison

DOCS = Path(__file__).parents[2] / "docs"
LAB = DOCS / "results/lab-88m"
PAGE = (DOCS / "results/lab-88m.md").read_text()
GRIDS = {
    name: read_comparison(LAB / name / "compare.jsonl")
    for name in ("n25", "n25-fitted", "n50", "n50-fitted", "f50", "f50-fitted", "seeds", "seeds-fitted")
}
EARLIER = "seeds-fitted-earlier"
GRIDS[EARLIER] = read_comparison(LAB / EARLIER / "compare.jsonl")
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
QUARTER = {
    "dense": "dense",
    "**WIDE, G = 128, `fitted-50`**": "wide-fitted",
    "**WIDE, G = 32**": "wide-32",
    "**WIDE, G = 64**": "wide-64",
    "**WIDE, G = 128**": "wide",
    "**WIDE-uniform, G = 128**": "wide-uniform",
    "Týr (scaled, below)": "tyr",
    "DDP": "ddp",
    "SliceGPT": "slicegpt",
    "BlockPruner": "blockpruner",
    "CoopPruner": "cooppruner",
    "D-LLM, original form": "dllm-original",
    "Shortened, perplexity": "shortened-ppl",
    "Shortened, Taylor": "shortened-taylor",
    "SkipGPT, original form": "skipgpt-original",
    "SkipGPT (as the WIDE paper runs it)": "skipgpt",
    "D-LLM (layer skip)": "dllm",
}
BOTH = (False, True)
SEEDS = (17, 18, 19)
SHAPES = (("prefill", 1), ("prefill", 64), ("decode", 1), ("decode", 64))


def section(title):
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def tables(title):
    parts = [part for part in section(title).split("\n\n") if part.startswith("|")]
    lines = [[line.strip("|").split("|") for line in part.splitlines()[2:]] for part in parts]
    return [{row[0].strip(): [cell.strip() for cell in row[1:]] for row in part} for part in lines]


def table(title):
    (found,) = tables(title)
    return found


def subject(grid, method, *, seed=17, recovered=False):
    target = 0 if method == "dense" else 0.25 if grid.startswith("n25") else 0.5
    return f"{method}/{target}/{seed}/{'recovered' if recovered else 'calibrated'}"


def number(grid, method, metric, *, seed=17, recovered=False):
    return GRIDS[grid].run.number(subject(grid, method, seed=seed, recovered=recovered), metric)


def times(one, other):
    """Return the perplexity of one model over another's, and its error over windows that both share."""
    found = []
    for grid, method, options in (one, other):
        text = GRIDS[grid].run.text(subject(grid, method, **options), f"{PERPLEXITY}.windows")
        found.append((number(grid, method, PERPLEXITY, **options), json.loads(text)))
    (value, windows), (reference, shared) = found
    return value / reference, ratio_error(windows, shared)


def of_seeds(method, metric, *, recovered=False, fitted_grid="seeds-fitted"):
    fitted = method == "wide-fitted"
    grids = ["n50-fitted", fitted_grid, fitted_grid] if fitted else ["n50", "seeds", "seeds"]
    # Of a model that was trained and not evaluated there are the shares on the calibration text only.
    evaluated = (
        (grid, seed)
        for grid, seed in zip(grids, SEEDS, strict=True)
        if number(grid, method, PERPLEXITY, seed=seed, recovered=recovered) is not None
    )
    return [number(grid, method, metric, seed=seed, recovered=recovered) for grid, seed in evaluated]


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
        wanted += [f"{statistics.fmean(shares):.1f}{' (2 seeds)' * (len(shares) == 2)}" for shares in work]
        assert cells == wanted, name


def test_the_order_of_methods_is_that_of_every_seed():
    for recovered, methods in (
        (False, ("wide-fitted", "wide", "ddp", "slicegpt")),
        (True, ("wide", "ddp", "slicegpt")),
    ):
        # SliceGPT with LoRA has no seed 17.
        columns = [of_seeds(method, PERPLEXITY, recovered=recovered)[-2:] for method in methods]
        assert all(list(row) == sorted(row) for row in zip(*columns, strict=True))


def shares_of_the_gap(metric, fitted_grid):
    dense = number("n50", "dense", metric)
    pairs = zip(of_seeds("wide", metric), of_seeds("wide-fitted", metric, fitted_grid=fitted_grid), strict=True)
    gaps = [(gap(published, dense), gap(better, dense)) for published, better in pairs]
    return gaps, [100 * (1 - better / published) for published, better in gaps]


def test_what_the_better_recipe_takes_away_of_the_gap_is_worked_out_from_the_records():
    said = " ".join(section("Three seeds").split())
    for metric in (PERPLEXITY, WORD):
        for grid in ("seeds-fitted", EARLIER):
            _, shares = shares_of_the_gap(metric, grid)
            assert f"{statistics.fmean(shares):.1f} ± {statistics.stdev(shares):.1f} %" in said
    gaps, shares = shares_of_the_gap(PERPLEXITY, "seeds-fitted")
    for (published, better), share in zip(gaps, shares, strict=True):
        assert f"from {published:.3f} to {better:.3f} (-{share:.1f} %)" in said
    assert f"{min(shares):.1f} % in the worst of three seeds" in said
    assert f"({min(shares_of_the_gap(PERPLEXITY, EARLIER)[1]):.1f} % in the worst seed)" in said


def test_the_two_runs_of_the_better_recipe_are_those_of_the_records():
    said = " ".join(section("Three seeds").split())
    runs = [of_seeds("wide-fitted", PERPLEXITY, fitted_grid=grid)[1:] for grid in ("seeds-fitted", EARLIER)]
    (now, before) = ([f"{value:.2f}" for value in values] for values in runs)
    assert f"{now[0]} and {now[1]} in the table, {before[0]} and {before[1]} in" in said
    apart = [100 * abs(gap(value, other)) for value, other in zip(*runs, strict=True)]
    assert f"here that is {apart[0]:.1f} and {apart[1]:.1f} % of the perplexity" in said


def test_the_gap_with_lora_is_worked_out_from_the_records():
    said = " ".join(section("Three seeds").split())
    fell, words = [], []
    for seed, grids in ((17, ("n50", "n50-fitted")), (19, ("seeds", "seeds-fitted"))):
        for metric, kept in ((PERPLEXITY, fell), (WORD, words)):
            dense = number("n50", "dense", metric, recovered=True)
            methods = zip(grids, ("wide", "wide-fitted"), strict=True)
            found = [number(grid, method, metric, seed=seed, recovered=True) for grid, method in methods]
            published, better = (gap(value, dense) for value in found)
            kept.append((f"{published:.3f} to {better:.3f}", f"-{100 * (1 - better / published):.1f} %"))
    assert f"from {fell[0][0]} ({fell[0][1]}) for seed 17 and from {fell[1][0]} ({fell[1][1]}) for seed 19" in said
    assert f"On WikiText-2 by word: {words[0][1]} and {words[1][1]}." in said
    peer = ("n50", "tyr", {"recovered": True})
    ratios = [
        times((grid, "wide-fitted", {"seed": seed, "recovered": True}), peer)
        for grid, seed in (("n50-fitted", 17), ("seeds-fitted", 19))
    ]
    assert " and ".join(f"{value:.3f} ± {error:.3f}" for value, error in ratios) in said


def quarter_grid(method):
    return "n25-fitted" if method == "wide-fitted" else "n25"


def cell(value, error=None):
    if value is None:
        return "-"
    digits = 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def test_the_perplexities_at_a_quarter_are_those_of_the_records():
    rows, _ = tables("25 % nominal, LoRA of equal length")
    order = [number(quarter_grid(method), method, PERPLEXITY) for method in QUARTER.values()]
    assert (list(rows), order) == (list(QUARTER), sorted(order))
    for name, method in QUARTER.items():
        grid = quarter_grid(method)
        found = [GRIDS[grid].value(Row(method, recovered), 0.25, PERPLEXITY) for recovered in BOTH]
        wanted = [cell(value.mean, value.error) if value else "-" for value in found]
        for recovered, value in zip(BOTH, found, strict=True):
            options = {"recovered": recovered}
            if method == DENSE:
                wanted.append("1")
                continue
            if not value:
                wanted.append("-")
                continue
            ratio, error = times((grid, method, options), (grid, DENSE, options))
            digits = 3 if ratio < 2.5 else 2 if ratio < 10 else 1
            wanted.append(f"{ratio:.{digits}f} ± {error:.{digits}f}")
        words = [number(grid, method, WORD, recovered=recovered) for recovered in BOTH]
        wanted += ["-" if word is None else f"{word:.{1 if word < 1000 else 0}f}" for word in words]
        assert rows[name] == wanted, name


def test_what_rows_at_a_quarter_leave_out_is_that_of_the_records():
    _, rows = tables("25 % nominal, LoRA of equal length")
    assert list(rows) == list(QUARTER)[1:]
    for name, cells in rows.items():
        method = QUARTER[name]
        grid = quarter_grid(method)

        def shares(metric, method=method, grid=grid):
            evaluated = [number(grid, method, PERPLEXITY, recovered=recovered) for recovered in BOTH]
            found = [number(grid, method, metric, recovered=recovered) for recovered in BOTH]
            return [None if text is None else value for text, value in zip(evaluated, found, strict=True)]

        halves = zip(shares("sparsity.attention"), shares("sparsity.ffn"), strict=True)
        wanted = ["-" if a is None else f"{100 * a:.1f} / {100 * f:.1f}" for a, f in halves]
        wanted += ["-" if share is None else f"{100 * share:.1f}" for share in shares(WORK)]
        wanted.append(f"{100 * shares('sparsity.kv_cache_kept')[0]:.0f}")
        seconds = shares("method.seconds")
        wanted += ["-" if s is None else f"{s:.1f}" if s < 10 else f"{s:.0f}" for s in seconds]
        assert cells == wanted, name


@pytest.mark.parametrize(
    ("one", "other", "recovered", "said"),
    [
        *((m, "tyr", True, "{above} %") for m in ("wide-32", "wide-64", "wide", "wide-uniform")),
        *((m, "tyr", False, "{below} %") for m in ("wide", "wide-32", "wide-fitted")),
        ("wide-uniform", "tyr", False, "({times} times)"),
        ("wide-uniform", "ddp", False, "({times} times)"),
        ("wide-uniform", "ddp", True, "({times} times: they cannot be told apart)"),
        ("wide", "ddp", True, "G = 128 is {below} % ahead of DDP"),
        ("wide-fitted", "wide", False, "the row is {below} % below it"),
        ("wide-fitted", "dense", False, "31.33 against 31.13 ({times} times)"),
    ],
)
def test_rows_at_a_quarter_are_apart_as_the_page_says(one, other, recovered, said):
    options = {"recovered": recovered}
    ratio, error = times((quarter_grid(one), one, options), ("n25", other, options))
    figures = {
        "times": f"{ratio:.3f} ± {error:.3f}",
        "above": f"{100 * (ratio - 1):.1f} ± {100 * error:.1f}",
        "below": f"{100 * (1 - ratio):.1f} ± {100 * error:.1f}",
    }
    assert said.format(**figures) in " ".join(section("25 % nominal, LoRA of equal length").split())


def test_what_the_better_recipe_does_at_a_quarter_is_worked_out_from_the_records():
    said = " ".join(section("25 % nominal, LoRA of equal length").split())
    for metric, words in ((PERPLEXITY, "of its gap in log perplexity {} % are gone"), (WORD, "{} % smaller than the")):
        dense, published, better = (number(quarter_grid(m), m, metric) for m in ("dense", "wide", "wide-fitted"))
        assert words.format(f"{100 * (1 - gap(better, dense) / gap(published, dense)):.0f}") in said
    work, nominal = (100 * number("n25-fitted", "wide-fitted", metric) for metric in (WORK, "sparsity.mean"))
    assert f"at {work:.1f} % of the work ({nominal:.1f} % nominal)" in said


def half_of_the_work(method):
    grid = "f50-fitted" if method == "wide-fitted" else "f50"

    def pair(metric, *, scale=1.0):
        values = [scale * number(grid, method, metric, recovered=recovered) for recovered in BOTH]
        return [f"{value:.{1 if value < 1000 else 0}f}" for value in values]

    found = [GRIDS[grid].value(Row(method, r), 0.0 if method == "dense" else 0.5, PERPLEXITY) for r in BOTH]
    digits = [2 if value.mean < 100 else 1 for value in found]
    cells = [f"{v.mean:.{d}f} ± {v.error:.{d}f}" for v, d in zip(found, digits, strict=True)] + pair(WORD)
    shares = zip(*(pair(f"sparsity.{half}", scale=100) for half in ("attention", "ffn")), strict=True)
    cells += ["-", "-", "0", "0"] if method == "dense" else [*map(" / ".join, shares), *pair(WORK, scale=100)]
    cells.append(f"{100 * number(grid, method, 'sparsity.kv_cache_kept'):.0f}")
    seconds = [number(grid, method, "method.seconds", recovered=recovered) for recovered in BOTH]
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
        *(speeds(EARLIER, "wide-fitted", seed=s)[0] for s in (18, 19)),
    ]
    ranges = [sorted({f"{value:.2f}x" for value in column}) for column in zip(*better, strict=True)]
    assert said.pop("**WIDE, `fitted-50`, 50 % nominal, three seeds**") == [" to ".join(values) for values in ranges]
    for name, peer in (("dense, wide's runtime", "wide"), ("dense, Hugging Face in a CUDA graph", "tyr")):
        measured = [entry["median_us"] / 1e3 for entry in speeds("f50", peer)[1]]
        assert [float(cell.removesuffix(" ms")) for cell in said.pop(name)] == pytest.approx(measured, rel=0.01)
    methods = {name.partition(" (")[0]: method for name, method in NAMES.items()}
    assert said == {name: [f"{value:.2f}x" for value in speeds("f50", methods[name])[0]] for name in said}
    assert {methods[name] for name in said} == set(NAMES.values()) - {"dense", "wide-fitted"}
