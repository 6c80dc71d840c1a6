"""A comparison's cells against their measured speed and their work."""

import csv
import io
import json

import pytest
from report_words import draw_svg

from wide.records import Cell, Record, RecordFile, Stage
from wide.report.comparison import DENSE, FINISHED, PERPLEXITY, read_comparison
from wide.report.comparison_figures import COMPARISON_FIGURES
from wide.report.figure import MissingRecordsError, to_csv

FIGURES = {figure.name: figure for figure in COMPARISON_FIGURES}
DENSE_CELL = Cell(DENSE, 0.0, 17)


def rows(name, text):
    """Return the lines of a figure's sheet as dictionaries."""
    return list(csv.DictReader(io.StringIO(to_csv(FIGURES[name].table(text)))))


def measured(cell, perplexity, *, work=0.4, settings=None, recovered=False):
    subject = Stage(cell, recovered=recovered)
    yield Record(subject=subject, metric=PERPLEXITY, value=perplexity)
    yield Record(subject=subject, metric="sparsity.linear_flops_layers", value=work)
    if settings is not None:
        yield Record(subject=subject, metric="settings", value=settings)
    yield Record(subject=subject, metric="status", value=FINISHED)


def write(folder, methods, *groups, dense=10.0, model="M", text="held out", recovers=False):
    facts = {"model": model, "held-out text": text, "description": folder.name}
    facts |= {"grid.methods": list(methods), "grid.sparsities": [0.5, 0.25]}
    run = [Record(subject="run", metric=metric, value=value) for metric, value in facts.items()]
    run.append(Record(subject="run", metric="grid.recovers", value=float(recovers)))
    folder.mkdir(exist_ok=True)
    RecordFile(folder / "compare.jsonl", device="cpu").append(
        [*run, *measured(DENSE_CELL, dense, work=0.0), *(record for group in groups for record in group)]
    )
    return folder


def time_cell(folder, cell, speedup, *, candidate="pruned", model="M", what="prefill", batch=1):
    place = folder / "cells" / cell.folder / "profile"
    place.mkdir(parents=True)
    own = {"what": what, "tokens": 64, "batch": batch, "median_us": 5.0}
    records = [own | {"candidate": "dense", "speedup": 1.0}, own | {"candidate": candidate, "speedup": speedup}]
    (place / "endtoend.json").write_text(json.dumps({"device": "GPU", "model": model, "records": records}))


@pytest.fixture
def timed(tmp_path):
    """A comparison of a static and a routed row, two of whose cells were timed."""
    static, routed, untimed = Cell("tyr", 0.25, 17), Cell("wide", 0.5, 17), Cell("wide", 0.25, 17)
    cells = (measured(static, 12.0), measured(routed, 14.0), measured(untimed, 11.0))
    folder = write(tmp_path / "one", ["tyr", "wide"], *cells)
    time_cell(folder, static, 1.25)
    time_cell(folder, routed, 0.9, candidate="own routing", batch=4)
    return folder


def test_folders_name_their_cell():
    for cell in (Cell("wide-g32", 0.25, 17), Cell("shortened-ppl", 0.5, 2)):
        assert Cell.from_folder(cell.folder) == cell
    for other in ("adapter", "wide-seed3", "wide-half-seed3", "wide-0.5-seedy"):
        assert Cell.from_folder(other) is None


def test_each_checkpoint_has_its_own_perplexity_and_speed(timed):
    found = read_comparison(timed)
    svg, words = draw_svg(FIGURES["quality-speed"], found)
    assert "prefill, 64 tokens, tyr: 12.00 at 1.25" in words
    assert "prefill, 64 tokens, batch 4, wide: 14.00 at 0.9" in words
    assert svg.startswith("<?xml")
    lines = rows("quality-speed", found)
    assert [(line["method"], line["sparsity"], line["batch"], line["speedup"]) for line in lines] == [
        ("wide", "0.5", "4", "0.9"),
        ("tyr", "0.25", "1", "1.25"),
    ]


def test_speeds_of_another_model_or_of_unfinished_cells_are_not_drawn(tmp_path):
    finished, begun = Cell("tyr", 0.25, 17), Cell("tyr", 0.5, 17)
    unfinished = [record for record in measured(begun, 20.0) if record.metric != "status"]
    folder = write(tmp_path / "one", ["tyr"], measured(finished, 12.0), unfinished)
    time_cell(folder, finished, 1.25, model="another")
    time_cell(folder, begun, 1.5)
    with pytest.raises(MissingRecordsError, match="--comparison DIR"):
        draw_svg(FIGURES["quality-speed"], read_comparison(folder))


def test_what_is_far_worse_is_an_arrow(tmp_path):
    far = Cell("tyr", 0.5, 17)
    folder = write(tmp_path / "one", ["tyr"], measured(far, 9000.0))
    time_cell(folder, far, 2.0)
    (line,) = rows("quality-speed", read_comparison(folder))
    assert (line["perplexity"], line["drawn"], line["words"]) == ("9000.0", "60.0", "50 ↑")


def test_quality_is_drawn_over_the_measured_work(tmp_path):
    cells = [measured(Cell("tyr", 0.25, 17), 12.0, work=0.2), measured(Cell("tyr", 0.5, 17), 20.0, work=0.4)]
    nothing_saved = measured(Cell("slicegpt", 0.5, 17), 11.0, work=0.0)
    found = read_comparison(write(tmp_path / "one", ["tyr", "slicegpt"], *cells, nothing_saved))
    _, words = draw_svg(FIGURES["quality-work"], found)
    assert "tyr (without LoRA): 1.20 at 20, 2.00 at 40" in words
    assert [line["method"] for line in rows("quality-work", found)] == ["tyr", "tyr"]
    nothing = read_comparison(write(tmp_path / "two", ["slicegpt"]))
    with pytest.raises(MissingRecordsError, match="linear_flops_layers"):
        draw_svg(FIGURES["quality-work"], nothing)
