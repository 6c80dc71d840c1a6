"""The tables of a comparison: means over seeds, errors, ratios, failures and deviations, from records alone."""

import csv
import io
import math

import numpy as np
import pytest
from report_words import draw_svg

from wide.errors import DataError
from wide.evaluation.tasks import ZERO_SHOT_TASKS
from wide.records import Cell, Record, RecordFile, Stage, read_records
from wide.report.comparison import DENSE, FINISHED, PERPLEXITY, RATIO, RETENTION, Comparison, Row, read_comparison
from wide.report.comparison_figures import COMPARISON_FIGURES
from wide.report.comparison_tables import (
    TASK_NAMES,
    facts_table,
    footnotes,
    quality_table,
    tasks_table,
    to_markdown,
    to_sheet,
    to_text,
)
from wide.report.figure import MissingRecordsError, to_csv
from wide.report.folders import draw_comparison
from wide.report.selection import Selection
from wide.standard_error import perplexity_stderr


def grid(methods=("slicegpt", "tyr"), sparsities=(0.5, 0.25), recovers=True):
    yield Record(subject="run", metric="model", value="models/<nano>")
    yield Record(subject="run", metric="grid.methods", value=list(methods))
    yield Record(subject="run", metric="grid.sparsities", value=list(sparsities))
    yield Record(subject="run", metric="grid.recovers", value=float(recovers))


def windows_of(perplexity, noise=0.1):
    if math.isinf(perplexity):
        return [[math.inf, 10]] * 32
    losses = np.log(perplexity) + noise * np.random.default_rng(len(str(perplexity))).standard_normal(32)
    losses += np.log(perplexity) - losses.mean()
    return [[float(10 * loss), 10] for loss in losses]


def measured(cell, perplexity, *, recovered=False, deviations="", **shares):
    subject = Stage(cell, recovered=recovered)
    yield Record(subject=subject, metric="token_perplexity", value=perplexity)
    yield Record(subject=subject, metric="token_perplexity.windows", value=windows_of(perplexity))
    for name, value in shares.items():
        yield Record(subject=subject, metric=name.replace("__", "."), value=value)
    yield Record(subject=subject, metric="deviations", value=deviations)
    yield Record(subject=subject, metric="status", value=FINISHED)


def comparison(*groups):
    return Comparison(Selection([record for group in groups for record in group]))


FIGURES = {figure.name: figure for figure in COMPARISON_FIGURES}
DENSE_CELL, SLICE = Cell(DENSE, 0.0, 17), Cell("slicegpt", 0.25, 17)


