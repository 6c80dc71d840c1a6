"""What docs/results/lab-88m.md says of zero-shot tasks, and of the second runs that have them, is what was measured."""

import itertools
import math
import statistics

import pytest
from lab_records import (
    ALL,
    BOTH,
    GRIDS,
    SCORE,
    SEEDS,
    WORK,
    cell,
    measured,
    number,
    subject,
    table,
    tables,
    times,
    words_of,
)

from wide.report.comparison import DENSE, PERPLEXITY

SECOND, TASKS, OF_WORK, WHY = (
    "25 % nominal, a second run",
    "Zero-shot tasks",
    "A quarter of the work",
    "What it says",
)
# Tasks and what guessing brings, in %.
GUESSED = {
    "arc_easy": 25,
    "arc_challenge": 25,
    "boolq": 50,
    "winogrande": 50,
    "piqa": 50,
    "openbookqa": 25,
    "hellaswag (302-item subset)": 25,
}
# Questions of BoolQ, and those whose answer is no.
BOOLQ, NO = 3270, 1237
WIDTH = ("wide-fitted", "wide-32", "wide-64", "wide", "wide-uniform", "tyr", "ddp", "slicegpt")
NOT_TRAINED = ("tyr", "slicegpt", "blockpruner", "cooppruner", "shortened-ppl", "shortened-taylor")


def again(method):
    return "n25-fitted-tasks" if method == "wide-fitted" else "n25-tasks"


def first(method):
    return "n25-fitted" if method == "wide-fitted" else "n25"


NOMINAL = {method: again(method) for method in ALL.values()}
QUARTER = dict.fromkeys(
    (DENSE, *WIDTH[1:], "blockpruner", "dllm-original", "skipgpt", "dllm"),
    "f25-tasks",
)


def sorted_by_perplexity(rows):
    return sorted(rows, key=lambda method: (method != DENSE, number(rows[method], method, PERPLEXITY)))


def percent(grid, method, metric, recovered):
    value, error = (number(grid, method, f"{metric}{of}", recovered=recovered) for of in ("", ".stderr"))
    return None if value is None else (100 * value, 100 * error)


def row_of_tasks(grid, method):
    cells = []
    for metric, share in ((SCORE, False), (SCORE, True), ("accuracy.arc_easy", False), ("accuracy.boolq", False)):
        for recovered in BOTH:
            found = percent(grid, method, metric, recovered)
            if found is None:
                cells.append("-")
            elif share:
                cells.append(f"{100 * found[0] / percent(grid, DENSE, metric, False)[0]:.1f}")
            else:
                cells.append(f"{found[0]:.1f} ± {found[1]:.1f}")
    return cells


@pytest.mark.parametrize(("position", "rows"), [(0, NOMINAL), (1, QUARTER)])
def test_the_tables_of_tasks_are_those_of_the_records(position, rows):
    said = {ALL[name]: cells for name, cells in tables(TASKS)[position].items()}
    assert said == {method: row_of_tasks(grid, method) for method, grid in rows.items()}
    assert list(said) == sorted_by_perplexity(rows)


def values(rows, metric, recovered, *, methods=None):
    """Return perplexities and a metric of all rows but dense that were tested."""
    of = [(rows[m], m) for m in methods or rows if m != DENSE and m in rows]
    found = [(number(*row, PERPLEXITY, recovered=recovered), number(*row, metric, recovered=recovered)) for row in of]
    return tuple(zip(*((one, other) for one, other in found if other is not None), strict=True))


def ranks(numbers):
    return [sum(o < n for o in numbers) + (sum(o == n for o in numbers) - 1) / 2 for n in numbers]


def agreement(rows, metric, recovered, **options):
    """Return Spearman's rank correlation of a metric with perplexity."""
    return statistics.correlation(*(ranks(column) for column in values(rows, metric, recovered, **options)))


def without_boolq(grid, method, recovered):
    tasks = [number(grid, method, f"accuracy.{task}", recovered=recovered) for task in GUESSED if task != "boolq"]
    return None if None in tasks else 100 * statistics.fmean(tasks)


def spans(rows, metric):
    found = [100 * value for recovered in BOTH for value in values(rows, metric, recovered)[1]]
    return f"{min(found):.1f} to {max(found):.1f}"


