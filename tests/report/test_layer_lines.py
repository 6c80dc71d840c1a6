"""Sparsity by layer of the rows of a comparison in one picture."""

import pytest
from report_words import draw_svg

from wide.records import Cell, Record, Stage
from wide.report.comparison import DENSE, FINISHED, Comparison
from wide.report.comparison_figures import COMPARISON_FIGURES
from wide.report.figure import MissingRecordsError
from wide.report.selection import Selection

LAYERS_OF_METHODS = COMPARISON_FIGURES[-1]


def layers(subject, *shares, half="ffn"):
    for layer, share in enumerate(shares):
        yield Record(subject=subject, metric=f"sparsity.{half}", value=share, layer=layer)


def cell(method, sparsity, *shares, recovered=False, finished=True):
    subject = Stage(Cell(method, sparsity, 17), recovered=recovered)
    yield from layers(subject, *shares)
    yield from layers(subject, *reversed(shares), half="attention")
    if finished:
        yield Record(subject=subject, metric="status", value=FINISHED)


def comparison(*groups, methods=("wide", "wide-uniform", "ddp")):
    facts = {"grid.methods": list(methods), "grid.sparsities": [0.25, 0.5, 0.7]}
    run = [Record(subject="run", metric=metric, value=value) for metric, value in facts.items()]
    run.append(Record(subject="run", metric="grid.recovers", value=1.0))
    return Comparison(Selection([*run, *(record for group in groups for record in group)]))


def test_of_several_seeds_the_first_that_finished_is_shown_and_the_figure_says_so():
    failed = Record(subject=Stage(Cell("wide", 0.5, 16), recovered=False), metric="status", value="OSError: disk")
    other = layers(Stage(Cell("wide", 0.5, 18), recovered=False), 0.9, 0.9)
    end = Record(subject=Stage(Cell("wide", 0.5, 18), recovered=False), metric="status", value=FINISHED)
    found = comparison([failed], other, [end], cell("wide", 0.5, 0.4, 0.6), methods=("wide",))
    rows = LAYERS_OF_METHODS.table(found)
    assert [row["skipped"] for row in rows if row["half"] == "ffn"] == [0.4, 0.6]
    assert "of several seeds by the first that finished" in LAYERS_OF_METHODS.about


def test_rows_are_compared_at_the_target_nearest_to_a_half():
    found = comparison(
        cell("wide", 0.25, 0.1, 0.2),
        cell("wide", 0.5, 0.4, 0.6),
        cell("wide", 0.5, 0.9, 0.9, recovered=True),
        cell("wide-uniform", 0.5, 0.5, 0.5),
        cell("ddp", 0.5, 0.3, 0.3, finished=False),
        cell(DENSE, 0.0, 0.0, 0.0),
    )
    svg, words = draw_svg(LAYERS_OF_METHODS, found)
    assert svg == draw_svg(LAYERS_OF_METHODS, found)[0]
    assert "FFN, wide: 40.00 at 0, 60.00 at 1" in words
    rows = LAYERS_OF_METHODS.table(found)
    assert list(rows[0]) == ["panel", "name", "half", "layer", "skipped"]
    assert {row["name"] for row in rows} == {"wide", "wide-uniform"}
    shown = [(row["layer"], row["skipped"]) for row in rows if (row["name"], row["half"]) == ("wide", "attention")]
    assert shown == [(0, 0.6), (1, 0.4)]


def test_layers_that_a_method_keeps_count_as_dense():
    subject = Stage(Cell("blockpruner", 0.5, 17), recovered=False)
    pruned = Record(subject=subject, metric="sparsity.ffn", value=1.0, layer=1)
    done = Record(subject=subject, metric="status", value=FINISHED)
    found = comparison(cell("wide", 0.5, 0.4, 0.6, 0.5), [pruned, done], methods=("wide", "blockpruner"))
    assert "FFN, blockpruner: 0.00 at 0, 100 at 1, 0.00 at 2" in draw_svg(LAYERS_OF_METHODS, found)[1]


def test_a_target_without_layers_leaves_the_place_to_the_next():
    found = comparison(cell("wide", 0.5), cell("wide", 0.7, 0.6, 0.8))
    assert [row["skipped"] for row in LAYERS_OF_METHODS.table(found) if row["half"] == "ffn"] == [0.6, 0.8]


def test_rows_without_layers_are_said_to_be_missing():
    with pytest.raises(MissingRecordsError, match=r"sparsity\.ffn"):
        LAYERS_OF_METHODS.table(comparison(cell("wide", 0.5)))
