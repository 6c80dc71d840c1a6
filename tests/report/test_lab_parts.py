"""What docs/results/lab-88m.md says of group sizes, parts of recipes, seeds at half and SkipGPT was measured."""

import itertools
import statistics

import pytest
import yaml
from lab_records import (
    BOTH,
    DOCS,
    GRIDS,
    HALF_SEEDS,
    LAB,
    NAMES,
    SEEDS,
    WORD,
    WORK,
    at_work,
    cell,
    gap,
    measured,
    number,
    of_seeds,
    spread,
    subject,
    table,
    tables,
    times,
    words_of,
)

from wide.report.comparison import DENSE, PERPLEXITY

# Steps of SkipGPT's longer training.
LONG = 3000
SIZES, PARTS, HALF = "Sizes of groups", "A better recipe than the paper's", "Half of the work"
# Rows of the table over sizes of groups: grid and method of channels in an FFN group and in one of attention.
SIZED = {
    **{(size, 192): ("g-sweep", f"f{size}-a192") for size in (16, 256, 512)},
    **{(128, size): ("g-sweep", f"f128-a{size}") for size in (64, 384, 768)},
    **{(size, 192): ("n50", f"wide-{size}") for size in (32, 64)},
    (128, 192): ("n50", "wide"),
}


def halves(grid, method, **options):
    shares = (number(grid, method, f"sparsity.{half}", **options) for half in ("attention", "ffn"))
    return " / ".join(f"{100 * share:.1f}" for share in shares)


def test_the_table_over_sizes_of_groups_is_that_of_the_records():
    rows, usual = table(SIZES), SIZED[128, 192]
    assert set(rows) == {f"{ffn} / {attention}" for ffn, attention in SIZED}
    for (ffn, attention), row in SIZED.items():
        found = [(measured(*row, recovered=r), number(*row, WORK, recovered=r)) for r in BOTH]
        ratios = [times((*row, {"recovered": r}), (*usual, {"recovered": r})) for r in BOTH]
        over = [f"{ratio:.3f} ± {error:.3f}" for ratio, error in ratios]
        over += [f"{at_equal_work(row, r):.2f}" for r in BOTH]
        wanted = [f"{2048 // ffn} + {768 // attention}", *(cell(value.mean, value.error) for value, _ in found)]
        wanted += [*(["1"] * 4 if row == usual else over), *(halves(*row, recovered=r) for r in BOTH)]
        wanted += [f"{100 * work:.1f}" for _, work in found]
        assert rows[f"{ffn} / {attention}"] == wanted, row


def at_equal_work(row, recovered):
    """Return a row's perplexity over that of WIDE with the usual groups at the same work."""
    value, work = (number(*row, metric, recovered=recovered) for metric in (PERPLEXITY, WORK))
    return value / at_work("wide", work, recovered=recovered)


