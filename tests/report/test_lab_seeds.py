"""What docs/results/lab-88m.md says of several seeds is what was measured."""

import itertools
import statistics

from lab_records import (
    BOTH,
    EARLIER,
    NAMES,
    OF_SEEDS,
    SEEDS,
    WORD,
    WORK,
    gap,
    number,
    of_seeds,
    spread,
    table,
    times,
    words_of,
)

from wide.report.comparison import PERPLEXITY


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
