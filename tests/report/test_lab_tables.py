"""What docs/results/lab-88m.md says of quarters, halves, sweeps, equal tokens and speed is what was measured."""

import itertools
import json

import pytest
from lab_records import (
    ALL,
    BOTH,
    EARLIER,
    GRIDS,
    LAB,
    NAMES,
    SCORE,
    SHAPES,
    SPARSITIES,
    WORD,
    WORK,
    at_work,
    cell,
    gap,
    half_grid,
    measured,
    number,
    over_dense,
    quarter_grid,
    swept,
    table,
    tables,
    times,
    word,
    words_of,
)

from wide.report.comparison import DENSE, PERPLEXITY, Row

NOMINAL = [("25 % nominal, LoRA of equal length", quarter_grid), ("50 % nominal, LoRA of equal length", half_grid)]


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


SWEEP, OF_WORK, SIZES, PARTS = (
    "Over sparsity",
    "A quarter of the work",
    "Sizes of groups",
    "A better recipe than the paper's",
)
HALF, CLUSTERED_32 = "Half of the work", ("f50-clustered", "clustered-32")
BETTER, QUARTER = ("q-sweep-fitted", "wide-fitted"), ("f25-fitted", "wide-fitted")


@pytest.mark.parametrize(
    ("title", "one", "target", "other", "recovered", "said"),
    [
        (SWEEP, BETTER, 0.6, ("n50", "tyr"), True, "({} times), at 54.9"),
        (SWEEP, BETTER, 0.1, ("q-sweep-fitted", DENSE), False, "it is {} times dense"),
        (SWEEP, BETTER, 0.1, ("q-sweep-fitted", DENSE), True, "27.11 against 26.64 ({} times)"),
        (OF_WORK, ("f25", "wide"), 0.25, ("f25", "ddp"), True, "(WIDE {} times)"),
        (OF_WORK, ("f25", "wide"), 0.25, ("f25", "ddp"), False, "({} times)"),
        (OF_WORK, ("f25", "slicegpt"), 0.25, ("f25", "wide"), False, "has {} times WIDE's"),
        (OF_WORK, ("f25", "slicegpt"), 0.25, ("n25", "cooppruner"), True, "({} times CoopPruner's)"),
        (OF_WORK, ("f25", "tyr"), 0.25, ("f25", "wide"), True, "it has {} times the perplexity of WIDE as published"),
        (OF_WORK, ("f25", "tyr"), 0.25, ("f25", "wide-uniform"), True, "{} times WIDE-uniform's"),
        (OF_WORK, ("f25", "tyr"), 0.25, ("f25", "ddp"), True, "and {} times DDP's, at 25.1"),
        (OF_WORK, ("f25", "tyr"), 0.25, ("f25", "wide"), False, "cannot be told apart ({} times"),
        (OF_WORK, ("f25", "tyr"), 0.25, ("f25", "wide-uniform"), False, "over WIDE-uniform {})"),
        (OF_WORK, ("f25", "wide-uniform"), 0.25, ("f25", "ddp"), True, "({} times: they cannot be told apart)"),
        (OF_WORK, ("f25", "wide-uniform"), 0.25, ("f25", "wide"), True, "of free allocation ({} times)"),
        (OF_WORK, ("f25", "wide-uniform"), 0.25, ("f25", "ddp"), False, "WIDE-uniform ({} times)"),
        (OF_WORK, QUARTER, 0.25, ("f25", "tyr"), True, "which is {} times Týr's"),
        (OF_WORK, QUARTER, 0.25, ("f25", "ddp"), True, "{} times DDP's and"),
        (OF_WORK, QUARTER, 0.25, ("f25", "wide"), True, "and {} times the published recipe's"),
        (OF_WORK, QUARTER, 0.25, ("f25", "tyr"), False, "Without LoRA it has {} times Týr's"),
        (OF_WORK, QUARTER, 0.25, ("f25-fitted", DENSE), False, "31.35 against 31.13, {} times"),
        (OF_WORK, ("f25-groups", "wide-32"), 0.25, ("f25", "wide"), True, "G = 32 has {} times"),
        (OF_WORK, ("f25-groups", "wide-64"), 0.25, ("f25", "wide"), True, "G = 64 {} times the perplexity of G = 128"),
        (OF_WORK, ("f25-groups", "wide-32"), 0.25, ("f25", "tyr"), True, "without it), {} and"),
        (OF_WORK, ("f25-groups", "wide-64"), 0.25, ("f25", "tyr"), True, "and {} times Týr's."),
        (HALF, ("f50-groups", "wide-32"), 0.5, ("f50", "tyr"), True, "G = 32 has {} times Týr's perplexity"),
        (HALF, ("f50-groups", "wide-64"), 0.5, ("f50", "tyr"), True, "G = 64 {} times, at 1 point less"),
        (HALF, ("f50-groups", "wide-32"), 0.5, ("f50", "tyr"), False, "({} and"),
        (HALF, ("f50-groups", "wide-64"), 0.5, ("f50", "tyr"), False, "and {} times), on WikiText-2"),
        (HALF, ("f50-groups", "wide-32"), 0.5, ("f50", "wide"), False, "G = 32 has {} times the perplexity of G = 128"),
        (HALF, ("f50-groups", "wide-32"), 0.5, ("f50", "wide"), True, "with LoRA {} times."),
        (SIZES, CLUSTERED_32, 0.5, ("f50-clustered", "clustered"), False, "groups of 32 have {} times"),
        (
            PARTS,
            ("parts-plain", "fitted-start-only"),
            0.5,
            ("parts-plain", "published"),
            False,
            "where it is ({} times)",
        ),
        (SIZES, ("g-sweep", "f512-a192"), 0.5, ("g-sweep", "f256-a192"), False, "512 over 256 has {} times"),
        (SIZES, ("g-sweep", "f512-a192"), 0.5, ("g-sweep", "f256-a192"), True, "with LoRA {} times, 32 over 64"),
        (SIZES, ("n50", "wide-32"), 0.5, ("n50", "wide-64"), False, "32 over 64 {} times"),
        (SIZES, ("g-sweep", "f16-a192"), 0.5, ("n50", "wide-32"), False, "16 over 32 {} times, with LoRA"),
        (SIZES, ("n50", "wide-32"), 0.5, ("n50", "wide-64"), True, "with LoRA {} and"),
        (SIZES, ("g-sweep", "f16-a192"), 0.5, ("n50", "wide-32"), True, "and {} times. What finer"),
        (SIZES, ("g-sweep", "f16-a192"), 0.5, ("n50", "wide"), False, "groups of 16 have {} times that of 128"),
        (SIZES, ("g-sweep", "f16-a192"), 0.5, ("n50", "tyr"), True, "groups of 16 have {} times the perplexity of Týr"),
        (SIZES, ("g-sweep", "f128-a768"), 0.5, ("n50", "skipgpt"), True, "it is {} times SkipGPT's 82.7"),
        (SIZES, ("g-sweep", "f128-a768"), 0.5, ("n50", "blockpruner"), True, "and {} times BlockPruner's 69.2"),
        (SIZES, ("parts-plain", "clustered-only"), 0.5, ("parts-plain", "published"), False, "alone have {} times"),
        (PARTS, ("parts-sharp", "no-smoothing"), 0.5, ("parts-plain", "clustered-only"), False, "({} times)"),
        (PARTS, ("parts-plain", "published"), 0.5, ("f50", "wide"), False, "from 55.80 to 54.07 ({} times)"),
    ],
)
def test_rows_of_other_grids_are_apart_as_the_page_says(title, one, target, other, recovered, said):
    options = {"recovered": recovered}
    ratio, error = times((*one, options | {"target": target}), (*other, options))
    assert said.format(f"{ratio:.3f} ± {error:.3f}") in words_of(title)


