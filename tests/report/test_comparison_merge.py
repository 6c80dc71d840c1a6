"""Which rows of several comparisons are one, and from which of them each cell comes."""

import pytest
from test_comparison_speed import FIGURES, measured, rows, write

from wide.cli.main import main
from wide.records import Cell, Record
from wide.report.comparison import DENSE, FINISHED, PERPLEXITY, RATIO, RETENTION, Row, read_comparison
from wide.report.comparison_merge import merge
from wide.report.comparison_tables import facts_table, quality_table
from wide.report.drawing import draw

SETTINGS = {"ffn_group_size": 64}
DENSE_CELL = Cell(DENSE, 0.0, 17)
LOW, HIGH = Cell("wide", 0.25, 17), Cell("wide", 0.5, 17)


def trained(cell, training):
    return [Record(subject=cell.subject(recovered=False), metric="training", value=training)]


def both_stages(cell, calibrated, recovered):
    yield from measured(cell, calibrated, settings=SETTINGS)
    yield from measured(cell, recovered, recovered=True)


def comparisons(*folders):
    return {folder.name: read_comparison(folder / "compare.jsonl") for folder in folders}


def quality(whole, cell=HIGH):
    values = [whole.value(Row(cell.method, stage), cell.sparsity, PERPLEXITY) for stage in (False, True)]
    return [None if value is None else value.mean for value in values]


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ({}, {}, ["wide"]),
        ({}, {"learning_rate": 0.005}, ["wide (one)", "wide (two)"]),
        ({"learning_rate": 0.005}, {"learning_rate": 0.005}, ["wide"]),
        ({"temperature_start": 2.0}, {"temperature_start": 3.0}, ["wide (one)", "wide (two)"]),
        # Records of before that say nothing of training.
        (None, {"learning_rate": 0.005}, ["wide"]),
    ],
)
def test_rows_whose_routers_were_trained_otherwise_are_apart(one, other, names, tmp_path):
    folders = [
        write(
            tmp_path / name,
            ["wide"],
            measured(cell, value, settings=SETTINGS),
            [] if training is None else trained(cell, training),
        )
        for name, cell, value, training in (("one", LOW, 11.0, one), ("two", HIGH, 15.0, other))
    ]
    whole = merge(comparisons(*folders))
    assert [row.method for row in whole.rows] == [DENSE, *names]


def test_rows_trained_otherwise_are_not_on_one_line_over_sizes(tmp_path):
    cells = [Cell(name, 0.5, 17) for name in ("a", "b", "c")]
    groups = [measured(cell, 12.0, settings={"ffn_group_size": 32 * 2**i}) for i, cell in enumerate(cells)]
    ways = [trained(cell, {"smoothing": 0.1 * (i == 2)}) for i, cell in enumerate(cells)]
    folder = write(tmp_path / "one", ["a", "b", "c"], *groups, *ways)
    found = comparisons(folder)["one"]
    assert [line["method"] for line in rows("quality-groups", found)] == ["a", "b"]


def test_rows_that_do_not_say_how_they_were_trained_join_a_line_over_sizes(tmp_path):
    cells = [Cell(name, 0.5, 17) for name in ("a", "b", "c")]
    groups = [measured(cell, 12.0, settings={"ffn_group_size": 32 * 2**i}) for i, cell in enumerate(cells)]
    folder = write(tmp_path / "one", ["a", "b", "c"], *groups, trained(cells[1], {"smoothing": 0.1}))
    found = comparisons(folder)["one"]
    assert [line["method"] for line in rows("quality-groups", found)] == ["a", "b", "c"]


def test_both_stages_of_a_cell_come_from_one_comparison(tmp_path):
    one = write(tmp_path / "one", ["wide"], both_stages(HIGH, 11.0, 10.0), recovers=True)
    calibrated_only = write(tmp_path / "two", ["wide"], measured(HIGH, 13.0, settings=SETTINGS))
    whole = merge(comparisons(one, calibrated_only))
    assert quality(whole) == [11.0, 10.0]
    assert whole.notes == ["cells of one count, not those of two, which lacks a stage of them: wide 0.5 seed 17"]
    both = write(tmp_path / "three", ["wide"], both_stages(HIGH, 15.0, 14.0), recovers=True)
    whole = merge(comparisons(one, both))
    assert quality(whole) == [15.0, 14.0]
    assert whole.notes == ["cells of three count, not those of one: wide 0.5 seed 17"]


