"""What docs/results/lab-88m.md says of quarters, halves, sweeps, seeds, equal tokens and speed is what was measured."""

import itertools
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
EARLIER = "seeds-fitted-earlier"
GRIDS = {path.parent.name: read_comparison(path) for path in LAB.glob("*/compare.jsonl")}
WORD, WORK, SCORE = "word_perplexity", "sparsity.linear_flops_layers", "accuracy.average"
ALL = {
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
FEW = ("dense", "wide-fitted", "wide-uniform", "tyr", "ddp", "slicegpt", "skipgpt")
NAMES = {name: method for name, method in ALL.items() if method in FEW} | {"**WIDE, G = 128, as published**": "wide"}
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


def subject(grid, method, *, seed=17, recovered=False, target=None):
    usual = 0 if method == "dense" else 0.25 if grid.startswith("n25") else 0.5
    return f"{method}/{usual if target is None else target}/{seed}/{'recovered' if recovered else 'calibrated'}"


def number(grid, method, metric, **options):
    return GRIDS[grid].run.number(subject(grid, method, **options), metric)


def times(one, other):
    """Return the perplexity of one model over another's, and its error over windows that both share."""
    found = []
    for grid, method, options in (one, other):
        text = GRIDS[grid].run.text(subject(grid, method, **options), f"{PERPLEXITY}.windows")
        found.append((number(grid, method, PERPLEXITY, **options), json.loads(text)))
    (value, windows), (reference, shared) = found
    return value / reference, ratio_error(windows, shared)


# Of seeds 17, 18 and 19.
OF_SEEDS = {
    "wide-fitted": ("n50-fitted", "seeds-fitted-18", "seeds-fitted"),
    "tyr": ("n50", "seeds-tyr", "seeds-tyr"),
    "slicegpt": ("n50-rest", "seeds", "seeds"),
}


def of_seeds(method, metric, *, recovered=False, grids=None):
    # Of a model that was trained and not evaluated there are the shares on the calibration text only.
    evaluated = (
        (grid, seed)
        for grid, seed in zip(grids or OF_SEEDS.get(method, ("n50", "seeds", "seeds")), SEEDS, strict=True)
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
        (False, ("wide-fitted", "wide", "tyr", "ddp", "slicegpt")),
        (True, ("wide-fitted", "wide", "ddp", "slicegpt")),
    ):
        columns = [of_seeds(method, PERPLEXITY, recovered=recovered) for method in methods]
        assert all(list(row) == sorted(row) for row in zip(*columns, strict=True))


EARLIER_RUNS = ("n50-fitted", EARLIER, EARLIER)


def shares_of_the_gap(metric, *, grids=None, recovered=False):
    dense = number("n50", "dense", metric, recovered=recovered)
    better = of_seeds("wide-fitted", metric, recovered=recovered, grids=grids)
    pairs = zip(of_seeds("wide", metric, recovered=recovered), better, strict=True)
    gaps = [(gap(published, dense), gap(better, dense)) for published, better in pairs]
    return gaps, [100 * (1 - better / published) for published, better in gaps]


def test_what_the_better_recipe_takes_away_of_the_gap_is_worked_out_from_the_records():
    said = " ".join(section("Three seeds").split())
    for metric in (PERPLEXITY, WORD):
        for options in ({}, {"recovered": True}, {"grids": EARLIER_RUNS}):
            _, shares = shares_of_the_gap(metric, **options)
            assert f"{statistics.fmean(shares):.1f} ± {statistics.stdev(shares):.1f} %" in said
    for recovered in BOTH:
        gaps, shares = shares_of_the_gap(PERPLEXITY, recovered=recovered)
        for (published, better), share in zip(gaps, shares, strict=True):
            assert f"from {published:.3f} to {better:.3f} (-{share:.1f} %)" in said
        assert f"{min(shares):.1f} % in the worst of three seeds" in said
    assert f"({min(shares_of_the_gap(PERPLEXITY, grids=EARLIER_RUNS)[1]):.1f} % in the worst seed)" in said


def test_the_runs_of_the_better_recipe_are_those_of_the_records():
    said = " ".join(section("Three seeds").split())
    for seed, grids in ((18, ("seeds-fitted-18", "seeds-fitted", EARLIER)), (19, ("seeds-fitted", EARLIER))):
        found = [number(grid, "wide-fitted", PERPLEXITY, seed=seed) for grid in grids]
        table, *others = [f"{value:.2f}" for value in found]
        apart = f"{100 * gap(max(found), min(found)):.1f} % apart"
        assert f"seed {seed} {table} in the table, {' and '.join(others)} in" in said
        assert apart in said


def test_the_better_recipe_and_the_published_one_are_apart_from_tyr_as_the_page_says():
    said = " ".join(section("Three seeds").split())
    seeds = list(zip(SEEDS, OF_SEEDS["wide-fitted"], ("n50", "seeds", "seeds"), OF_SEEDS["tyr"], strict=True))
    for method, recovered in itertools.product(("wide-fitted", "wide"), BOTH):
        ratios = [
            times((better if method == "wide-fitted" else published, method, options), (peer, "tyr", options))
            for seed, better, published, peer in seeds
            for options in ({"seed": seed, "recovered": recovered},)
            if number(peer, "tyr", PERPLEXITY, **options) is not None
        ]
        told = [f"{value:.3f} ± {error:.3f}" for value, error in ratios]
        assert f"{', '.join(told[:-1])} and {told[-1]} times" in said, (method, recovered)


def quarter_grid(method):
    return "n25-fitted" if method == "wide-fitted" else "n25"


def half_grid(method):
    again = ("slicegpt", "cooppruner", "shortened-ppl", "shortened-taylor", "dllm-original")
    return "n50-fitted" if method == "wide-fitted" else "n50-rest" if method in again else "n50"


NOMINAL = [("25 % nominal, LoRA of equal length", quarter_grid), ("50 % nominal, LoRA of equal length", half_grid)]


def cell(value, error=None):
    if value is None:
        return "-"
    digits = 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def measured(grid, method, *, target=0.5, recovered=False):
    return GRIDS[grid].value(Row(method, recovered), 0.0 if method == DENSE else target, PERPLEXITY)


def over_dense(grid, method, options, partner):
    ratio, error = times((grid, method, options), (partner, DENSE, options))
    digits = 3 if ratio < 2.5 else 2 if ratio < 10 else 1
    return f"{ratio:.{digits}f} ± {error:.{digits}f}"


def word(grid, method, *, recovered):
    value = number(grid, method, WORD, recovered=recovered)
    return f"{value:.{1 if value < 1000 else 0}f}"


@pytest.mark.parametrize(("title", "grid_of"), NOMINAL)
def test_the_perplexities_of_all_methods_are_those_of_the_records(title, grid_of):
    rows, _ = tables(title)
    assert set(rows) == set(ALL)
    order = [number(grid_of(ALL[name]), ALL[name], PERPLEXITY) for name in rows]
    assert order == sorted(order)
    for name, method in ALL.items():
        grid = grid_of(method)
        found = [measured(grid, method, target=0.25 if grid_of is quarter_grid else 0.5, recovered=r) for r in BOTH]
        wanted = [cell(value.mean, value.error) for value in found]
        words = [word(grid, method, recovered=recovered) for recovered in BOTH]
        if grid_of is quarter_grid:
            wanted += ["1" if method == DENSE else over_dense(grid, method, {"recovered": r}, grid) for r in BOTH]
            wanted += words
        else:
            scores = [GRIDS[grid].value(Row(method, r), 0.0 if method == DENSE else 0.5, SCORE) for r in BOTH]
            wanted += words + [f"{100 * score.mean:.1f} ± {100 * score.error:.1f}" for score in scores]
        assert rows[name] == wanted, name


@pytest.mark.parametrize(("title", "grid_of"), NOMINAL)
def test_what_the_rows_leave_out_is_that_of_the_records(title, grid_of):
    perplexities, rows = tables(title)
    assert list(rows) == list(perplexities)[1:]
    for name, cells in rows.items():
        method = ALL[name]

        def both(metric, method=method):
            return [number(grid_of(method), method, metric, recovered=recovered) for recovered in BOTH]

        halves = zip(both("sparsity.attention"), both("sparsity.ffn"), strict=True)
        wanted = [f"{100 * attention:.1f} / {100 * ffn:.1f}" for attention, ffn in halves]
        wanted += [f"{100 * share:.1f}" for share in both(WORK)]
        wanted.append(f"{100 * both('sparsity.kv_cache_kept')[0]:.0f}")
        wanted += [f"{s:.1f}" if s < 10 else f"{s:.0f}" for s in both("method.seconds")]
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
        ("wide-fitted", "dense", False, "31.29 against 31.13 ({times} times)"),
        ("wide-fitted", "dense", True, "28.63 against 26.65 ({times} times)"),
        *(("wide-fitted", m, True, "{below} %") for m in ("tyr", "wide", "wide-32")),
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
    for metric, recovered, words in (
        (PERPLEXITY, False, "of its gap in log perplexity {} % are gone"),
        (WORD, False, "{} % smaller than the"),
        (PERPLEXITY, True, "{} % of the published recipe's gap"),
        (WORD, True, "and {} % on WikiText-2"),
    ):
        models = ("dense", "wide", "wide-fitted")
        dense, published, better = (number(quarter_grid(m), m, metric, recovered=recovered) for m in models)
        assert words.format(f"{100 * (1 - gap(better, dense) / gap(published, dense)):.0f}") in said
    work, nominal = (100 * number("n25-fitted", "wide-fitted", metric) for metric in (WORK, "sparsity.mean"))
    assert f"at {work:.1f} % of the work ({nominal:.1f} % nominal)" in said


SPARSITIES = (0.1, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7)
SWEPT = {"WIDE, G = 128": "wide", "WIDE, `fitted-50`": "wide-fitted", "DDP": "ddp", "SkipGPT": "skipgpt"}


def swept(method, target, metric, recovered):
    grid = {0.25: quarter_grid(method), 0.5: half_grid(method)}.get(target, "q-sweep")
    options = {"recovered": recovered, "target": target}
    if number(grid, method, PERPLEXITY, **options) is None:
        return None
    return measured(grid, method, **options) if metric == PERPLEXITY else number(grid, method, metric, **options)


def wide_over(method, target, recovered):
    """Return WIDE's perplexity where it does a row's work, over the row's, between two columns of the table."""
    peer, at = (swept(method, target, metric, recovered) for metric in (PERPLEXITY, WORK))
    works, values = ([swept("wide", t, metric, recovered) for t in SPARSITIES] for metric in (WORK, PERPLEXITY))
    points = [(work, math.log(value.mean)) for work, value in zip(works, values, strict=True)]
    for (left, low), (right, high) in itertools.pairwise(points):
        if peer and left <= at <= right:
            return f"{math.exp(low + (high - low) * (at - left) / (right - left)) / peer.mean:.2f}"
    return "-"


def test_the_tables_over_sparsity_are_those_of_the_records():
    perplexities, works, ratios = tables("Over sparsity")
    for (name, method), recovered in itertools.product(SWEPT.items(), BOTH):
        row = (f"**{name}**" if method.startswith("wide") else name) + ", with LoRA" * recovered
        values = [swept(method, target, PERPLEXITY, recovered) for target in SPARSITIES]
        assert perplexities.pop(row) == [cell(value.mean, value.error) if value else "-" for value in values]
        shares = [swept(method, target, WORK, recovered) for target in SPARSITIES]
        assert works.pop(row) == ["-" if share is None else f"{100 * share:.1f}" for share in shares]
    assert (perplexities, works) == ({}, {})
    for recovered, row in enumerate(ratios.values()):
        assert row == [wide_over("ddp", target, bool(recovered)) for target in SPARSITIES]
    of_tyr = [f"{wide_over('tyr', target, recovered)}x" for recovered in (True, False) for target in (0.25, 0.5)]
    told = "with LoRA, would be {} of it at 25 % and {} at 50 % (the same interpolation), without LoRA {} and {}."
    assert told.format(*of_tyr) in " ".join(section("Over sparsity").split())


def test_the_table_of_equal_tokens_is_that_of_the_records():
    for name, cells in table("Equal tokens").items():
        method, options = ALL[name], {"recovered": True}
        grid = "equal" if method in (DENSE, "slicegpt", "blockpruner") else half_grid(method)
        value, steps = measured(grid, method, recovered=True), "0 + 1300" if grid == "equal" else "1000 + 300"
        ratio = "1" if method == DENSE else over_dense(grid, method, options, "equal")
        assert cells == [steps, cell(value.mean, value.error), ratio, word(grid, method, recovered=True)], name
    said, longer = " ".join(section("Equal tokens").split()), {"recovered": True}
    for method, short in (("slicegpt", "n50-rest"), ("blockpruner", "n50")):
        told = [times((grid, method, longer), ("n50", "wide", longer)) for grid in (short, "equal")]
        assert " to ".join(f"{value:.3f} ± {error:.3f}" for value, error in told) + " times" in said


def test_sizes_of_groups_are_apart_as_the_page_says():
    said, value = " ".join(section(NOMINAL[1][0]).split()), measured("g-sweep", "f256-a192")
    ratios = [times(("g-sweep", "f256-a192", {}), ("n50", method, {})) for method in ("wide", "wide-64", "wide-32")]
    told = [f"{100 * (ratio - 1):.1f} ± {100 * error:.1f}" for ratio, error in ratios]
    assert f"have {cell(value.mean, value.error)} without LoRA, {told[0]} % above G = 128" in said
    assert f"{told[1]} % above G = 64 and {told[2]} % above G = 32" in said


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
