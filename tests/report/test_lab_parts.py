"""What docs/results/lab-88m.md says of sizes of groups and of parts of the better recipe is what was measured."""

import yaml
from lab_records import (
    BOTH,
    DOCS,
    LAB,
    WORD,
    WORK,
    at_work,
    cell,
    gap,
    measured,
    number,
    table,
    tables,
    times,
    words_of,
)

from wide.report.comparison import DENSE, PERPLEXITY

SIZES, PARTS = "Sizes of groups", "A better recipe than the paper's"
# Rows of the table over sizes of groups: grid and method of channels in an FFN group and in one of attention.
SIZED = {
    **{(size, 192): ("g-sweep", f"f{size}-a192") for size in (16, 256, 512)},
    **{(128, size): ("g-sweep", f"f128-a{size}") for size in (64, 384, 768)},
    **{(size, 192): ("n50", f"wide-{size}") for size in (32, 64)},
    (128, 192): ("n50", "wide"),
}


def halves(grid, method):
    return " / ".join(f"{100 * number(grid, method, f'sparsity.{half}'):.1f}" for half in ("attention", "ffn"))


def test_the_table_over_sizes_of_groups_is_that_of_the_records():
    rows, usual = table(SIZES), SIZED[128, 192]
    assert set(rows) == {f"{ffn} / {attention}" for ffn, attention in SIZED}
    for (ffn, attention), row in SIZED.items():
        value, work = measured(*row), number(*row, WORK)
        ratio, error = times((*row, {}), (*usual, {}))
        over = [f"{ratio:.3f} ± {error:.3f}", f"{value.mean / at_work('wide', work, recovered=False):.2f}"]
        wanted = [f"{2048 // ffn} + {768 // attention}", cell(value.mean, value.error)]
        wanted += [*(["1", "1"] if row == usual else over), halves(*row), f"{100 * work:.1f}"]
        assert rows[f"{ffn} / {attention}"] == wanted, row


# Rows of the table over the parts of the better recipe.
PART = {
    "**all of it, `fitted-50`**": ("f50-fitted", "wide-fitted"),
    "without fitted start and bias": ("parts", "no-bias"),
    "without fitted start": ("parts", "no-fitted-start"),
    "first temperature of 5": ("parts-hot", "no-low-temperature"),
    "clustered groups alone": ("parts-plain", "clustered-only"),
    "without the smooth term": ("parts-sharp", "no-smoothing"),
    "without clustered groups": ("parts", "no-clustering"),
    "smooth term alone": ("parts-hot", "smooth-only"),
    "fitted start alone": ("parts-plain", "fitted-start-only"),
    "published": ("parts-plain", "published"),
}
# Rows of the table with LoRA: grid and method, groups of the FFN.
WITH_LORA = {
    "clustered, smooth, G = 32": ("f50-clustered", "clustered-32", 32),
    "`fitted-50`": ("f50-fitted", "wide-fitted", 128),
    "clustered, smooth (`clustered-50`)": ("f50-clustered", "clustered", 128),
    "published, G = 32": ("f50-groups", "wide-32", 32),
    "published": ("f50", "wide", 128),
}


def recipe_of(grid, method):
    """Return what the table says of a row's settings, which its grid's resolved configuration says."""
    resolved = yaml.safe_load((LAB / grid / f"{grid}.yaml").read_text())
    assert (resolved["match"], resolved["sparsities"], resolved["seeds"]) == ("linear_flops", 0.5, 17)
    train, options = resolved["train"], resolved["wide"] | resolved["variants"][method]
    assert (train["learning_rate"], train["steps"], options["ffn_group_size"]) == (5e-3, 1000, 128)
    start = options["router_start"] + (", bias" if options["router_bias"] else "")
    numbers = (train["temperature_start"], resolved["objective"]["smoothing"])
    return [options["ffn_grouping"], start, *(f"{value:g}" for value in numbers)]