def test_stages_of_different_comparisons_are_noted(tmp_path):
    one = write(tmp_path / "one", ["wide"], measured(HIGH, 11.0, settings=SETTINGS))
    recovered = [*measured(HIGH, 14.0, recovered=True)]
    settings = [Record(subject=HIGH.subject(recovered=False), metric="settings", value=SETTINGS)]
    two = write(tmp_path / "two", ["wide"], recovered, settings, recovers=True)
    whole = merge(comparisons(one, two))
    assert quality(whole) == [11.0, 14.0]
    assert whole.notes == ["wide 0.5 seed 17: calibrated of one, LoRA of two, because none has both"]


def test_a_cell_that_failed_later_does_not_replace_a_finished_one(tmp_path):
    one = write(tmp_path / "one", ["wide"], measured(HIGH, 11.0, settings=SETTINGS))
    failed = Record(subject=HIGH.subject(recovered=False), metric="status", value="OSError: disk")
    two = write(tmp_path / "two", ["wide"], [failed])
    whole = merge(comparisons(one, two))
    assert quality(whole) == [11.0, None]
    assert (whole.failures(), whole.notes) == ([], [])
    assert [failure.reason for failure in merge(comparisons(two)).failures()] == ["OSError: disk"]


def test_dense_cells_are_those_of_the_first_that_has_both_stages(tmp_path):
    dense = [*measured(Cell(DENSE, 0.0, 17), 8.0, recovered=True)]
    one = write(tmp_path / "one", ["wide"], measured(HIGH, 11.0, settings=SETTINGS))
    two = write(tmp_path / "two", ["tyr"], dense, recovers=True)
    three = write(tmp_path / "three", ["ddp"], [*measured(Cell(DENSE, 0.0, 17), 9.0, recovered=True)], recovers=True)
    whole = merge(comparisons(one, two, three))
    assert quality(whole, Cell(DENSE, 0.0, 17)) == [10.0, 8.0]
    assert whole.notes == []
    status = [record.value for record in whole.run.records if record.metric == "status"]
    assert status == [FINISHED] * 3


def accuracies(cell, value, *tasks, recovered=False):
    for metric in ("average", *tasks):
        yield Record(subject=cell.subject(recovered=recovered), metric=f"accuracy.{metric}", value=value)


def test_dense_cells_are_those_with_the_most_tasks(tmp_path):
    cell = (*measured(HIGH, 15.0, settings=SETTINGS), *accuracies(HIGH, 0.4, "piqa"))
    one = write(tmp_path / "one", ["wide"], cell)
    # Dense cells of the same perplexity within what is taken for one text.
    two = write(tmp_path / "two", ["tyr"], accuracies(DENSE_CELL, 0.5, "piqa"), dense=10.01)
    three = write(tmp_path / "three", ["ddp"], accuracies(DENSE_CELL, 0.8, "piqa"), dense=10.02)
    four = write(tmp_path / "four", ["slicegpt"], accuracies(DENSE_CELL, 0.25), dense=10.01)
    for folders, dense, retention in (
        # The first of equal ones.
        ((one, two, three, four), 10.01, 0.8),
        ((one, three, two, four), 10.02, 0.5),
        ((four, one), 10.01, 1.6),
        ((one,), 10.0, None),
    ):
        whole = merge(comparisons(*folders))
        assert quality(whole, DENSE_CELL)[0] == dense
        found = whole.value(Row("wide", False), 0.5, RETENTION)
        assert (None if found is None else found.mean) == retention
        assert whole.notes == []


def test_tasks_of_dense_cells_that_do_not_count_are_noted(tmp_path):
    one = write(tmp_path / "one", ["wide"], measured(DENSE_CELL, 8.0, recovered=True), recovers=True)
    two = write(tmp_path / "two", ["tyr"], accuracies(DENSE_CELL, 0.5, "piqa"))
    for folders in ((one, two), (two, one)):
        whole = merge(comparisons(*folders))
        assert quality(whole, DENSE_CELL) == [10.0, 8.0]
        assert whole.notes == ["dense seed 17: of one, without tasks that two has, which lacks a stage"]
    # Those of a stage that failed do not count.
    failed = Record(subject=DENSE_CELL.subject(recovered=False), metric="status", value="OSError: disk")
    three = write(tmp_path / "three", ["tyr"], accuracies(DENSE_CELL, 0.5, "piqa"), [failed])
    assert merge(comparisons(one, three)).notes == []


