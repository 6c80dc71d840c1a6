"""What docs/results/lab-88m.md says of quarters, halves, sweeps, seeds, budgets and speed is what was measured."""

import itertools
import json
import math
import re
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest

from wide.config import StageConfig
from wide.method_config.static import CoopPrunerConfig, DDPConfig, ShortenedConfig, SliceGPTConfig, TyrConfig
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


def words_of(title):
    return " ".join(section(title).split())


def tables(title):
    parts = [part for part in section(title).split("\n\n") if part.startswith("|")]
    lines = [[line.strip("|").split("|") for line in part.splitlines()[2:]] for part in parts]
    return [{row[0].strip(): [cell.strip() for cell in row[1:]] for row in part} for part in lines]


def table(title):
    (found,) = tables(title)
    return found


def subject(grid, method, *, seed=17, recovered=False, target=None):
    usual = 0 if method == DENSE else 0.25 if "25" in grid else 0.5
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
    "tyr": ("n50", "seeds-tyr-18", "seeds-tyr"),
    "slicegpt": ("n50-rest", "seeds", "seeds"),
}


def of_seeds(method, metric, *, recovered=False, grids=None):
    runs = zip(grids or OF_SEEDS.get(method, ("n50", "seeds", "seeds")), SEEDS, strict=True)
    return [number(grid, method, metric, seed=seed, recovered=recovered) for grid, seed in runs]


def spread(values, digits):
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def gap(value, dense):
    return math.log(value / dense)


def test_the_table_of_seeds_is_that_of_the_records():
    for name, cells in table("Three seeds").items():
        method = NAMES[name]
        wanted = [f"{value:.2f}" for value in of_seeds(method, PERPLEXITY)]
        for metric, digits in ((PERPLEXITY, 2), (WORD, 1)):
            wanted += [spread(of_seeds(method, metric, recovered=r), digits) for r in (False, True)]
        wanted += [f"{100 * statistics.fmean(of_seeds(method, WORK, recovered=r)):.1f}" for r in (False, True)]
        assert cells == wanted, name


