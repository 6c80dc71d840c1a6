"""Which rows of several comparisons are one, and from which of them each cell comes."""

import pytest
from report_words import draw
from test_comparison_speed import FIGURES, measured, rows, write

from wide.cli.main import main
from wide.errors import DataError
from wide.records import Cell, Record
from wide.report.comparison import DENSE, FINISHED, PERPLEXITY, Row, read_comparison
from wide.report.comparison_merge import merge

SETTINGS = {"ffn_group_size": 64}
DENSE_CELL = Cell(DENSE, 0.0, 17)
LOW, HIGH = Cell("wide", 0.25, 17), Cell("wide", 0.5, 17)


def trained(cell, training):
    return [Record(subject=cell.subject(recovered=False), metric="training", value=training)]


def both_stages(cell, calibrated, recovered):
    yield from measured(cell, calibrated, settings=SETTINGS)
    yield from measured(cell, recovered, recovered=True)


def comparisons(*folders):
    return {folder.name: read_comparison(folder) for folder in folders}


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
        (None, {"learning_rate": 0.005}, ["wide (one)", "wide (two)"]),
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


def test_both_stages_of_a_cell_come_from_one_comparison(tmp_path):
    one = write(tmp_path / "one", ["wide"], both_stages(HIGH, 11.0, 10.0), recovers=True)
    calibrated_only = write(tmp_path / "two", ["wide"], measured(HIGH, 13.0, settings=SETTINGS))
    whole = merge(comparisons(one, calibrated_only))
    assert quality(whole) == [11.0, 10.0]
    assert whole.notes == ["cells of one count, not those of two: wide 0.5 seed 17"]
    both = write(tmp_path / "three", ["wide"], both_stages(HIGH, 15.0, 14.0), recovers=True)
    whole = merge(comparisons(one, both))
    assert quality(whole) == [15.0, 14.0]
    assert whole.notes == ["cells of three count, not those of one: wide 0.5 seed 17"]


def test_a_cell_that_failed_later_does_not_replace_a_finished_one(tmp_path):
    one = write(tmp_path / "one", ["wide"], measured(HIGH, 11.0, settings=SETTINGS))
    failed = Record(subject=HIGH.subject(recovered=False), metric="status", value="OSError: disk")
    two = write(tmp_path / "two", ["wide"], [failed])
    whole = merge(comparisons(one, two))
    assert quality(whole) == [11.0, None]
    assert (whole.failures(), whole.notes) == ({}, [])
    assert list(merge(comparisons(two)).failures().values()) == ["OSError: disk"]


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


def test_comparisons_of_different_lora_do_not_mix(tmp_path):
    folders = []
    for name, recipe in (("one", "300 steps"), ("two", "1300 steps")):
        lora = Record(subject="run", metric="LoRA", value=recipe)
        folders.append(write(tmp_path / name, ["wide"], [lora], both_stages(HIGH, 15.0, 12.0), recovers=True))
    with pytest.raises(DataError, match="one: 300 steps; two: 1300 steps"):
        merge(comparisons(*folders))
    # One without LoRA has no part in it.
    three = write(tmp_path / "three", ["ddp"])
    assert [row.method for row in merge(comparisons(folders[0], three)).rows] == [DENSE] * 2 + ["wide"] * 2 + [
        "ddp"
    ] * 2


def test_dense_with_lora_has_a_line_of_its_own(tmp_path):
    pytest.importorskip("matplotlib")
    adapted = measured(DENSE_CELL, 8.0, recovered=True)
    folder = write(tmp_path / "one", ["wide"], both_stages(HIGH, 15.0, 12.0), adapted, recovers=True)
    for name in ("quality-sparsity", "quality-work"):
        figure = draw(FIGURES[name], comparisons(folder)["one"])
        drawn = [line for line in figure.axes[0].get_lines() if list(line.get_xdata()) == [0, 1]]
        assert [(line.get_ydata()[0], line.get_linestyle()) for line in drawn] == [(1.0, "-"), (0.8, ":")]
        assert [text.get_text() for text in figure.legends[0].get_texts()][-2:] == ["dense", "dense + LoRA"]


def test_what_does_not_count_is_told_on_the_page_and_on_the_terminal(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    cells = [measured(cell, 12.0, settings=SETTINGS) for cell in (LOW, HIGH)]
    one = write(tmp_path / "one", ["wide"], *cells)
    two = write(tmp_path / "two", ["wide"], *(measured(cell, 13.0, settings=SETTINGS) for cell in (LOW, HIGH)))
    assert main(["report", str(one), str(two), "--output", str(tmp_path / "both"), "--only"]) == 0
    note = "cells of two count, not those of one: wide 0.25 seed 17, wide 0.5 seed 17"
    assert f"note     {note}" in capsys.readouterr().out
    assert note in (tmp_path / "both/report.html").read_text()