def of_lora(name, recipe, methods, *groups, dense=None, data="text"):
    """Return a comparison whose LoRA is of a recipe, with its dense + LoRA of this perplexity."""
    facts = [Record(subject="run", metric=fact, value=value) for fact, value in (("LoRA", recipe), ("data", data))]
    adapted = [] if dense is None else measured(DENSE_CELL, dense, recovered=True)
    return write(name, methods, facts, adapted, *groups, recovers=True)


def test_dense_with_lora_is_a_row_for_each_lora_with_a_note_which_rows_it_belongs_to(tmp_path):
    tyr, ddp = Cell("tyr", 0.5, 17), Cell("ddp", 0.5, 17)
    one = of_lora(tmp_path / "one", "300 steps", ["wide", "tyr"], both_stages(HIGH, 15.0, 12.0), dense=8.0)
    # Once more of the first LoRA: the first one's dense cells count, as ever.
    again = of_lora(tmp_path / "again", "300 steps", ["ddp"], both_stages(ddp, 16.0, 14.0), dense=8.5)
    two = of_lora(tmp_path / "two", "1300 steps", ["tyr"], both_stages(tyr, 15.0, 11.0), dense=6.0)
    whole = merge(comparisons(one, again, two))
    dense = [row for row in whole.rows if whole.is_dense(row)]
    short, long = Row("dense (one, again)", True), Row("dense (two)", True)
    assert dense == [Row(DENSE, False), short, long]
    assert [whole.value(row, 0.0, PERPLEXITY).mean for row in dense] == [10.0, 8.0, 6.0]
    # All ratios are over the same dense model, whatever LoRA a row has.
    rows_of_ratios = (*dense, Row("wide", True), Row("tyr (two)", True))
    assert [whole.value(row, 0.5, RATIO).mean for row in rows_of_ratios] == [1.0, 0.8, 0.6, 1.2, 1.1]
    assert whole.notes == [
        "rows differ in LoRA: dense (one, again) + LoRA has that of wide, tyr (one), ddp; dense (two) + LoRA has that "
        "of tyr (two); 'x dense' and retention are over dense without LoRA in every row"
    ]
    table = {line[0]: line[1:3] for line in facts_table(whole).rows}
    assert (table["dense (two) + LoRA"], table["dense"]) == (("-", "17"), ("-", "17"))
    assert [line["method"] for line in rows("quality-sparsity", whole)] == ["wide"] * 2 + ["ddp"] * 2 + [
        "tyr (two)"
    ] * 2


def test_a_lora_without_its_dense_model_has_a_row_of_dashes(tmp_path):
    one = of_lora(tmp_path / "one", "300 steps", ["wide"], both_stages(HIGH, 15.0, 12.0), dense=8.0)
    two = of_lora(tmp_path / "two", "1300 steps", ["tyr"], both_stages(Cell("tyr", 0.5, 17), 15.0, 11.0))
    whole = merge(comparisons(one, two), ["tyr"])
    lines = {line[0]: line[-2:] for line in quality_table(whole).rows}
    assert (lines["dense (one) + LoRA"][1], lines["dense (two) + LoRA"]) == ("0.800", ("-", "-"))
    assert "dense (one) + LoRA has that of no other row; dense (two) + LoRA has that of tyr;" in whole.notes[0]


@pytest.mark.parametrize(
    ("recipe", "data", "names"),
    [("300 steps", "text", [DENSE]), ("300 steps", "other", ["dense (one)", "dense (two)"])],
)
def test_equal_lora_on_the_same_data_is_one_row_of_dense(recipe, data, names, tmp_path):
    one = of_lora(tmp_path / "one", "300 steps", ["wide"], both_stages(HIGH, 15.0, 12.0), dense=8.0)
    two = of_lora(tmp_path / "two", recipe, ["tyr"], dense=8.0, data=data)
    # A comparison without LoRA has no part in it.
    three = write(tmp_path / "three", ["ddp"])
    whole = merge(comparisons(one, two, three))
    assert [row.method for row in whole.rows if whole.is_dense(row) and row.recovered] == names
    assert len(whole.notes) == len(names) - 1