def test_the_order_of_methods_is_that_of_every_seed():
    for recovered, methods in (
        (False, ("wide-fitted", "wide", "tyr", "ddp", "slicegpt")),
        (True, ("wide-fitted", "wide", "ddp", "slicegpt")),
        (True, ("wide-fitted", "tyr", "ddp", "slicegpt")),
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
    said = words_of("Three seeds")
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
    said = words_of("Three seeds")
    for seed, grids in ((18, ("seeds-fitted-18", "seeds-fitted", EARLIER)), (19, ("seeds-fitted", EARLIER))):
        found = [number(grid, "wide-fitted", PERPLEXITY, seed=seed) for grid in grids]
        table, *others = [f"{value:.2f}" for value in found]
        apart = f"{100 * gap(max(found), min(found)):.1f} % apart"
        assert f"seed {seed} {table} in the table, {' and '.join(others)} in" in said
        assert apart in said


def test_the_better_recipe_and_the_published_one_are_apart_from_tyr_as_the_page_says():
    said = words_of("Three seeds")
    seeds = list(zip(SEEDS, OF_SEEDS["wide-fitted"], ("n50", "seeds", "seeds"), OF_SEEDS["tyr"], strict=True))
    for method, recovered in itertools.product(("wide-fitted", "wide"), BOTH):
        ratios = [
            times((better if method == "wide-fitted" else published, method, options), (peer, "tyr", options))
            for seed, better, published, peer in seeds
            for options in ({"seed": seed, "recovered": recovered},)
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
    assert said.format(**figures) in words_of("25 % nominal, LoRA of equal length")


SWEEP, OF_WORK = "Over sparsity", "A quarter of the work"
BETTER = ("q-sweep-fitted", "wide-fitted")


@pytest.mark.parametrize(
    ("title", "one", "target", "other", "recovered", "said"),
    [
        (SWEEP, BETTER, 0.6, ("n50", "tyr"), True, "({} times), at 54.9"),
        (SWEEP, BETTER, 0.1, ("q-sweep-fitted", DENSE), False, "it is {} times dense"),
        (SWEEP, BETTER, 0.1, ("q-sweep-fitted", DENSE), True, "27.11 against 26.64 ({} times)"),
        (OF_WORK, ("f25", "wide"), 0.25, ("f25", "ddp"), True, "(WIDE {} times)"),
        (OF_WORK, ("f25", "wide"), 0.25, ("f25", "ddp"), False, "({} times)"),
        (OF_WORK, ("f25", "slicegpt"), 0.25, ("f25", "wide"), False, "has {} times WIDE's"),
        (OF_WORK, BETTER, 0.3, ("f25", "ddp"), False, "which is {} and"),
        (OF_WORK, BETTER, 0.3, ("f25", "ddp"), True, "and {} times DDP's here"),
    ],
)
def test_rows_of_other_grids_are_apart_as_the_page_says(title, one, target, other, recovered, said):
    options = {"recovered": recovered}
    ratio, error = times((*one, options | {"target": target}), (*other, options))
    assert said.format(f"{ratio:.3f} ± {error:.3f}") in words_of(title)


def test_what_the_better_recipe_does_at_a_quarter_is_worked_out_from_the_records():
    said = words_of("25 % nominal, LoRA of equal length")
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
    between = "q-sweep-fitted" if method == "wide-fitted" else "q-sweep"
    grid = {0.25: quarter_grid(method), 0.5: half_grid(method)}.get(target, between)
    options = {"recovered": recovered, "target": target}
    if number(grid, method, PERPLEXITY, **options) is None:
        return None
    return measured(grid, method, **options) if metric == PERPLEXITY else number(grid, method, metric, **options)


def at_work_of(peer, method, target, recovered):
    """Return a method's perplexity where it does a peer's work, over the peer's, between two columns of the table."""
    value, at = (swept(peer, target, metric, recovered) for metric in (PERPLEXITY, WORK))
    works, values = ([swept(method, t, metric, recovered) for t in SPARSITIES] for metric in (WORK, PERPLEXITY))
    points = [(work, math.log(found.mean)) for work, found in zip(works, values, strict=True)]
    for (left, low), (right, high) in itertools.pairwise(points):
        if value and left <= at <= right:
            return f"{math.exp(low + (high - low) * (at - left) / (right - left)) / value.mean:.2f}"
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
    pairs = (("ddp", "wide"), ("ddp", "wide-fitted"), ("wide", "wide-fitted"))
    for (pair, recovered), row in zip(itertools.product(pairs, BOTH), ratios.values(), strict=True):
        assert row == [at_work_of(*pair, target, recovered) for target in SPARSITIES]
    for method, told in (
        ("wide", "would be {}x of it at 25 % and {}x at 50 % (the same interpolation), without LoRA {}x and {}x."),
        ("wide-fitted", "would be {}x and {}x of it, without {}x and {}x."),
    ):
        of_tyr = [at_work_of("tyr", method, target, recovered) for recovered in (True, False) for target in (0.25, 0.5)]
        assert told.format(*of_tyr) in words_of("Over sparsity")


def test_what_the_better_recipe_does_over_sparsity_is_worked_out_from_the_records():
    said, shares = words_of("Over sparsity"), []
    for target in SPARSITIES:
        published, better = (swept(method, target, PERPLEXITY, True).mean for method in ("wide", "wide-fitted"))
        dense = [number(grid, DENSE, PERPLEXITY, recovered=True) for grid in ("q-sweep", "q-sweep-fitted")]
        shares.append(f"{100 * (1 - gap(better, dense[1]) / gap(published, dense[0])):.0f}")
    assert f"{', '.join(shares[:-1])} and {shares[-1]} % away" in said


def test_the_table_of_equal_tokens_is_that_of_the_records():
    for name, cells in table("Equal tokens").items():
        method, options = ALL[name], {"recovered": True}
        grid = "equal" if method in (DENSE, "slicegpt", "blockpruner") else half_grid(method)
        value, steps = measured(grid, method, recovered=True), "0 + 1300" if grid == "equal" else "1000 + 300"
        ratio = "1" if method == DENSE else over_dense(grid, method, options, "equal")
        assert cells == [steps, cell(value.mean, value.error), ratio, word(grid, method, recovered=True)], name
    said, longer = words_of("Equal tokens"), {"recovered": True}
    for method, short in (("slicegpt", "n50-rest"), ("blockpruner", "n50")):
        told = [times((grid, method, longer), ("n50", "wide", longer)) for grid in (short, "equal")]
        assert " to ".join(f"{value:.3f} ± {error:.3f}" for value, error in told) + " times" in said


def test_sizes_of_groups_are_apart_as_the_page_says():
    said, value = words_of(NOMINAL[1][0]), measured("g-sweep", "f256-a192")
    ratios = [times(("g-sweep", "f256-a192", {}), ("n50", method, {})) for method in ("wide", "wide-64", "wide-32")]
    told = [f"{100 * (ratio - 1):.1f} ± {100 * error:.1f}" for ratio, error in ratios]
    assert f"have {cell(value.mean, value.error)} without LoRA, {told[0]} % above G = 128" in said
    assert f"{told[1]} % above G = 64 and {told[2]} % above G = 32" in said


# Whole layers are the same layers, and the same work, with either meaning of the target.
LAYERS = ("cooppruner", "shortened-ppl", "shortened-taylor")


def of_all_products(grid, method, target):
    if method in LAYERS:
        grid = {"f50": "n50-rest", "f25": "n25"}[grid]
        assert [number(grid, method, WORK, recovered=recovered) for recovered in BOTH] == [target, target]
    grid = f"{grid}-fitted" if method == "wide-fitted" else grid
    reached = [recovered for recovered in BOTH if number(grid, method, PERPLEXITY, recovered=recovered) is not None]

    def pair(metric, *, scale=1.0):
        values = [scale * number(grid, method, metric, recovered=recovered) for recovered in reached]
        return [f"{value:.{1 if value < 1000 else 0}f}" for value in values] + ["-"] * (2 - len(values))

    found = [measured(grid, method, target=target, recovered=recovered) for recovered in reached]
    cells = [cell(value.mean, value.error) for value in found] + ["-"] * (2 - len(found)) + pair(WORD)
    shares = zip(*(pair(f"sparsity.{half}", scale=100) for half in ("attention", "ffn")), strict=True)
    both = ["-" if attention == "-" else f"{attention} / {ffn}" for attention, ffn in shares]
    cells += ["-", "-", "0", "0"] if method == DENSE else [*both, *pair(WORK, scale=100)]
    cells.append(f"{100 * number(grid, method, 'sparsity.kv_cache_kept'):.0f}")
    seconds = [number(grid, method, "method.seconds", recovered=recovered) for recovered in reached]
    return cells + [f"{s:.1f}" if 1 < s < 10 else f"{s:.0f}" for s in seconds] + ["-"] * (2 - len(seconds))


@pytest.mark.parametrize(
    ("title", "grid", "target", "methods"),
    [
        ("Half of the work", "f50", 0.5, {*NAMES.values(), *LAYERS}),
        ("A quarter of the work", "f25", 0.25, {"dense", "wide", "ddp", "slicegpt", *LAYERS}),
    ],
)
def test_the_tables_of_half_and_a_quarter_of_the_work_are_those_of_the_records(title, grid, target, methods):
    rows = {(ALL | NAMES)[name]: cells for name, cells in table(title).items()}
    assert rows == {method: of_all_products(grid, method, target) for method in methods}


def speeds(grid, method, *, seed=17, target=0.5):
    folder = LAB / grid / "cells" / f"{method}-{target}-seed{seed}" / "profile"
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
    for name, method in (("DDP", "ddp"), ("SliceGPT", "slicegpt")):
        quarter, _ = speeds("f25", method, target=0.25)
        assert said.pop(f"{name}, a quarter of the work") == [f"{value:.2f}x" for value in quarter]
    methods = {name.partition(" (")[0]: method for name, method in NAMES.items()}
    assert said == {name: [f"{value:.2f}x" for value in speeds("f50", methods[name])[0]] for name in said}
    assert {methods[name] for name in said} == set(NAMES.values()) - {"dense", "wide-fitted"}


BUDGETS, WHY = "Budgets and deviations", "What it says"
# Where DDP was calibrated: name of the row, grid, seed, target.
DDP_RUNS = [
    *((f"{percent} % nominal", "q-sweep", 17, percent / 100) for percent in (10, 30, 40, 60, 70)),
    ("25 % nominal", "n25", 17, 0.25),
    ("50 % nominal", "n50", 17, 0.5),
    *((f"50 % nominal, seed {seed}", "seeds", seed, 0.5) for seed in (18, 19)),
    ("a quarter of the work", "f25", 17, 0.25),
    ("half of the work", "f50", 17, 0.5),
]
ENDED = re.compile(r"(\w+): training ended at a soft sparsity of ([\d.]+)% for a target of ([\d.]+)%")


def test_how_far_ddp_was_from_its_target_is_what_its_records_say():
    said, forced = tables(BUDGETS)[1], []
    for name, grid, seed, target in DDP_RUNS:
        text = GRIDS[grid].run.text(subject(grid, "ddp", seed=seed, target=target), "deviations")
        ended = {kind: f"{reached} / {wanted}" for kind, reached, wanted in ENDED.findall(text)}
        assert said.pop(name) == [ended.get(kind, "within 1 point") for kind in ("attention", "ffn")]
        assert ("layers [11], which" in text) == (target in (0.5, 0.6))
        assert ("layers [10, 11], which" in text) == (target == 0.7)
        if name.startswith("50 % nominal"):
            forced += [float(wanted) - float(reached) for _, reached, wanted in ENDED.findall(text)]
    assert said == {}
    assert f"cut {min(forced):.1f} to {max(forced):.1f} points more" in words_of(WHY)


def tyr_reads(iterations, windows, length, generations, offspring, survivors, stage_tokens):
    """Return the tokens that its search reads if every candidate is read anew, statistics and propagation with it."""
    judged = (offspring, survivors[0], survivors[1] + 1)  # The parent joins at the last stage.
    search = sum(models * tokens for models, tokens in zip(judged, stage_tokens, strict=True))
    return iterations * (2 * windows * length + generations * search)


def test_factors_of_the_budgets_are_those_of_settings_and_records():
    def read(method, metric="method.tokens_forward", *, grid=None, recovered=False):
        return number(grid or half_grid(method), method, metric, recovered=recovered)

    def tokens(of):
        return of.steps * of.batch_size * of.sequence_length

    def windows(of):
        return of.num_windows * of.window_length

    paper, tyr, cut, layers = StageConfig(), TyrConfig(), SliceGPTConfig(), windows(ShortenedConfig())
    names = ("iterations", "num_windows", "window_length", "generations", "offspring", "survivors", "stage_tokens")
    used = json.loads(GRIDS["n50"].run.text(subject("n50", "tyr"), "settings"))
    original, ours = (tyr_reads(*(of[name] for name in names)) for of in (asdict(tyr), used))
    deviations = GRIDS["n50"].run.text(subject("n50", "blockpruner"), "deviations")
    assert "64 windows of 512 tokens, the original on 256 of 2048" in deviations
    halves = sum(range(33, 65))  # Of 64 half-layers half go, one after another; each time all that are left are tried.
    candidates = tyr.iterations * tyr.generations * tyr.offspring
    factors = {
        "routers (WIDE, SkipGPT, D-LLM)": tokens(paper) / read("wide", "method.tokens_backward"),
        "LoRA, all rows": tokens(paper) / read("wide", "method.tokens_backward", recovered=True),
        "DDP": tokens(DDPConfig()) / read("ddp"),
        "Týr, tokens read": original / read("tyr"),
        "Týr, candidates of the search": candidates / math.prod(used[n] for n in ("iterations", *names[3:5])),
        "Týr, text of the statistics": windows(tyr) / (used["num_windows"] * used["window_length"]),
        "SliceGPT, Wanda, SparseGPT": windows(cut) / read("slicegpt"),
        "CoopPruner, tokens read": CoopPrunerConfig().num_masks * layers / read("cooppruner"),
        "BlockPruner, tokens read": halves * 256 * 2048 / read("blockpruner"),
        "Shortened, perplexity, tokens read": 32 * layers / read("shortened-ppl"),
        "Shortened, Taylor": layers / read("shortened-taylor"),
    }
    said, told = tables(BUDGETS)[0], words_of(BUDGETS)
    assert {name: cells[-1] for name, cells in said.items()} == {
        n: f"{value:.2g}" if value < 10 else f"{value:.0f}" for n, value in factors.items()
    }
    assert said["Týr, tokens read"][:2] == [f"{original / 1e6:.0f} M", f"{read('tyr') / 1e6:.1f} M"]
    others = [original / read("tyr", grid=grid) for grid in ("n25", "f50")]
    assert "{:.1f} (25 %) to {:.1f} (half of the work)".format(*others) in told
    assert f"(Týr's rule would give {ours / 1e6:.0f} M here, a factor of {original / ours:.1f})" in told
    assert f"{halves} x 256" in said["BlockPruner, tokens read"][0]
    for name, method, size in (("CoopPruner", "cooppruner", layers), ("BlockPruner", "blockpruner", 64 * 512)):
        assert said[f"{name}, tokens read"][1].startswith(f"{read(method) / size:.0f} x")


def test_what_is_said_of_why_is_joined_from_the_records():
    said = words_of(WHY)
    for one, other, told in (
        ("wide", "tyr", "{above:.1f} ± {error:.1f} % behind"),
        ("wide-fitted", "tyr", "{below:.1f} ± {error:.1f} % ahead of Týr with LoRA"),
    ):
        grid = "f50-fitted" if one == "wide-fitted" else "f50"
        ratio, error = times((grid, one, {"recovered": True}), ("f50", other, {"recovered": True}))
        assert told.format(above=100 * (ratio - 1), below=100 * (1 - ratio), error=100 * error) in said
    ratio, error = times(("f50-fitted", "wide-fitted", {"recovered": True}), ("f50", "wide", {"recovered": True}))
    assert f"the {ratio:.3f} ± {error:.3f} times between the two recipes" in said
    moves = [
        [number(grid, "wide", metric, recovered=r) / number(grid, "tyr", metric, recovered=r) for r in BOTH]
        for metric in (PERPLEXITY, WORD)
        for grid in ("f50", "n50", "n25")
    ]
    first, nominal, quarter, *words = [f"from {before:.2f} to {after:.2f}" for before, after in moves]
    assert f"{first} at half of the work ({nominal} at 50 % nominal, {quarter} at 25 %)" in said
    assert f"by word {words[0]} ({words[1]}, {words[2]})" in said


def test_gains_at_equal_rates_are_those_of_the_records():
    records = DOCS / "measurements/records"
    recipes = json.loads((records / "lab-recipes.json").read_text())
    runs = [*recipes["runs"], *json.loads((records / "lab-benchmark.json").read_text())["runs"]]
    found = {run["run"]: run["token_perplexity"] for run in runs if run.get("stage", run.get("subject")) == "stage 1"}
    gaps = {run: gap(value, recipes["dense_token_perplexity"]) for run, value in found.items()}
    said = words_of("A better recipe than the paper's")
    assert f"(2e-3: -{100 * (1 - gaps['cluster_lr2e-3'] / gaps['base']):.0f} %)" in said
    assert f"falls by {100 * (1 - gaps['cluster_smooth_lr1e-2'] / gaps['lr1e-2']):.0f} %)" in said
    shares = [f"-{100 * (1 - gaps[run] / gaps['base']):.0f}" for run in ("cluster_lr2e-3", "all_lr2e-3")]
    assert f"(2e-3: from {shares[0]} to {shares[1]} %)" in said
    quality = json.loads((records / "lab-quality.json").read_text())
    finer = next(e for e in quality if (e["run"], e["stage"]) == ("flops50_g32", "stage 1"))
    told = f"go from {found['base']:.2f} to {found['cluster_lr2e-3']:.2f}, further than adjacent groups of 32"
    assert told in words_of(WHY)
    assert f"[{finer['heldout_token_perplexity']:.2f}]" in words_of(WHY)


def test_the_later_run_that_the_readme_names_is_that_of_its_records():
    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    values = number("n25", "wide", PERPLEXITY), number("n25", "wide", WORD)
    assert "a later run of all rows has WIDE at {:.1f} and {:.1f}".format(*values) in readme