def test_the_table_over_parts_of_the_better_recipe_is_that_of_the_records():
    rows = tables(PARTS)[0]
    assert list(rows) == sorted(PART, key=lambda name: number(*PART[name], PERPLEXITY))
    whole, plain = PART["**all of it, `fitted-50`**"], PART["published"]
    for name, row in PART.items():
        value = measured(*row)
        gaps = {metric: gap(number(*row, metric), number(row[0], DENSE, metric)) for metric in (PERPLEXITY, WORD)}
        of_plain = {metric: gap(number(*plain, metric), number(plain[0], DENSE, metric)) for metric in gaps}
        shares = [f"{100 * (gaps[metric] / of_plain[metric] - 1):.0f} %".replace("-0 %", "0 %") for metric in gaps]
        ratio, error = times((*row, {}), (*whole, {}))
        wanted = [*recipe_of(*row), cell(value.mean, value.error)]
        wanted += ["1" if row == whole else f"{ratio:.3f} ± {error:.3f}", f"{gaps[PERPLEXITY]:.3f}"]
        share, of_words = ("-", "-") if row == plain else shares
        wanted += [share, f"{number(*row, WORD):.1f}", of_words, halves(*row), f"{100 * number(*row, WORK):.1f}"]
        assert rows[name] == wanted, name


def test_what_leaving_out_a_part_costs_is_worked_out_from_the_records():
    said, dense = words_of(PARTS), number("f50-fitted", DENSE, PERPLEXITY)
    whole, plain = (gap(number(*PART[name], PERPLEXITY), dense) for name in ("**all of it, `fitted-50`**", "published"))
    left_out = (number(*PART[f"without {part}"], PERPLEXITY) for part in ("clustered groups", "the smooth term"))
    costs = [f"{100 * (gap(value, dense) - whole) / plain:.0f}" for value in left_out]
    assert f"costs {costs[0]} points of it, leaving out the smooth term {costs[1]}" in said
    simpler, alone = (number(*PART[n], PERPLEXITY) for n in ("without fitted start and bias", "clustered groups alone"))
    on_top = f"{100 * gap(alone, simpler) / plain:.0f}"
    brought = f"{100 * (1 - gap(alone, dense) / plain):.0f}"
    assert f"alone bring {brought}, and the smooth term (with a first temperature of 2) on top of them {on_top}" in said
    smooth = number(*PART["smooth term alone"], PERPLEXITY)
    assert f"on top of them {on_top}; the smooth term alone {100 * (1 - gap(smooth, dense) / plain):.0f}." in said
    assert f"by {gap(simpler, dense) - whole:.3f} in log perplexity" in said
    shares = [100 * number(*row, WORK) for row in PART.values()]
    assert f"leave out {min(shares):.1f} to {max(shares):.1f} % of the work" in said


def test_the_table_of_parts_with_lora_is_that_of_the_records():
    rows, said = tables(PARTS)[1], words_of(PARTS)
    values = [float(cells[2].partition(" ")[0]) for cells in rows.values()]
    assert values == sorted(values)
    assert set(rows) == set(WITH_LORA)
    for name, (grid, method, size) in WITH_LORA.items():
        resolved = yaml.safe_load((LAB / grid / f"{grid}.yaml").read_text())
        variants = resolved["variants"] or {}
        assert (resolved["wide"] | variants.get(method, {}))["ffn_group_size"] == size
        assert resolved["recover"]["steps"] == 300
        found = [measured(grid, method, recovered=recovered) for recovered in BOTH]
        ratios = [
            times((grid, method, {"recovered": r}), ("f50-fitted", "wide-fitted", {"recovered": r})) for r in BOTH
        ]
        over = [f"{ratio:.3f} ± {error:.3f}" for ratio, error in ratios] if name != "`fitted-50`" else ["1", "1"]
        words = [f"{number(grid, method, WORD, recovered=recovered):.1f}" for recovered in BOTH]
        shares = [f"{100 * number(grid, method, WORK, recovered=recovered):.1f}" for recovered in BOTH]
        assert rows[name] == [str(size), *(cell(v.mean, v.error) for v in found), *over, *words, *shares], name
    for recovered, told in ((True, "it is {} % better with LoRA"), (False, "and {} % without")):
        options = {"recovered": recovered}
        ratio, error = times(("f50-clustered", "clustered-32", options), ("f50-clustered", "clustered", options))
        assert told.format(f"{100 * (1 - ratio):.1f} ± {100 * error:.1f}") in said


def test_the_decision_names_the_shares_of_the_table():
    decision = " ".join((DOCS / "decisions/0008-channels-that-act-together.md").read_text().split())
    shares = {name: cells[7].removeprefix("-") for name, cells in tables(PARTS)[0].items()}
    whole, simpler, _, _, alone, rough, adjacent, *_ = shares.values()
    assert (
        f"together they take {whole} of the published gap away. Without clustered groups it is {adjacent}" in decision
    )
    assert f"without the smooth term {rough}, with clustered groups alone {alone}" in decision
    assert f"without both it is {simpler}" in decision