def test_what_the_better_recipe_does_at_a_quarter_is_worked_out_from_the_records():
    said, shares = words_of("25 % nominal, LoRA of equal length"), []
    for metric, recovered, words in (
        (PERPLEXITY, False, "of its gap in log perplexity {} % are gone"),
        (WORD, False, "{} % smaller than the"),
        (PERPLEXITY, True, "{} % of the published recipe's gap"),
        (WORD, True, "and {} % on WikiText-2"),
    ):
        models = ("dense", "wide", "wide-fitted")
        dense, published, better = (number(quarter_grid(m), m, metric, recovered=recovered) for m in models)
        assert words.format(f"{100 * (1 - gap(better, dense) / gap(published, dense)):.0f}") in said
        published, better = (number(grid, m, metric, recovered=recovered) for grid, m in (("f25", "wide"), QUARTER))
        shares.append(f"{100 * (1 - gap(better, dense) / gap(published, dense)):.0f}")
    told = "takes {0} % away, with LoRA {2} %, by word on WikiText-2 {1} and {3} %"
    assert told.format(*shares) in words_of(OF_WORK)
    work, nominal = (100 * number("n25-fitted", "wide-fitted", metric) for metric in (WORK, "sparsity.mean"))
    assert f"at {work:.1f} % of the work ({nominal:.1f} % nominal)" in said


SWEPT = {"WIDE, G = 128": "wide", "WIDE, `fitted-50`": "wide-fitted", "DDP": "ddp", "SkipGPT": "skipgpt"}


def at_work_of(peer, method, target, recovered):
    """Return a method's perplexity where it does a peer's work, over the peer's."""
    value, at = (swept(peer, target, metric, recovered) for metric in (PERPLEXITY, WORK))
    found = value and at_work(method, at, recovered)
    return f"{found / value.mean:.2f}" if found else "-"


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
    options = {"target": 0.7, "recovered": True}
    ratio, error = times(("q-sweep", "ddp", options), ("q-sweep", "wide", options))
    assert f"({ratio:.3f} ± {error:.3f} times WIDE's" in said
    ratio, error = times((*BETTER, options), ("q-sweep", "ddp", options))
    assert f"{ratio:.3f} ± {error:.3f} times DDP's at 70 %" in said