def test_what_sizes_of_groups_say_is_worked_out_from_the_records():
    said = words_of(SIZES)
    channels = (512, 256, 128, 64, 32, 16)
    ends, works, gains = [], [], []
    for recovered in BOTH:
        values = [number(*SIZED[size, 192], PERPLEXITY, recovered=recovered) for size in channels]
        shares = [100 * number(*SIZED[size, 192], WORK, recovered=recovered) for size in channels]
        halved = [100 * (1 - finer / coarser) for coarser, finer in itertools.pairwise(values)]
        ends.append(f"from {values[0]:.2f} to {values[-1]:.2f}")
        works.append(f"{min(shares):.1f} to {max(shares):.1f}")
        gains.append(f"from {max(halved):.0f} to {min(halved):.0f}")
        assert values == sorted(values, reverse=True)
    assert f"perplexity falls {ends[0]}, with LoRA {ends[1]}, at {' and '.join(works)} % of the work" in said
    assert f"shrinks {gains[0]} %, with LoRA {gains[1]} %" in said
    ranges = [sorted(100 * number(*row, WORK, recovered=r) for row in SIZED.values()) for r in BOTH]
    assert "({:.1f} to {:.1f} %, with LoRA {:.1f} to {:.1f} %)".format(*(r[i] for r in ranges for i in (0, -1))) in said
    heads, pair, all_heads, finest, coarsest = (
        [at_equal_work(SIZED[size], recovered) for recovered in BOTH]
        for size in ((128, 64), (128, 384), (128, 768), (16, 192), (512, 192))
    )
    single = [(number(*SIZED[128, 64], m, recovered=r)) for m in (PERPLEXITY, WORK) for r in BOTH]
    assert "single heads have {:.2f}, with LoRA {:.2f}".format(*single[:2]) in said
    assert "at {:.1f} and {:.1f} % of the work; at equal work".format(*(100 * w for w in single[2:])) in said
    assert "that is {:.2f} and {:.2f} times".format(*heads) in said
    assert "{:.2f} times the perplexity at equal work, with LoRA {:.2f} times".format(*pair) in said
    assert "one {:.2f} times, with LoRA {:.2f} times**".format(*all_heads) in said
    whole = [number(*SIZED[128, 768], m, recovered=r) for m in (PERPLEXITY, WORK) for r in BOTH]
    told = f"({whole[0]:.0f} and {whole[1]:.0f}, at {100 * whole[2]:.1f} and {100 * whole[3]:.1f} % of the work)"
    assert told in said
    tyr, work = (number("n50", "tyr", metric, recovered=True) for metric in (PERPLEXITY, WORK))
    there = at_work("wide", work, recovered=True) / tyr
    assert f"[{there:.2f} times](#over-sparsity)" in said
    assert f"groups of 16 would have about {there * finest[1]:.2f} times" in said
    assert f"at {100 * number(*SIZED[16, 192], WORK, recovered=True):.1f} against {100 * work:.1f} %" in said
    said = words_of("What it says")
    assert "128 channels have {:.2f} times the perplexity, with LoRA {:.2f} times".format(*finest) in said
    assert "of 512 {:.2f} and {:.2f} times".format(*coarsest) in said
    assert "KV groups {:.2f} and {:.2f} times, all heads".format(*heads) in said
    assert "in one group {:.1f} and {:.1f} times".format(*all_heads) in said


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


def at_half(method, metric, *, recovered=False):
    """Return the values of all seeds at half of the work."""
    return of_seeds(method, metric, recovered=recovered, grids=HALF_SEEDS[method])


def test_the_table_of_seeds_at_half_of_the_work_is_that_of_the_records():
    rows = {NAMES[name]: cells for name, cells in tables(HALF)[1].items()}
    assert set(rows) == set(HALF_SEEDS)
    for method, cells in rows.items():
        wanted = []
        for recovered in BOTH:
            values = at_half(method, PERPLEXITY, recovered=recovered)
            wanted += [f"{value:.2f}" for value in values] + [spread(values, 2)]
        wanted += [spread(at_half(method, WORD, recovered=recovered), 1) for recovered in BOTH]
        for recovered in BOTH:
            wanted.append(f"{100 * statistics.fmean(at_half(method, WORK, recovered=recovered)):.1f}")
        assert cells == wanted, method
    for recovered, methods in (
        (False, ("wide-fitted", "wide", "ddp")),
        (False, ("wide-fitted", "tyr", "ddp")),
        (True, ("wide-fitted", "tyr", "wide", "ddp")),
    ):
        columns = [at_half(method, PERPLEXITY, recovered=recovered) for method in methods]
        assert all(list(row) == sorted(row) for row in zip(*columns, strict=True))
    for recovered in BOTH:
        pairs = zip(*(at_half(method, WORD, recovered=recovered) for method in ("tyr", "wide")), strict=True)
        assert all(tyr < wide for tyr, wide in pairs)
    less = [
        100 * (tyr - better)
        for tyr, better in zip(*(at_half(m, WORK, recovered=True) for m in ("tyr", "wide-fitted")), strict=True)
    ]
    assert f"at {min(less):.1f} to {max(less):.1f} points less" in words_of(HALF)


def joined(values):
    return f"{', '.join(values[:-1])} and {values[-1]}"


