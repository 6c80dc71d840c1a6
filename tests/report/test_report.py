"""The report: drawn from records alone, self-contained, and honest about what is missing."""

import base64
import csv
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from report_words import draw_svg

from wide.records import Record, RecordFile
from wide.report.drawing import FOLDER
from wide.report.figure import MissingRecordsError, to_csv
from wide.report.folders import draw_folder
from wide.report.run_figures import FIGURES
from wide.report.selection import NAMES, Selection
from wide.report.table import summary_table, verdict

PERPLEXITY, LAYERS, *ROUTING, _ = FIGURES


def record(subject, metric, value, unit="", **place):
    return Record(subject=subject, metric=metric, value=value, unit=unit, **place)


def complete_records():
    yield record("run", "model", "models/<nano>", "text")
    yield record("run", "target.sparsity", 0.5, "share")
    for subject, value in (("dense", 40.0), ("stage 1", 90.0), ("stage 1+2", 60.0)):
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
    yield from routing_records()


def routing_records():
    for half in ("attention", "ffn"):
        for layer in range(3):
            shares = {"groups": 4, "shares": [0.1, 0.99, 0.5, 0.0]}
            yield record("stage 1+2", f"routing.{half}.by_group", shares, "json", layer=layer)
            yield record("stage 1+2", f"routing.{half}.same_as_previous", 0.8, "share", layer=layer)
            yield record("stage 1+2", f"routing.{half}.same_by_chance", 0.6, "share", layer=layer)
        yield record("stage 1+2", f"routing.{half}.flips_bfloat16", 0.001, "share")
        yield record("stage 1+2", f"routing.{half}.token_correlation", [0.4, 0.2, None], "json")
        yield record("stage 1+2", f"routing.{half}.group_correlation", [0.1, None, -0.1], "json")
        matrix = {"groups": [0, 1, 3], "phi": [[1, 0.2, None], [0.2, 1, None], [None, None, None]]}
        yield record("stage 1+2", f"routing.{half}.group_matrix", matrix, "json", layer=2)
    sample = {"tokens": ["Once", " up", "on\n", "", " <b>"], "attention": [[10, 20, 30]] * 4 + [[90, 90, 90]]}
    sample["ffn"] = [[50, None, 30]] * 5
    yield record("stage 1+2", "routing.sample", sample, "json")


def write(tmp_path, records):
    file = RecordFile(tmp_path / "records.jsonl", device="cpu")
    file.append(records)
    return draw_folder(tmp_path)[0][0]


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return write(folder, complete_records())


def test_page_is_self_contained_and_every_picture_has_words(drawn):
    html = Page(drawn.read_text())
    assert {tag for tag, _ in html.tags} & {"script", "link", "iframe"} == set()
    images = [attrs for tag, attrs in html.tags if tag == "img"]
    assert len(images) == len(FIGURES)
    for image in images:
        assert image["src"].startswith("data:image/svg+xml;base64,")
        assert len(image["alt"]) > 20
        svg = base64.b64decode(image["src"].partition(",")[2]).decode()
        assert not re.findall(r'href="(?!#|data:)', svg)
    assert "http" not in re.sub(r'src="[^"]*"', "", drawn.read_text())