def test_what_averages_say_is_worked_out_from_the_records():
    said = words_of(TASKS)
    guessed = statistics.fmean(GUESSED.values())
    average, error = percent("n25-tasks", DENSE, SCORE, False)
    of_all = [
        number("n25-tasks", DENSE, f"accuracy.{task}", recovered=recovered) for recovered in BOTH for task in GUESSED
    ]
    assert [statistics.fmean(of_all[:7]), statistics.fmean(of_all[7:])] == pytest.approx(
        [number("n25-tasks", DENSE, SCORE, recovered=recovered) for recovered in BOTH]
    )
    assert f"guessing has {guessed:.1f} % on average" in said
    assert f"dense {average:.1f} ± {error:.1f} %, {(average - guessed) / error:.1f} of its errors above that" in said
    nominal, quarter = (spans(rows, SCORE) for rows in (NOMINAL, QUARTER))
    assert f"from {nominal} % at 25 % nominal and from {quarter} % at a quarter of the work" in said
    ratio = times(("n25-tasks", "shortened-taylor", {}), ("n25-tasks", DENSE, {}))[0]
    assert f"at {ratio:.1f} times the dense perplexity" in said
    taylor, better = (percent(NOMINAL[m], m, SCORE, False)[0] for m in ("shortened-taylor", "wide-fitted"))
    assert f"Shortened by Taylor has {taylor:.1f} %" in said
    assert f"ahead of all pruned rows on both texts, {better:.1f} %" in said
    for rows in (NOMINAL, QUARTER):
        below = {
            (method, recovered)
            for method, grid in rows.items()
            for recovered in BOTH
            for found in (percent(grid, method, SCORE, recovered),)
            if found and percent(grid, DENSE, SCORE, recovered)[0] - found[0] > 2 * math.hypot(found[1], error)
        }
        assert below == {("dllm", True)}
    ranged = [spans(rows, "accuracy.boolq") for rows in (NOMINAL, QUARTER)]
    assert (
        f"({ranged[0]} % and {ranged[1]} %, dense {percent('n25-tasks', DENSE, 'accuracy.boolq', False)[0]:.1f} %)"
        in said
    )
    assert f"{100 * NO / BOOLQ:.1f} % of its answers are no, {100 * (1 - NO / BOOLQ):.1f} % yes" in said
    assert f"({NO} of {BOOLQ})" in said
    for grid, method in (("n25-tasks", "cooppruner"), ("n25-tasks", "slicegpt"), ("f25-tasks", "slicegpt")):
        for recovered in BOTH:
            assert BOOLQ * number(grid, method, "accuracy.boolq", recovered=recovered) == pytest.approx(NO)
    left = []
    for rows in (NOMINAL, QUARTER):
        found = [without_boolq(rows[m], m, r) for m in rows if m != DENSE for r in BOTH]
        found = [value for value in found if value is not None]
        left.append(f"{min(found):.1f} to {max(found):.1f} %")
    dense, blind = without_boolq("n25-tasks", DENSE, False), (sum(GUESSED.values()) - 50) / 6
    assert f"Without it rows have {left[0]} and {left[1]}, dense {dense:.1f} % (guessing {blind:.1f} %)" in said
    both = [100 * v for rows in (NOMINAL, QUARTER) for recovered in BOTH for v in values(rows, SCORE, recovered)[1]]
    told = (
        f"averages from {min(both):.1f} to {max(both):.1f} %, dense {average:.1f} ± {error:.1f}, guessing {guessed:.1f}"
    )
    assert told in words_of(WHY)