@pytest.mark.parametrize(
    ("one", "other", "recovered", "said"),
    [
        ("wide", "tyr", True, "WIDE has {} times the perplexity"),
        ("wide-fitted", "tyr", True, "the better recipe {} times, at"),
        ("wide", "ddp", True, "Over DDP WIDE has {} times"),
        ("wide-fitted", "tyr", False, "{} times Týr's perplexity"),
    ],
)
def test_rows_of_several_seeds_at_half_of_the_work_are_apart_as_the_page_says(one, other, recovered, said):
    ratios = []
    for position, seed in enumerate(SEEDS):
        pair = [(HALF_SEEDS[m][position], m, {"seed": seed, "recovered": recovered}) for m in (one, other)]
        ratios.append("{:.3f} ± {:.3f}".format(*times(*pair)))
    assert said.format(joined(ratios)) in words_of(HALF)


def test_what_seeds_at_half_of_the_work_say_is_worked_out_from_the_records():
    said = words_of(HALF)
    for seed, told in ((17, "({} and"), (18, "and {} times), and"), (19, "by little ({} times)")):
        options, grid = {"seed": seed}, HALF_SEEDS["wide"][SEEDS.index(seed)]
        ratio, error = times((grid, "wide", options), (grid, "tyr", options))
        assert told.format(f"{ratio:.3f} ± {error:.3f}") in said
    shares = {}
    for metric, recovered in itertools.product((PERPLEXITY, WORD), BOTH):
        dense = number("f50", DENSE, metric, recovered=recovered)
        pairs = zip(*(at_half(m, metric, recovered=recovered) for m in ("wide", "wide-fitted")), strict=True)
        found = [100 * (1 - gap(better, dense) / gap(published, dense)) for published, better in pairs]
        shares[metric, recovered] = spread(found, 1), [f"{share:.1f}" for share in found]
    (alone, each), (with_lora, both) = (shares[PERPLEXITY, recovered] for recovered in BOTH)
    assert f"takes {alone} % of the published gap to dense away** ({joined(each)} %)" in said
    assert f"with LoRA {with_lora} % ({joined(both)} %)" in said
    assert "by word {} % and {} %".format(*(shares[WORD, recovered][0] for recovered in BOTH)) in said
    for recovered, told in ((False, "{} against {}, with LoRA"), (True, "with LoRA {} against {}.")):
        words = [f"{value:.1f}" for method in ("tyr", "wide") for value in at_half(method, WORD, recovered=recovered)]
        assert told.format(joined(words[:3]), joined(words[3:])) in said
    rows = (("f50-groups", "wide-32"), ("f50-groups", "wide-64"), ("f50", "tyr"))
    for recovered, told in ((False, "without it ({} and {} by word, Týr {})"), (True, "with it ({} and {}, Týr {})")):
        finer = [number(*row, WORD, recovered=recovered) for row in rows]
        assert finer[2] < finer[0] < finer[1]
        assert told.format(*(f"{value:.1f}" for value in finer)) in said
    ranges = []
    for recovered in BOTH:
        values = at_half("ddp", PERPLEXITY, recovered=recovered)
        ranges.append(f"from {min(values):.1f} to {max(values):.1f}")
    assert ", with LoRA ".join(ranges) in said
    ended = [
        GRIDS["f50-seeds"].run.text(subject("f50-seeds", "ddp", seed=seed), "deviations").split("soft sparsity of ")[1:]
        for seed in (18, 19)
    ]
    (heads, channels), (more_heads, more_channels) = ([text.partition("%")[0] for text in texts] for texts in ended)
    told = f"{heads} and {more_heads} % of the heads, {channels} and {more_channels} % of the channels"
    assert f"{told} for a target of 53.3 %" in said


def test_what_is_said_of_several_seeds_elsewhere_is_that_of_the_records():
    said = words_of("What it says")
    means = {m: spread(at_half(m, PERPLEXITY, recovered=True), 1) for m in HALF_SEEDS}
    apart = []
    for grid, seed in zip(HALF_SEEDS["tyr"], SEEDS, strict=True):
        options = {"seed": seed, "recovered": True}
        apart.append(f"{100 * (times((grid, 'wide', options), (grid, 'tyr', options))[0] - 1):.1f}")
    assert (
        f"Týr is ahead by {joined(apart)} % with LoRA in the three seeds** ({means['tyr']}, WIDE {means['wide']})"
        in said
    )
    plain = [means[m].partition(" ")[0] for m in ("wide", "ddp")]
    assert f"at half of the work {', '.join(plain)} (the same) and" in said
    assert f"at half of the work {means['wide-fitted']} over three (Týr {means['tyr']})" in said
    words = [spread(at_half(m, WORD, recovered=True), 1).partition(" ")[0] for m in ("wide-fitted", "tyr")]
    assert f" {words[0]} and 67.3 by word (Týr 71.8, 109.5, {words[1]} and 73.5)" in said


