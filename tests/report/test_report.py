"""The report: drawn from records alone, self-contained, and honest about what is missing."""

import base64
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from wide.records import Record, RecordFile
from wide.report.drawing import draw_svg
from wide.report.figures import FIGURES, layer_sparsity, perplexity
from wide.report.page import write_report
from wide.report.selection import MissingRecordsError, Selection
from wide.report.table import layer_lines, summary_table


def record(subject, metric, value, unit="", **place):
    return Record(subject=subject, metric=metric, value=value, unit=unit, **place)


def complete_records():
    yield record("run", "model", "models/<nano>", "text")
    yield record("run", "target.sparsity", 0.5, "share")
    for subject, value in (("dense", 40.0), ("untrained", 4000.0), ("stage 1", 90.0), ("stage 1+2", 60.0)):
        yield record(subject, "token_perplexity", value)
        yield record(subject, "sample", f"text of {subject} <script>alert(1)</script>", "text")
        if subject != "dense":
            for metric in ("attention", "ffn", "mean", "linear_flops"):
                yield record(subject, f"sparsity.{metric}", 0.51, "share")
            for layer in range(3):
                yield record(subject, "sparsity.attention", 0.2 * layer, "share", layer=layer)
                yield record(subject, "sparsity.ffn", 0.3 * layer, "share", layer=layer)
    for stage in ("stage 1", "stage 1+2"):
        yield record(stage, "training.tokens_per_second", 1234.0)
        for step in range(0, 40, 10):
            for metric in ("lm_loss", "sparsity.attention", "sparsity.ffn", "sparsity.target", "temperature"):
                yield record(stage, f"training.{metric}", 1.0 / (1 + step), step=step)


def write(tmp_path, records):
    file = RecordFile(tmp_path / "records.jsonl", device="cpu")
    file.append(records)
    return write_report(file.path, tmp_path)


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_page_is_self_contained_and_every_picture_has_words(tmp_path):
    page, picture = write(tmp_path, complete_records())
    html = Page(page.read_text())
    assert {tag for tag, _ in html.tags} & {"script", "link", "iframe"} == set()
    images = [attrs for tag, attrs in html.tags if tag == "img"]
    assert len(images) == len(FIGURES)
    for image in images:
        assert image["src"].startswith("data:image/svg+xml;base64,")
        assert len(image["alt"]) > 20
        svg = base64.b64decode(image["src"].partition(",")[2]).decode()
        assert not re.findall(r'href="(?!#)', svg)
    assert "http" not in re.sub(r'src="[^"]*"', "", page.read_text())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_text_from_outside_is_escaped(tmp_path):
    page, _ = write(tmp_path, complete_records())
    assert "&lt;script&gt;alert(1)" in page.read_text()
    assert "models/&lt;nano&gt;" in page.read_text()


def test_missing_records_are_named_instead_of_drawn(tmp_path):
    page, picture = write(tmp_path, [record("run", "model", "M", "text")])
    text = page.read_text()
    assert text.count('class="missing"') == len(FIGURES) + 1
    assert "token_perplexity" in text
    assert picture.exists()


def test_a_cut_record_is_mentioned(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(complete_records())
    with file.path.open("a") as stream:
        stream.write('{"subject": "sta')
    page, _ = write_report(file.path, tmp_path)
    assert "was cut while being written" in page.read_text()


def test_table_holds_the_measured_figures_and_only_those():
    table = summary_table(Selection(list(complete_records())))
    assert table.header[:3] == ("model", "perplexity", "x dense")
    assert "accuracy %" not in table.header
    assert table.rows[0][:4] == ("dense", "40.00", "1.00", "-")
    assert table.rows[3][:4] == ("stage 1+2 (routers, LoRA)", "60.00", "1.50", "51.0")
    lines = table.to_text().splitlines()
    assert len(lines) == 2 + len(table.rows)


def test_the_latest_of_repeated_measurements_counts():
    run = Selection([record("dense", "token_perplexity", 1.0), record("dense", "token_perplexity", 2.0)])
    assert run.number("dense", "token_perplexity") == 2.0


def test_layers_are_listed_for_the_last_subject():
    lines = layer_lines(Selection(list(complete_records())))
    assert "stage 1+2" in lines[0]
    assert lines[1].split() == ["attention", "0%", "20%", "40%"]


@pytest.mark.parametrize("draw", [perplexity, layer_sparsity])
def test_figures_describe_what_they_show(draw):
    svg, words = draw_svg(draw, (6.0, 3.0), Selection(list(complete_records())))
    assert svg.lstrip().startswith("<?xml")
    assert "60" in words


def test_figures_refuse_to_draw_nothing():
    for _, draw, size in FIGURES:
        with pytest.raises(MissingRecordsError, match="no record"):
            draw_svg(draw, size, Selection([]))


def test_report_needs_no_torch():
    code = "import sys, wide.report.page, wide.report.figures; assert not {'torch', 'matplotlib'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