def test_what_single_tasks_say_is_worked_out_from_the_records():
    said = words_of(TASKS)
    above = {}
    for task, guess in GUESSED.items():
        value, error = percent("n25-tasks", DENSE, f"accuracy.{task}", False)
        above[task] = (value - guess) / error
    assert [task for task, errors in above.items() if errors > 3] == ["arc_easy", "hellaswag (302-item subset)"]
    assert all(abs(errors) < 2 for task, errors in above.items() if errors <= 3 and task != "boolq")
    for task, name in (("arc_easy", "ARC easy"), ("hellaswag (302-item subset)", "HellaSwag")):
        value, error = percent("n25-tasks", DENSE, f"accuracy.{task}", False)
        assert f"{name} {value:.1f} ± {error:.1f} %" in said
    broken = percent("n25-tasks", "dllm", "accuracy.hellaswag (302-item subset)", False)
    ratio = times(("n25-tasks", "dllm", {}), ("n25-tasks", DENSE, {}))[0]
    assert f"D-LLM at {ratio:.0f} times the dense perplexity has {broken[0]:.1f} ± {broken[1]:.1f} %" in said
    for task, name in (
        ("arc_challenge", "ARC challenge"),
        ("openbookqa", "OpenBookQA"),
        ("winogrande", "WinoGrande"),
        ("piqa", "PIQA"),
    ):
        found = [
            100 * value
            for rows in (NOMINAL, QUARTER)
            for recovered in BOTH
            for value in values(rows, f"accuracy.{task}", recovered)[1]
        ]
        assert f"{name} {min(found):.1f} to {max(found):.1f} %" in said
    easy, average = (
        [f"{agreement(NOMINAL, metric, recovered):.2f}" for recovered in BOTH]
        for metric in ("accuracy.arc_easy", SCORE)
    )
    assert len(values(NOMINAL, SCORE, False)[0]) == 16
    assert f"rank correlation is {easy[0]}, with LoRA {easy[1]} (of the average {average[0]} and {average[1]})" in said
    easy, average = (
        [f"{agreement(NOMINAL, metric, recovered, methods=WIDTH):.2f}" for recovered in BOTH]
        for metric in ("accuracy.arc_easy", SCORE)
    )
    assert f"rows of width it is {easy[0]} and {easy[1]} (of the average {average[0]} and {average[1]})" in said
    found = [100 * v for r in BOTH for v in values(NOMINAL, "accuracy.arc_easy", r, methods=WIDTH)[1]]
    assert f"from {min(found):.1f} to {max(found):.1f} %, with errors of 1.0" in said
    dense = percent("n25-tasks", DENSE, "accuracy.arc_easy", False)[0]
    lost = [dense - 100 * min(values(rows, "accuracy.arc_easy", r)[1]) for rows in (NOMINAL, QUARTER) for r in BOTH]
    assert f"lose up to {max(lost):.0f} points" in said
    halves = [f"{agreement(QUARTER, 'accuracy.arc_easy', recovered):.2f}" for recovered in BOTH]
    counts = [len(values(QUARTER, SCORE, recovered)[0]) for recovered in BOTH]
    assert f"at a quarter of the work {halves[0]} ({counts[0]} rows), with LoRA {halves[1]} ({counts[1]})" in said


def test_the_table_of_second_runs_is_that_of_the_records():
    said = {ALL[name]: cells for name, cells in table(SECOND).items()}
    trained = [m for m in NOMINAL if m not in (DENSE, *NOT_TRAINED)]
    assert list(said) == sorted(trained, key=lambda m: number(first(m), m, PERPLEXITY))
    for method, cells in said.items():
        runs = [(grid, recovered) for recovered in BOTH for grid in (first(method), again(method))]
        found = [measured(grid, method, target=0.25, recovered=recovered) for grid, recovered in runs]
        wanted = [cell(value.mean, value.error).partition(" ")[0] for value in found]
        wanted += [f"{100 * number(grid, method, WORK, recovered=recovered):.1f}" for grid, recovered in runs]
        assert cells == wanted, method


def changes(methods, recovered, *, grids=(first, again)):
    pairs = [[number(grid(m), m, PERPLEXITY, recovered=recovered) for grid in grids] for m in methods]
    return [100 * abs(two / one - 1) for one, two in pairs if one and two]


def quarter_first(method):
    return "f25-groups" if method in ("wide-32", "wide-64") else "f25"


def shares(grid, method):
    found = (number(grid, method, f"sparsity.{half}") for half in ("attention", "ffn"))
    return " / ".join(f"{100 * share:.1f}" for share in found)


