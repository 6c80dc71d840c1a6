"""The record file of a study holds several runs, which are named as if they were folders."""

import gzip
import json

import pytest

from wide.cli.main import main
from wide.records import STUDY

pytestmark = pytest.mark.usefixtures("drawn_at_once")


@pytest.fixture
def study(tmp_path):
    pytest.importorskip("matplotlib")
    lines = [
        {"run": name, "subject": subject, "metric": "token_perplexity", "value": value}
        for name, values in (("one", (10.0, 12.0)), ("two", (10.0, 11.0)))
        for subject, value in zip(("dense", "stage 1"), values, strict=True)
    ]
    lines += [{"run": name, "subject": "run", "metric": "model", "value": "M"} for name in ("one", "two")]
    forward = {"what": "decode", "tokens": 8, "batch": 1, "median_us": 2.0}
    records = [
        forward | {"candidate": "dense", "speedup": 1.0},
        forward | {"candidate": "own routing", "speedup": 1.5, "skipped": {"attention": 0.5, "ffn": 0.5}},
    ]
    lines.append({"run": "two", "bench": "endtoend.json", "device": "GPU", "model": "M", "records": records})
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / STUDY).write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    return folder


def test_a_run_of_a_study_has_a_page_with_its_speed(study, tmp_path, capsys):
    assert main(["report", str(study / "two"), "--output", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page/report.html").read_text()
    assert "<td>11.00</td>" in page
    assert "<td>1.50x</td>" in page
    assert "Speed-up of whole models" in page
    assert [path.name for path in study.iterdir()] == [STUDY]
    assert main(["report", str(study / "one")]) == 0
    assert "<td>12.00</td>" in (study / "one/report.html").read_text()
    # Where the page has made a folder of its name, the run is meant still.
    assert main(["report", str(study / "one")]) == 0
    assert main(["report", str(study / "three")]) == 1
    found = capsys.readouterr().err
    assert f"there is no folder {study}/three; " in found
    assert f"name one of them: {study}/one, {study}/two" in found


def test_the_runs_of_a_study_are_named(study, capsys):
    lines = [line for line in gzip.decompress((study / STUDY).read_bytes()).splitlines() if b"bench" not in line]
    (study / STUDY).write_bytes(gzip.compress(b"\n".join(lines)))
    assert main(["report", str(study)]) == 1
    assert f"name one of them: {study}/one, {study}/two" in capsys.readouterr().err
