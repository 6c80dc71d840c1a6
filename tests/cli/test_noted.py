"""Benches' files say which command measured them, and the page of the report shows it."""

import json

import pytest

from wide.cli.main import main
from wide.cli.measuring import noted


def test_what_was_written_is_noted_and_nothing_else(tmp_path):
    (tmp_path / "old.json").write_text('{"records": []}')

    def bench():
        with noted(tmp_path, "bench", ["--out", "a folder"]):
            (tmp_path / "naive.json").write_text('{"device": "GPU", "records": []}')
            (tmp_path / "cut.json").write_text('{"device": ')
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench()
    content = json.loads((tmp_path / "naive.json").read_text())
    assert content["command"] == "wide bench --out 'a folder'"
    assert content["device"] == "GPU"
    assert content["date"].startswith("20")
    assert json.loads((tmp_path / "old.json").read_text()) == {"records": []}
    assert (tmp_path / "cut.json").read_text() == '{"device": '


def test_a_folder_that_was_not_made_is_no_error(tmp_path):
    with noted(tmp_path / "none", "bench", []):
        pass


def test_the_page_names_files_and_commands(tmp_path):
    pytest.importorskip("matplotlib")
    record = {"what": "prefill", "tokens": 64, "batch": 1, "candidate": "dense", "median_us": 5.0, "speedup": 1.0}
    with noted(tmp_path, "profile", ["--out", "<P>"]):
        (tmp_path / "endtoend.json").write_text(json.dumps({"device": "GPU", "model": "M", "records": [record]}))
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert '<a href="endtoend.json">endtoend.json</a>: GPU, 20' in page
    assert "<code>wide profile --out &#39;&lt;P&gt;&#39;</code>" in page