def test_each_dense_with_lora_has_a_line_of_its_own(tmp_path):
    pytest.importorskip("matplotlib")
    one = of_lora(tmp_path / "one", "300 steps", ["wide"], both_stages(HIGH, 15.0, 12.0), dense=8.0)
    two = of_lora(tmp_path / "two", "1300 steps", ["tyr"], both_stages(Cell("tyr", 0.5, 17), 15.0, 11.0), dense=6.0)
    for found, wanted in (
        (merge(comparisons(one, two)), {"dense (one) + LoRA": (0.8, ":"), "dense (two) + LoRA": (0.6, "-.")}),
        (merge(comparisons(one)), {"dense + LoRA": (0.8, ":")}),
    ):
        for name in ("quality-sparsity", "quality-work"):
            figure = draw(FIGURES[name], found)
            drawn = [line for line in figure.axes[0].get_lines() if list(line.get_xdata()) == [0, 1]]
            lines = {"dense": (1.0, "-")} | wanted
            assert [(line.get_ydata()[0], line.get_linestyle()) for line in drawn] == list(lines.values())
            assert [text.get_text() for text in figure.legends[0].get_texts()][-len(lines) :] == list(lines)


def drawn_lines(name, found):
    """Return (height, dashes) of the black lines across each panel of a figure, and the words of its legend."""
    figure = draw(FIGURES[name], found)
    panels = [[line for line in axes.get_lines() if list(line.get_xdata()) == [0, 1]] for axes in figure.axes]
    lines = [[(line.get_ydata()[0], str(line._unscaled_dash_pattern)) for line in panel] for panel in panels]
    return lines, [text.get_text() for text in figure.legends[0].get_texts()]


def test_many_dense_models_with_lora_have_dashes_of_their_own(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [Cell(f"row{i}", 0.5, 17) for i in range(8)]
    folders = [
        of_lora(tmp_path / f"f{i}", f"{i} steps", [cell.method], both_stages(cell, 15.0, 12.0), dense=2.0 + i)
        for i, cell in enumerate(cells)
    ]
    (lines,), words = drawn_lines("quality-sparsity", merge(comparisons(*folders)))
    assert len(dict(lines)) == len({dash for _, dash in lines}) == 9
    assert words[-9:] == ["dense", *(f"dense (f{i}) + LoRA" for i in range(8))]


def test_a_dense_model_without_a_line_is_not_in_the_legend(tmp_path):
    pytest.importorskip("matplotlib")
    tyr = Cell("tyr", 0.5, 17)
    task = (*accuracies(DENSE_CELL, 0.5), *accuracies(HIGH, 0.4))
    one = of_lora(tmp_path / "one", "300 steps", ["wide"], both_stages(HIGH, 15.0, 12.0), task, dense=8.0)
    finished = Record(subject=DENSE_CELL.subject(recovered=True), metric="status", value=FINISHED)
    only_tasks = (*accuracies(DENSE_CELL, 0.45, recovered=True), finished)
    two = of_lora(tmp_path / "two", "1300 steps", ["tyr"], both_stages(tyr, 15.0, 11.0), only_tasks)
    whole = merge(comparisons(one, two))
    (perplexities, shares), words = drawn_lines("quality-sparsity", whole)
    assert [height for height, _ in perplexities] == [1.0, 0.8]
    assert [height for height, _ in shares] == [1.0, 0.9]
    assert words[-3:] == ["dense", "dense (one) + LoRA", "dense (two) + LoRA"]
    (lines,), words = drawn_lines("quality-work", whole)
    assert [height for height, _ in lines] == [1.0, 0.8]
    assert words[-2:] == ["dense", "dense (one) + LoRA"]


def test_what_does_not_count_is_told_on_the_page_and_on_the_terminal(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    cells = [measured(cell, 12.0, settings=SETTINGS) for cell in (LOW, HIGH)]
    one = write(tmp_path / "one", ["wide"], *cells)
    two = write(tmp_path / "two", ["wide"], *(measured(cell, 13.0, settings=SETTINGS) for cell in (LOW, HIGH)))
    assert main(["report", str(one), str(two), "--output", str(tmp_path / "both"), "--only"]) == 0
    note = "cells of two count, not those of one: wide 0.25 seed 17, wide 0.5 seed 17"
    assert f"note     {note}" in capsys.readouterr().out
    assert note in (tmp_path / "both/report.html").read_text()