def test_what_second_runs_say_of_repeating_is_worked_out_from_the_records():
    said = words_of(SECOND)
    assert changes(NOT_TRAINED, recovered=False) == [0.0] * 6
    assert max(changes(NOT_TRAINED, recovered=True)) < 0.01
    steady = [m for m in WIDTH if m not in NOT_TRAINED]
    most = [max(changes(steady, recovered)) for recovered in BOTH]
    assert f"at most {most[0]:.1f} % apart, with LoRA {most[1]:.1f} %" in said
    works = [
        100 * abs(number(first(m), m, WORK, recovered=r) - number(again(m), m, WORK, recovered=r))
        for m in steady
        for r in BOTH
    ]
    assert f"their work at most {max(works):.1f} points" in said
    pairs = [[number(grid, "skipgpt", PERPLEXITY, recovered=r) for grid in ("n25", "n25-tasks")] for r in BOTH]
    ratios = [one / two for one, two in pairs]
    assert f"by {ratios[0]:.1f} times, with LoRA by {ratios[1]:.1f} times" in said
    works = [100 * number(grid, "skipgpt", WORK) for grid in ("n25-tasks", "n25")]
    told = f"{shares('n25-tasks', 'skipgpt')} % of attention and FFN, in the first run {shares('n25', 'skipgpt')} %"
    assert f"{told}, which is {works[0]:.1f} instead of {works[1]:.1f} % of the work" in said
    for method, told in (("skipgpt-original", "its original form by {} and {} %"), ("dllm", "D-LLM by {} and {} %")):
        apart = [f"{changes([method], recovered)[0]:.0f}" for recovered in BOTH]
        assert told.format(*apart) in said
    original = [f"{changes(['dllm-original'], recovered)[0]:.1f}" for recovered in BOTH]
    assert "those of D-LLM's original form {} and {} %".format(*original) in said
    # The order of all rows is the same in both runs, but for SkipGPT and its original form.
    for recovered in BOTH:
        orders = [
            sorted(
                (m for m in NOMINAL if "skipgpt" not in m),
                key=lambda m: number(g(m), m, PERPLEXITY, recovered=recovered),
            )
            for g in (first, again)
        ]
        assert orders[0] == orders[1]
    quarter = words_of(OF_WORK)
    methods = [m for m in QUARTER if m in WIDTH]
    grids = (quarter_first, lambda _: "f25-tasks")
    assert changes(("tyr", "slicegpt"), recovered=False, grids=grids) == [0.0, 0.0]
    most = [max(changes(methods, recovered, grids=grids)) for recovered in BOTH]
    assert f"at most {most[0]:.1f} % away from the first, with LoRA {most[1]:.1f} %" in quarter
    two = [number(grid, "skipgpt", PERPLEXITY) for grid in ("f25", "f25-tasks")]
    assert f"SkipGPT has {two[0]:.0f} in the first and {two[1]:.0f} in the second" in quarter
    assert not number("f25-tasks", "skipgpt", PERPLEXITY, recovered=True)
    longer = {"recovered": True}
    ratio, error = times(("f25-tasks", "wide", longer), ("f25-tasks", "ddp", longer))
    assert f"WIDE over DDP {ratio:.3f} ± {error:.3f} times" in quarter


def test_half_layers_and_layers_at_a_quarter_of_the_work_are_apart_as_the_page_says():
    said, longer = words_of(OF_WORK), {"recovered": True}
    for grid, other, told in (
        ("n25", "cooppruner", "{} times CoopPruner's"),
        ("f25", "slicegpt", "{} times SliceGPT's"),
    ):
        ratio, error = times(("f25-tasks", "blockpruner", longer), (grid, other, longer))
        assert told.format(f"{ratio:.3f} ± {error:.3f}") in said
    assert number("f25-tasks", "blockpruner", PERPLEXITY) == number("n25", "blockpruner", PERPLEXITY)
    dense = number("f25", DENSE, PERPLEXITY, recovered=True)
    over = [
        number("f25-tasks", m, PERPLEXITY, recovered=True) / dense for m in ("blockpruner", "dllm-original", "dllm")
    ]
    told = "{:.2f}x to 1.43x BlockPruner, CoopPruner and Shortened, 1.46x SliceGPT, {:.2f}x D-LLM's original form"
    assert told.format(*over) in said
    assert f"and {over[2]:.1f}x D-LLM." in said
    found = [number("n25-tasks", "skipgpt", PERPLEXITY, recovered=recovered) for recovered in BOTH]
    told = "second-run) {:.0f}, with LoRA {:.1f}, compiled".format(*found)
    nominal = words_of("25 % nominal, LoRA of equal length")
    assert told in nominal
    found = [f"{number('n25-tasks', 'dllm', PERPLEXITY, recovered=recovered):.0f}" for recovered in BOTH]
    assert f"{' and '.join(found)} in the second run" in nominal


def test_runs_of_skipgpt_elsewhere_are_those_of_the_records():
    said = words_of(WHY)
    nominal, quarter = (
        [f"{number(grid, 'skipgpt', PERPLEXITY):.0f}" for grid in grids]
        for grids in (("n25", "n25-tasks"), ("f25", "f25-tasks"))
    )
    assert f"Three runs of one seed at 25 % ended at 113, {nominal[0]} and {nominal[1]}" in said
    assert f"two at a quarter of it at {quarter[0]} and {quarter[1]}" in said
    longer = [number(grid, "skipgpt", PERPLEXITY, recovered=True) for grid in ("n25", "n25-tasks")]
    assert "({:.0f} and {:.0f} against 36 at 25 %".format(*longer) in said
    ratio = number("n25", "skipgpt", PERPLEXITY) / number("n25-tasks", "skipgpt", PERPLEXITY)
    assert f"by {ratio:.1f} times between two runs of one seed at 25 %" in words_of("Over sparsity")


def test_seeds_that_were_finished_later_are_complete():
    for grid, methods in (("f50-seeds", ("tyr", "ddp", "wide")), ("f50-seeds-fitted", ("wide-fitted",))):
        for method, seed, recovered in itertools.product(methods, SEEDS[1:], BOTH):
            assert GRIDS[grid].run.number(subject(grid, method, seed=seed, recovered=recovered), PERPLEXITY)