def test_stages_of_cells_come_back_from_a_file(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    subjects = [Stage(cell, recovered=r) for cell in (SLICE, Cell("a/b", 1 / 3, 2)) for r in (False, True)]
    subjects += ["dense", "stage 1"]
    file.append(Record(subject=subject, metric="status", value=FINISHED) for subject in subjects)
    assert [record.subject for record in read_records(file.path)[0]] == subjects


def test_rows_are_those_asked_for_with_dense_first():
    rows = comparison(grid()).rows
    assert rows[:2] == [Row(DENSE, False), Row(DENSE, True)]
    assert [row.method for row in rows[2:]] == ["slicegpt", "slicegpt", "tyr", "tyr"]
    assert comparison(grid(recovers=False)).rows == [Row(DENSE, False), Row("slicegpt", False), Row("tyr", False)]


def test_one_seed_has_the_error_of_the_text_and_a_smaller_one_relative_to_dense():
    found = comparison(grid(), measured(DENSE_CELL, 10.0), measured(SLICE, 20.0))
    value = found.value(Row("slicegpt", False), 0.25, PERPLEXITY)
    assert (value.mean, value.seeds) == (20.0, 1)
    # 32 windows of standard deviation 0.1 nats each.
    assert value.error == pytest.approx(20 * 0.1 / math.sqrt(32), rel=0.4)
    ratio = found.value(Row("slicegpt", False), 0.25, RATIO)
    assert ratio.mean == 2.0
    assert ratio.error > 0
    assert found.value(Row(DENSE, False), 0.25, RATIO).error is None


def test_several_seeds_give_mean_and_spread():
    cells = [Cell("slicegpt", 0.25, seed) for seed in (1, 2, 3)]
    groups = [measured(cell, ppl) for cell, ppl in zip(cells, (18.0, 20.0, 22.0), strict=True)]
    value = comparison(grid(), measured(DENSE_CELL, 10.0), *groups).value(Row("slicegpt", False), 0.25, PERPLEXITY)
    assert (value.mean, value.error, value.seeds) == (20.0, 2.0, 3)


def test_what_rounds_to_zero_has_no_sign():
    shares = {"sparsity__mean": -1e-9, "sparsity__parameters_removed": -0.0, "method__seconds": -0.0}
    found = comparison(grid(recovers=False), measured(SLICE, 20.0, **shares))
    # All-zero columns are left out.
    other = measured(Cell("slicegpt", 0.5, 17), 20.0, sparsity__mean=0.5, sparsity__parameters_removed=0.5)
    whole = comparison(grid(recovers=False), measured(SLICE, 20.0, **shares), other)
    assert "-0" not in "".join(map(to_sheet, (found, whole))).replace("-09", "")
    lines = {line[:2]: line for line in facts_table(whole).rows}
    assert lines["slicegpt", "25"][3:5] == ("0.0", "0.0")


def test_perplexities_that_overflow_have_no_error():
    found = comparison(grid(), measured(SLICE, math.inf), measured(Cell("slicegpt", 0.25, 2), 5.0))
    value = found.value(Row("slicegpt", False), 0.25, PERPLEXITY)
    assert (value.mean, value.error) == (math.inf, None)
    assert "inf" in to_text(found)


def test_retention_is_relative_to_the_dense_model():
    found = comparison(
        grid(), measured(DENSE_CELL, 10.0, accuracy__average=0.8), measured(SLICE, 20.0, accuracy__average=0.6)
    )
    assert found.value(Row("slicegpt", False), 0.25, RETENTION).mean == pytest.approx(0.75)


def test_what_is_missing_is_a_dash_and_what_failed_says_why():
    failed = Record(subject=Stage(Cell("tyr", 0.5, 17), recovered=False), metric="status", value="ValueError: no heads")
    found = comparison(grid(), measured(DENSE_CELL, 10.0), measured(SLICE, 20.0), [failed])
    table = quality_table(found)
    lines = {line[0]: line for line in table.rows}
    assert lines["tyr"][1:] == ("-", "-", "failed", "-")
    assert lines["slicegpt + LoRA"][1:] == ("-",) * 4
    assert footnotes(found) == ["failed: tyr, 0.5, seed 17: ValueError: no heads"]
    assert [stage.cell.method for stage in found.failures(Row("tyr", False), 0.5)] == ["tyr"]
    assert found.failures(Row("tyr", False), 0.25) == {}


def test_a_cell_that_failed_and_then_succeeded_has_succeeded():
    subject = Stage(SLICE, recovered=False)
    failed = [Record(subject=subject, metric="status", value="OSError: disk")]
    found = comparison(grid(), failed, measured(SLICE, 20.0))
    assert found.failures() == {}
    assert found.seeds(Row("slicegpt", False), 0.25) == [17]


def test_a_cell_without_an_end_does_not_count():
    begun = [record for record in measured(SLICE, 20.0) if record.metric != "status"]
    assert comparison(grid(), begun).value(Row("slicegpt", False), 0.25, PERPLEXITY) is None


def test_deviations_are_footnotes_of_their_row():
    found = comparison(
        grid(recovers=False),
        measured(SLICE, 20.0, deviations="fewer windows\nanother corpus"),
        measured(Cell("slicegpt", 0.5, 17), 30.0, deviations="fewer windows"),
    )
    assert footnotes(found) == ["[1] slicegpt: fewer windows", "[1] slicegpt: another corpus (at 25 %)"]
    assert quality_table(found).rows[1][0] == "slicegpt [1]"


def test_a_deviation_of_some_seeds_names_them():
    at = [
        measured(Cell("slicegpt", 0.25, seed), 20.0, deviations="all" if seed == 17 else "all\nsome")
        for seed in (17, 18)
    ]
    other = [measured(Cell("slicegpt", 0.5, seed), 20.0, deviations="all\nhalf") for seed in (17, 18)]
    # What failed holds nowhere.
    failed = Record(subject=Stage(Cell("slicegpt", 0.5, 19), recovered=False), metric="status", value="OSError: disk")
    notes = footnotes(comparison(grid(recovers=False), *at, *other, [failed]))
    assert notes[:2] == ["[1] slicegpt: all", "[1] slicegpt: some (at 25 % with seed 18)"]
    assert notes[2] == "[1] slicegpt: half (at 50 %)"


def test_a_mean_of_fewer_seeds_than_were_asked_for_says_so():
    cells = [Cell("slicegpt", 0.25, seed) for seed in (1, 2, 3)]
    failed = [Record(subject=Stage(cells[2], recovered=False), metric="status", value="OSError: disk")]
    first = measured(cells[0], 18.0, accuracy__average=0.5, sparsity__mean=0.25)
    found = comparison(
        grid(recovers=False, sparsities=(0.25,)), first, measured(cells[1], 22.0, sparsity__mean=0.25), failed
    )
    assert quality_table(found).rows[1][1:] == ("20.00 ± 2.83 (2 of 3 seeds)", "50.0 (1 of 3 seeds)")
    assert "25.0 ± 0.0 (2 of 3 seeds)" in facts_table(found).rows[1]


@pytest.mark.parametrize(("tokens", "shown"), [(999_600, "1 M"), (999.6, "1 k"), (12_345, "12.3 k"), (0, "0")])
def test_amounts_are_rounded_before_their_unit_is_chosen(tokens, shown):
    rest = measured(Cell("tyr", 0.25, 17), 20.0, method__tokens_forward=1)
    found = comparison(grid(recovers=False), measured(SLICE, 20.0, method__tokens_forward=tokens), rest)
    assert facts_table(found).rows[1][-1] == shown


def test_facts_have_a_line_for_each_target_and_dense_only_one():
    found = comparison(
        grid(recovers=False),
        measured(DENSE_CELL, 10.0, method__seconds=0.0),
        measured(SLICE, 20.0, sparsity__mean=0.25, method__seconds=123.4, method__tokens_forward=262_144),
    )
    table = facts_table(found)
    assert [line[:2] for line in table.rows] == [
        ("dense", "-"),
        ("slicegpt", "25"),
        ("tyr", "25"),
        ("slicegpt", "50"),
        ("tyr", "50"),
    ]
    slicegpt = dict(zip(table.header, table.rows[1], strict=True))
    assert (slicegpt["nominal %"], slicegpt["tokens fwd"], slicegpt["seconds"]) == ("25.0", "262 k", "123")


def test_facts_name_the_seeds():
    seeds = [measured(Cell("slicegpt", 0.25, seed), 20.0, sparsity__mean=0.25) for seed in (19, 17)]
    found = comparison(grid(recovers=False), measured(DENSE_CELL, 10.0), *seeds)
    assert [line[2] for line in facts_table(found).rows] == ["17", "17, 19", "-", "-", "-"]
    assert next(csv.DictReader(to_sheet(found).splitlines()[:1] + to_sheet(found).splitlines()[2:]))["seed"] == "17 19"


def test_single_tasks_are_a_table_as_in_the_papers_appendix():
    tasks = {"accuracy.hellaswag (302-item subset)": 0.3, "accuracy.arc_easy": 0.45, "accuracy.arc_easy.stderr": 0.02}
    tasks |= {"accuracy.average": 0.375, "word_perplexity": 70.0, "word_perplexity.stderr": 1.5}
    found = comparison(grid(recovers=False), measured(DENSE_CELL, 10.0, **tasks), measured(SLICE, 20.0, **tasks))
    table = tasks_table(found)
    names = ("word ppl", "ARC-E", "HellaSwag (302-item subset)", "accuracy %", "retention %")
    assert table.header == ("method", "target %", *names)
    assert table.rows[0] == ("dense", "-", "70.00 ± 1.50", "45.0 ± 2.0", "30.0", "37.5", "100.0")
    assert table.rows[1][:2] == ("slicegpt", "25")
    assert table.rows[2] == ("tyr", "25", "-", "-", "-", "-", "-")
    for text in (to_text(found), to_markdown(found)):
        assert "ARC-E" in text
    line = next(csv.DictReader(io.StringIO(to_sheet(found))))
    assert (line["accuracy.arc_easy"], line["accuracy.arc_easy.error"]) == ("0.45", "0.02")


def test_without_tasks_there_is_no_table_of_them():
    found = comparison(grid(), measured(DENSE_CELL, 10.0), measured(SLICE, 20.0))
    assert tasks_table(found) is None
    assert "Zero-shot" not in to_markdown(found)


def test_tasks_are_those_of_the_evaluation():
    assert tuple(TASK_NAMES) == ZERO_SHOT_TASKS


def test_sheet_holds_unrounded_figures():
    found = comparison(grid(), measured(DENSE_CELL, 10.0), measured(SLICE, 20.123456))
    lines = list(csv.DictReader(io.StringIO(to_sheet(found))))
    slicegpt = next(
        line for line in lines if (line["method"], line["recovered"], line["target"]) == ("slicegpt", "0", "0.25")
    )
    assert float(slicegpt["token_perplexity"]) == 20.123456
    assert float(slicegpt["token_perplexity.ratio"]) == pytest.approx(2.0123456)
    assert slicegpt["seeds"] == "1"


def test_files_are_written_and_text_from_outside_is_escaped(tmp_path):
    file = RecordFile(tmp_path / "compare.jsonl", device="cpu")
    file.append([*grid(), *measured(SLICE, 20.0, deviations="<b>bold</b> claims")])
    found = read_comparison(tmp_path)
    paths, _ = draw_comparison(found, tmp_path)
    assert sorted(path.name for path in paths) == ["report.html", "table.csv", "table.md"]
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;bold" in page
    assert "models/&lt;nano&gt;" in page
    assert (tmp_path / "table.md").read_text() == to_markdown(found)
    assert not list(tmp_path.glob(".*"))


def test_records_of_something_else_are_refused():
    with pytest.raises(DataError, match="not of a comparison"):
        comparison([Record(subject="dense", metric="token_perplexity", value=3.0)])


def test_the_error_of_a_perplexity_is_that_of_windows_drawn_again():
    generator = np.random.default_rng(1)
    tokens = generator.integers(1, 60, 400)
    losses = tokens * (2.0 + 0.3 * generator.standard_normal(400))
    draws = generator.multinomial(400, np.full(400, 1 / 400), size=4000)
    drawn_again = np.exp((draws @ losses) / (draws @ tokens)).std(ddof=1)
    assert perplexity_stderr(losses.tolist(), tokens.tolist()) == pytest.approx(drawn_again, rel=0.06)


def both_measured(perplexity, *, others=()):
    """Return a comparison of slicegpt and the dense model, which share their windows but for those in `others`."""
    dense = [*windows_of(10.0), *others]
    windows = [[loss + tokens * math.log(perplexity / 10.0), tokens] for loss, tokens in windows_of(10.0)]
    found = {DENSE_CELL: (10.0, dense), SLICE: (perplexity, windows)}
    records = [
        Record(subject=Stage(cell, recovered=False), metric=metric, value=value)
        for cell, (value, each) in found.items()
        for metric, value in {PERPLEXITY: value, f"{PERPLEXITY}.windows": each, "status": FINISHED}.items()
    ]
    return comparison(grid(), records)


def test_a_constant_factor_has_no_error_relative_to_dense():
    row, found = Row("slicegpt", False), both_measured(20.0)
    assert found.value(row, SLICE.sparsity, PERPLEXITY).error > 0.1
    assert found.value(row, SLICE.sparsity, RATIO).error == pytest.approx(0, abs=1e-9)


def test_other_windows_are_not_compared():
    value = both_measured(20.0, others=[[3.0, 4]]).value(Row("slicegpt", False), SLICE.sparsity, RATIO)
    assert value.mean == 2.0
    assert value.error is None


@pytest.mark.parametrize("losses", [[], [20.0], [math.inf, 1.0], [1e6, 1e6]])
def test_no_error_of_less_than_two_windows_or_of_what_overflows(losses):
    assert perplexity_stderr(losses, [10] * len(losses)) is None


def test_quality_is_drawn_over_sparsity():
    found = comparison(
        grid(),
        measured(DENSE_CELL, 10.0),
        measured(SLICE, 20.0),
        measured(Cell("slicegpt", 0.5, 17), math.inf),
        measured(Cell("tyr", 0.5, 17), 15.0, recovered=True),
    )
    figure = FIGURES["quality-sparsity"]
    _, words = draw_svg(figure, found)
    assert "perplexity, x dense, slicegpt (without LoRA): 2.00 at 25; " in words
    assert "tyr: 1.50 at 50" in words
    rows = list(csv.DictReader(io.StringIO(to_csv(figure.table(found)))))
    assert [(row["method"], row["recovered"], row["target"]) for row in rows] == [
        ("slicegpt", "0", "0.25"),
        ("tyr", "1", "0.5"),
    ]
    with pytest.raises(MissingRecordsError, match="no finished cell"):
        draw_svg(figure, comparison(grid(), measured(SLICE, 20.0)))