# Whole layers are the same layers, and the same work, with either meaning of the target.
LAYERS = ("cooppruner", "shortened-ppl", "shortened-taylor")
# Of runs of their own.
LATER = ("blockpruner", "dllm-original", "dllm")


def test_the_table_of_equal_tokens_is_that_of_the_records():
    more = "DDP, LoRA of 1300 steps"
    rows = table("Equal tokens")
    values = [float(cells[1].partition(" ")[0]) for cells in rows.values()]
    assert values == sorted(values)
    assert more in rows
    for name, cells in rows.items():
        method, options = "ddp" if name == more else ALL[name], {"recovered": True}
        static = (DENSE, "tyr", "slicegpt", "blockpruner", *LAYERS)
        grid = "equal" if name == more or method in static else half_grid(method)
        value, steps = measured(grid, method, recovered=True), "0 + 1300" if grid == "equal" else "1000 + 300"
        steps = "1000 + 1300" if name == more else steps
        ratio = "1" if method == DENSE else over_dense(grid, method, options, "equal")
        assert cells == [steps, cell(value.mean, value.error), ratio, word(grid, method, recovered=True)], name
    said, longer = words_of("Equal tokens"), {"recovered": True}
    for method, short in (("slicegpt", "n50-rest"), ("blockpruner", "n50")):
        told = [times((grid, method, longer), ("n50", "wide", longer)) for grid in (short, "equal")]
        assert " to ".join(f"{value:.3f} ± {error:.3f}" for value, error in told) + " times" in said
    for one, grid, other, words in (
        ("ddp", "n50", "ddp", "{} times what it had with 300"),
        ("ddp", "n50", "wide", "{} times WIDE's at G = 128"),
        ("ddp", "n50", "wide-uniform", "{} times WIDE-uniform's"),
        ("ddp", "n50-fitted", "wide-fitted", "{} times that of `fitted-50`"),
        ("slicegpt", "equal", "ddp", "SliceGPT has {} times DDP's"),
        ("slicegpt", "n50", "ddp", "({} times)"),
        ("tyr", "equal", "ddp", "Týr {} times."),
        ("tyr", "n50", "wide", "37.35 is {} times the perplexity of G = 128"),
        ("tyr", "n50", "wide-32", "{} times that of G = 32"),
        ("tyr", "n50", "wide-uniform", "and {} times WIDE-uniform's"),
        ("tyr", "n50", "tyr", "1000 more bring Týr to {} times what it had"),
        ("shortened-ppl", "n50-rest", "shortened-ppl", "(Shortened, perplexity: {} times"),
        ("cooppruner", "n50-rest", "cooppruner", "(CoopPruner: {} times)"),
        ("shortened-ppl", "n50", "wide", "{} times WIDE's at best"),
    ):
        ratio, error = times(("equal", one, longer), (grid, other, longer))
        assert words.format(f"{ratio:.3f} ± {error:.3f}") in said, (one, other)
    better = ("n50-fitted", "wide-fitted", longer)
    ratio, error = times(better, ("equal", "tyr", longer))
    assert f"34.48 is {ratio:.3f} ± {error:.3f} times 37.35" in said
    tyr, work = (number("equal", "tyr", metric, recovered=True) for metric in (PERPLEXITY, WORK))
    there = at_work("wide-fitted", work, recovered=True)
    assert f"at Týr's {100 * work:.1f} % it would have {there:.1f} " in said
    assert f"{there / tyr:.2f} times. Of its lead" in said


def of_all_products(grid, method, target):
    if method in LAYERS:
        grid = {"f50": "n50-rest", "f25": "n25"}[grid]
        assert [number(grid, method, WORK, recovered=recovered) for recovered in BOTH] == [target, target]
    later = dict.fromkeys(LATER, "-tasks")
    grid += {"wide-fitted": "-fitted", "wide-32": "-groups", "wide-64": "-groups", **later}.get(method, "")
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


@pytest.mark.parametrize(("title", "grid", "target"), [(HALF, "f50", 0.5), (OF_WORK, "f25", 0.25)])
def test_the_tables_of_half_and_a_quarter_of_the_work_are_those_of_the_records(title, grid, target):
    rows = {(ALL | NAMES)[name]: cells for name, cells in tables(title)[0].items()}
    methods = {*NAMES.values(), *LAYERS, *LATER}
    assert rows == {method: of_all_products(grid, method, target) for method in methods}
    values = [float(cells[1].partition(" ")[0]) for cells in rows.values()]
    assert values == sorted(values)


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
    assert {methods[name] for name in said} == set(NAMES.values()) - {"dense", "wide-fitted", "wide-32", "wide-64"}