def test_every_figure_lies_beside_the_page_with_its_values(drawn):
    page = drawn
    links = {attrs["href"] for tag, attrs in Page(page.read_text()).tags if tag == "a"}
    for figure in FIGURES:
        for kind in ("csv", "svg", "png"):
            path = page.parent / FOLDER / f"{figure.name}.{kind}"
            assert path.stat().st_size > 40, path
            assert f"{FOLDER}/{path.name}" in links
    with (page.parent / FOLDER / "group-patterns.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 24
    assert rows[1] == {"half": "attention", "layer": "0", "groups": "4", "group_or_bin": "1", "share_of_tokens": "0.99"}


@pytest.mark.parametrize("name", ["training", "tokens", "stability"])
def test_same_records_give_the_same_bytes(drawn, name):
    page = drawn
    figure = next(figure for figure in FIGURES if figure.name == name)
    run = Selection(list(complete_records()))
    assert (page.parent / FOLDER / f"{name}.svg").read_text() == draw_svg(figure, run)[0]
    assert (page.parent / FOLDER / f"{name}.csv").read_text() == to_csv(figure.table(run))


def test_text_from_outside_is_escaped(drawn):
    page = drawn
    assert "&lt;script&gt;alert(1)" in page.read_text()
    assert "models/&lt;nano&gt;" in page.read_text()
    assert "<b>" not in page.read_text()


def test_missing_records_are_named_instead_of_drawn(tmp_path):
    text = write(tmp_path, [record("run", "model", "M", "text")]).read_text()
    assert text.partition("<h2>Not drawn</h2>")[2].count("<li>") == len(FIGURES)
    assert "speed of this model was not measured" in text
    assert "token_perplexity" in text
    assert "routing.sample" in text
    assert not list((tmp_path / FOLDER).glob("*"))


def test_half_a_routing_is_drawn_as_far_as_it_goes():
    records = [r for r in complete_records() if ".ffn." not in r.metric and r.metric != "routing.sample"]
    records += [record("stage 1+2", "routing.sample", {"tokens": ["a", "b"], "ffn": [[1], [2]]}, "json")]
    run = Selection(records)
    for figure in ROUTING:
        _, words = draw_svg(figure, run)
        assert figure.name == "tokens" or "FFN" not in words + to_csv(figure.table(run))


def test_a_damaged_record_is_said_to_be_damaged(tmp_path):
    text = write(tmp_path, [record("stage 1+2", "routing.sample", {"tokens": 5, "ffn": 3}, "json")]).read_text()
    assert "its records are damaged" in text
    assert not (tmp_path / FOLDER / "tokens.svg").exists()


def test_a_cut_record_is_mentioned(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(r for r in complete_records() if not r.metric.startswith(("routing", "training")))
    with file.path.open("a") as stream:
        stream.write('{"subject": "sta')
    (page,), _ = draw_folder(tmp_path)
    assert "was cut while being written" in page.read_text()


def test_table_holds_the_measured_figures_and_only_those():
    table = summary_table(Selection(list(complete_records())))
    assert table.header[:3] == ("model", "perplexity", "x dense")
    assert "accuracy %" not in table.header
    assert table.rows[0][:4] == ("dense", "40.00", "1.00", "-")
    assert table.rows[2][:4] == ("stage 1+2 (routers, LoRA)", "60.00", "1.50", "51.0")
    lines = table.to_text().splitlines()
    assert len(lines) == 2 + len(table.rows)


def test_the_latest_of_repeated_measurements_counts():
    run = Selection([record("dense", "token_perplexity", 1.0), record("dense", "token_perplexity", 2.0)])
    assert run.number("dense", "token_perplexity") == 2.0


def test_every_subject_has_a_name_and_can_be_drawn():
    run = Selection([record(subject, "token_perplexity", 3.0) for subject in NAMES])
    _, words = draw_svg(PERPLEXITY, run)
    assert all(name in words for name in NAMES.values())


def test_the_verdict_has_window_tokens_error_and_the_measure_that_was_asked_for():
    windows = {
        "dense": [[20.0, 10], [30.0, 10]],
        "dense + LoRA": [[20.0, 10], [29.0, 10]],
        "stage 1+2": [[25.0, 10], [33.0, 10]],
    }
    found = [record("run", "target", "skip 50% of the prunable work"), record("run", "target.sparsity", 0.5)]
    for subject, losses in windows.items():
        value = math.exp(sum(loss for loss, _ in losses) / 20)
        where = "text, 20 tokens, window 10, stride 10"
        found += [record(subject, "token_perplexity", value, where=where)]
        found += [record(subject, "token_perplexity.windows", losses)]
    shares = {"mean": 0.41, "linear_flops": 0.489, "linear_flops_layers": 0.46}
    found += [record("stage 1+2", f"sparsity.{name}", share) for name, share in shares.items()]
    first, second = verdict(Selection(found))
    assert first == (
        "1.57 ± 0.08 times the perplexity of the dense model with the same LoRA, with 48.9 % of the prunable work "
        "skipped (50 % was asked for)."
    )
    assert "text, 20 tokens, window 10, stride 10" in second
    assert "18.17 ± 7.27" in second
    table = summary_table(Selection(found))
    assert table.rows[-1][table.header.index("skipped %")] == "48.9"


@pytest.mark.parametrize("figure", [PERPLEXITY, LAYERS])
def test_figures_describe_what_they_show(figure):
    svg, words = draw_svg(figure, Selection(list(complete_records())))
    assert svg.lstrip().startswith("<?xml")
    assert "60" in words


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_figures_refuse_to_draw_nothing(figure):
    for make in (lambda run: draw_svg(figure, run), figure.table):
        with pytest.raises(MissingRecordsError, match="no record"):
            make(Selection([]))


def test_report_needs_no_torch():
    code = "import sys, wide.report.folders; assert not {'torch', 'matplotlib'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