def test_what_is_said_of_skipgpt_is_what_was_measured():
    options = [("n50", {}), ("skipgpt-seeds", {"seed": 18}), ("skipgpt-seeds", {"seed": 19})]
    seeds, works = (
        [number(grid, "skipgpt", metric, **given) for grid, given in options] for metric in (PERPLEXITY, WORK)
    )
    slow, smooth, more = (number(f"skipgpt-{name}", "skipgpt", PERPLEXITY) for name in ("slow", "smooth", "long"))
    recovered, before = (number(grid, "skipgpt", PERPLEXITY, recovered=True) for grid in ("skipgpt-smooth", "n50"))
    static = number("n50", "blockpruner", PERPLEXITY)
    (heads, usual), (longer, usual_longer) = (
        [number(*SIZED[128, size], PERPLEXITY, recovered=recovered) for size in (768, 192)] for recovered in BOTH
    )
    # Other settings lie between the seeds, and all of these are behind the static choice of the same units.
    assert static < min(seeds) < slow < smooth < more < max(seeds)
    assert min(seeds) < heads < max(seeds)
    factor = max(seeds) / min(seeds)
    nominal, found = (
        words_of("50 % nominal, LoRA of equal length"),
        [f"{value:.1f}" for value in (*seeds, slow, smooth)],
    )
    assert f"**Between seeds it is {factor:.1f} times**" in nominal
    assert f"{found[1]} for seed 18, at {100 * works[1]:.1f} % of the work, and {found[2]} for seed 19" in nominal
    assert f"at {100 * works[2]:.1f} %; {spread(seeds, 1)} over the three" in nominal
    works += [number(grid, "skipgpt", WORK) for grid in ("skipgpt-slow", "skipgpt-smooth")]
    assert f"(5e-4: {found[3]} at {100 * works[3]:.1f} % of the work)" in nominal
    assert f"({found[4]} at {100 * works[4]:.1f} %, with LoRA {recovered:.1f})" in nominal
    usual_words, words = (number(grid, "skipgpt", WORD) for grid in ("n50", "skipgpt-long"))
    told = f"{more:.1f} at {100 * number('skipgpt-long', 'skipgpt', WORK):.1f} %, by word {words:.0f}"
    assert f"({LONG}: {told}; 1000 steps of this seed {seeds[0]:.1f} and {usual_words:.0f})" in nominal
    positions = number("skipgpt-long", "skipgpt", "method.tokens_backward")
    assert positions == LONG * 16 * 1024
    assert f"(1/{10_000 * 16 * 4096 / positions:.0f} instead of 1/40 of the paper's positions)" in words_of(
        "What it says"
    )
    said = words_of("What it says")
    assert f"ended at {seeds[0]:.0f}, 301 and 253" in said
    assert f"{seeds[1]:.0f} (18) and {seeds[2]:.0f} (19), a factor of {factor:.1f} between seeds" in said
    assert f"at {100 * min(works[:3]):.1f} to {100 * max(works[:3]):.1f} % of the work" in said
    assert f"has {found[3]}, [the smooth" in said
    assert f"{found[4]}, with LoRA {recovered:.1f} ({before:.1f}," in said
    assert f"[three times the steps](lab-88m/skipgpt-long) {more:.1f}: one run each" in said
    assert f"whose {min(seeds):.0f} to {max(seeds):.0f} at 50 % it resembles" in words_of(SIZES)
    told = f"have [{heads:.0f}](#sizes-of-groups) where KV groups have {usual:.0f}"
    assert f"{told}, with LoRA {longer:.0f} and {usual_longer:.0f}," in said
