"""A record that lacks a field, or has one of another kind, is left out and named; nothing ends in a traceback."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from test_comparison_speed import measured, time_cell
from test_comparison_speed import write as write_comparison
from test_report import complete_records
from test_speed import depth_record, forwards, write_bench
from test_speed import write_json as write_file
from test_sweeps import group, product, step

from wide.cli.main import main
from wide.report.bench_files import bench_file
from wide.report.cells import Cell
from wide.report.comparison_figures import COMPARISON_FIGURES
from wide.report.comparison_page import read_comparison
from wide.report.comparison_tables import to_csv, to_html, to_text
from wide.report.depth_figures import DEPTH_FIGURES, depth_table
from wide.report.drawing import _new_figure, _style
from wide.report.figures import FIGURES
from wide.report.naive_figures import NAIVE_FIGURES, traffic_table
from wide.report.page import sample_section
from wide.report.profiles import Profile
from wide.report.selection import MissingRecordsError, Selection
from wide.report.speed_figures import SPEED_FIGURES
from wide.report.sweep_figures import SWEEP_FIGURES
from wide.report.table import layer_lines, summary_table

GONE = object()
WRONG = (GONE, None, "words", [], {}, True, float("nan"), -1.0)


def sheets(figures, source):
    """Return the values of the figures that records are enough for, by name."""
    found = {}
    for figure in figures:
        try:
            found[figure.name] = figure.sheet(source).to_csv()
        except MissingRecordsError:
            continue
    return found


def draw(figures, source, drawn):
    """Draw the figures whose values are others than those drawn before, as far as records go, without rendering."""
    pytest.importorskip("matplotlib")
    found = sheets(figures, source)
    for figure in figures:
        if figure.name in found and found[figure.name] not in drawn:
            drawn.add(found[figure.name])
            with _style():
                figure.draw(_new_figure(figure.size_of(source)), source)
            figure.origins(source)


def with_wrong(records, place, field, value):
    """Return the records with one field of one of them gone or wrong."""
    changed = {key: each for key, each in records[place].items() if key != field}
    return [*records[:place], changed if value is GONE else changed | {field: value}, *records[place + 1 :]]


def bench_records(folder):
    """Return the records of one small file of each bench, by name."""
    write_bench(folder)
    content = {
        name: json.loads((folder / f"{name}.json").read_text())["records"] for name in ("operators", "attention")
    }
    sizes = [record for size in (128, 256) for record in product(size, 0.5, 80.0)]
    skipped = {"skipped": {"attention": 0.5, "ffn": 0.5}, "ceiling": 1.9, "energy_j": 1.0}
    steps = [step("routed 0.5/0.5", batch, 1.5, **skipped) for batch in (1, 4)]
    naive = {"axis": "N", "size": 64, "group_size": 16, "active": 0.5, "candidate": "dense", "median_us": 5.0}
    naive |= {"active_tflops": 1.0, "peak_memory_bytes": 100, "accounted_traffic_bytes": 100.0}
    return {
        "operators": content["operators"] + sizes,
        "attention": content["attention"] + group(128, 1.2, 0.94) + group(512, 1.9, 0.5),
        "endtoend": [*forwards(), *steps],
        "naive": [naive, naive | {"candidate": "fused", "accounted_storage_bytes": 10.0}],
        "depth": [depth_record("dense", 20.0, GEMM=20.0), depth_record("fused", 12.0, GEMM=12.0)],
    }


DRAWN = {"naive": NAIVE_FIGURES, "depth": DEPTH_FIGURES}


@pytest.mark.parametrize("name", ["operators", "attention", "endtoend", "naive", "depth"])
def test_no_field_of_a_bench_is_taken_for_granted(name, tmp_path):
    records = bench_records(tmp_path)[name]
    drawn = set()
    kinds = {frozenset(record): place for place, record in enumerate(records)}
    for place in kinds.values():
        for field in records[place]:
            for value in WRONG:
                content = {"device": "GPU", "records": with_wrong(records, place, field, value)}
                profile = Profile([bench_file(f"{name}.json", content)])
                draw(DRAWN.get(name, (*SPEED_FIGURES, *SWEEP_FIGURES)), profile, drawn)
                if name == "naive":
                    assert traffic_table(profile).rows
                if name == "depth":
                    assert depth_table(profile).rows
    for value in ({}, None, 3, "words", []):
        profile = Profile([bench_file(f"{name}.json", {"device": value, "records": [value, *records]})])
        assert name == "naive" or value == {} or any("without any fields" in note for note in profile.notes)


@pytest.mark.parametrize("field", ["speedup", "what"])
def test_what_a_bench_lacks_is_said_under_the_figure_and_on_the_console(field, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    records = list(forwards())
    write_file(tmp_path / "endtoend.json", with_wrong(records, 1, field, GONE), model="M", ffn_group_size=64)
    assert main(["report", str(tmp_path)]) == 0
    words = f"1 of {len(records)} records left out, without a usable '{field}'"
    assert words in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text().replace("&#x27;", "'")
    # Under the figures that are drawn from the file, and once more among the notes.
    assert page.count(words) >= 2


def test_no_value_of_a_run_is_taken_for_granted():
    records = list(complete_records())
    drawn = set()
    first = {record.metric: place for place, record in reversed(list(enumerate(records)))}
    for metric, place in first.items():
        for value in (None, "words", "{}", "[]", '{"groups": [1], "tokens": ["a"], "shares": 3}', [], True, 5.0):
            changed = [*records[:place], replace(records[place], value=value), *records[place + 1 :]]
            run = Selection(changed)
            draw(FIGURES, run, drawn)
            summary_table(run).to_html()
            layer_lines(run)
            with suppress(MissingRecordsError):
                sample_section(run.json("stage 1+2", "routing.sample"))
            assert value is not None or any(repr(metric) in note for note in run.notes)
    for field in ("subject", "metric", "layer", "step", "device", "versions", "time"):
        for value in (None, [], {"torch": 3}, 5.5):
            run = Selection([replace(records[3], **{field: value}), *records])
            assert summary_table(run).rows


def test_no_value_of_a_comparison_is_taken_for_granted(tmp_path):
    settings = {"ffn_group_size": 64, "attention_group_size": None}
    cells = [Cell("wide", 0.5, 17), Cell("tyr", 0.5, 17)]
    groups = [measured(cell, 12.0, settings=settings | {"ffn_group_size": 32 * n}) for n, cell in enumerate(cells, 1)]
    folder = write_comparison(tmp_path / "one", ["wide", "tyr"], *groups)
    time_cell(folder, cells[0], 1.2)
    file = folder / "compare.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    windows = {"metric": "token_perplexity.windows", "value": "[[10.0, 5], [11.0, 5]]"}
    records += [{"subject": cell.subject(recovered=False), **windows} for cell in (*cells, Cell("dense", 0.0, 17))]
    drawn = set()
    for place, record in enumerate(records):
        for value in (None, "words", "[[1]]", "[[null, 2]]", '{"ffn_group_size": "64"}', 7.0, []):
            lines = with_wrong(records, place, "value", value)
            file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            if record["metric"].startswith("grid.") and record["metric"] != "grid.recovers":
                assert main(["report", str(folder)]) in (0, 1)
                continue
            found = read_comparison(file)
            assert to_text(found)
            assert to_html(found)
            assert to_csv(found)
            draw(COMPARISON_FIGURES, found, drawn)
            assert value is not None or any(repr(record["metric"]) in note for note in found.notes)


def test_a_file_of_damaged_lines_is_no_run(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "records.jsonl").write_text("neither\nof these\n{is a record\n")
    assert main(["report", str(tmp_path)]) == 1
    assert "holds no record" in capsys.readouterr().err
    (tmp_path / "records.jsonl").write_text(
        '{"subject": "dense", "metric": "token_perplexity", "value": null}\nnor this\n'
    )
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "line 2 of records.jsonl was cut" in said
    assert "'token_perplexity' is no number" in said
