"""A record that lacks a field, or has one of another kind, is left out and named; nothing ends in a traceback."""

import json
from dataclasses import replace

import pytest
from report_words import describe
from test_comparison_speed import measured, time_cell
from test_comparison_speed import write as write_comparison
from test_report import complete_records
from test_speed import forwards, group, part, product, step, write_bench
from test_speed import write_json as write_file

from wide.cli.main import main
from wide.records import Cell
from wide.report.comparison import read_comparison
from wide.report.comparison_figures import COMPARISON_FIGURES
from wide.report.comparison_tables import to_markdown, to_sheet, to_text
from wide.report.figure import MissingRecordsError, to_csv
from wide.report.run_figures import FIGURES
from wide.report.selection import Selection
from wide.report.speed import SPEED_FIGURES, Profile, bench_file
from wide.report.table import summary_table

GONE = object()
WRONG = (GONE, None, "words", [], {}, True, float("nan"), -1.0)


def show(figures, source):
    """Put the figures into values and words, as far as records go."""
    for figure in figures:
        try:
            assert to_csv(figure.table(source))
            assert describe(figure, source)
        except MissingRecordsError:
            continue


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
    skipped = {"skipped": {"attention": 0.5, "ffn": 0.5}}
    steps = [step("routed 0.5/0.5", batch, 1.5, **skipped) for batch in (1, 4)]
    naive = {"axis": "N", "size": 64, "group_size": 16, "active": 0.5, "candidate": "dense", "median_us": 5.0}
    naive |= {"active_tflops": 1.0, "peak_memory_bytes": 100, "accounted_traffic_bytes": 100.0}
    return {
        "operators": content["operators"] + sizes,
        "attention": content["attention"] + group(128, 1.2, 0.94) + group(512, 1.9, 0.5),
        "endtoend": [*forwards(), *steps],
        "naive": [naive, naive | {"candidate": "fused", "accounted_storage_bytes": 10.0}],
        "breakdown": [part("dense", 4.0), part("routed", 2.0)],
    }


@pytest.mark.parametrize("name", ["operators", "attention", "endtoend", "naive", "breakdown"])
def test_no_field_of_a_bench_is_taken_for_granted(name, tmp_path):
    records = bench_records(tmp_path)[name]
    kinds = {frozenset(record): place for place, record in enumerate(records)}
    for place in kinds.values():
        for field in records[place]:
            for value in WRONG:
                content = {"device": "GPU", "records": with_wrong(records, place, field, value)}
                content |= {"ffn_group_size": 64, "skipped": "0.5"}
                profile = Profile((bench_file(f"{name}.json", content),))
                show(SPEED_FIGURES, profile)
                assert all(table.rows for table in profile.others().values())
    for value in ({}, None, 3, "words", []):
        profile = Profile((bench_file(f"{name}.json", {"device": value, "records": [value, *records]}),))
        assert value == {} or any("damaged" in note for note in profile.notes)


@pytest.mark.parametrize("field", ["tokens", "what"])
def test_what_a_bench_lacks_is_said_under_the_figure_and_on_the_console(field, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    records = list(forwards())
    write_file(tmp_path / "endtoend.json", with_wrong(records, 1, field, GONE), model="M", ffn_group_size=64)
    assert main(["report", str(tmp_path)]) == 0
    words = f"1 of {len(records)} records left out, without '{field}'"
    assert words in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text().replace("&#39;", "'")
    assert page.count(words) == 1


def test_no_value_of_a_run_is_taken_for_granted():
    records = list(complete_records())
    first = {record.metric: place for place, record in reversed(list(enumerate(records)))}
    for metric, place in first.items():
        for value in (None, "words", {}, [], {"groups": [1], "tokens": ["a"], "shares": 3}, True, 5.0):
            run = Selection([*records[:place], replace(records[place], value=value), *records[place + 1 :]])
            show(FIGURES, run)
            summary_table(run).to_markdown()
            assert value is not None or any(repr(metric) in note for note in run.notes)


@pytest.mark.usefixtures("drawn_at_once")
def test_no_value_of_a_comparison_is_taken_for_granted(tmp_path):
    settings = {"ffn_group_size": 64, "attention_group_size": None}
    cells = [Cell("wide", 0.5, 17), Cell("tyr", 0.5, 17)]
    groups = [measured(cell, 12.0, settings=settings | {"ffn_group_size": 32 * n}) for n, cell in enumerate(cells, 1)]
    folder = write_comparison(tmp_path / "one", ["wide", "tyr"], *groups)
    time_cell(folder, cells[0], 1.2)
    file = folder / "compare.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    windows = {"metric": "token_perplexity.windows", "value": [[10.0, 5], [11.0, 5]]}
    lines += [line | windows for line in lines if line["metric"] == "token_perplexity"]
    for place, line in {each["metric"]: (place, each) for place, each in enumerate(lines)}.values():
        for value in (None, "words", [[1]], {"ffn_group_size": "64"}, 7.0, []):
            file.write_text("".join(f"{json.dumps(each)}\n" for each in with_wrong(lines, place, "value", value)))
            unreadable = value == "words" and line["metric"] in ("settings", "token_perplexity.windows")
            if unreadable or line["metric"] in ("grid.methods", "grid.sparsities"):
                assert main(["report", str(folder)]) in (0, 1)
                continue
            found = read_comparison(folder)
            if line["metric"] != "token_perplexity.windows":
                assert to_text(found)
                assert to_markdown(found)
                assert to_sheet(found)
                show(COMPARISON_FIGURES, found)
            assert value is not None or any(repr(line["metric"]) in note for note in found.notes)


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
    assert "'token_perplexity' is damaged" in said
