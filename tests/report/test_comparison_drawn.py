"""What `wide compare` leaves behind is the page with figures that `wide report` draws."""

import os
import signal
import sys

import pytest
import yaml
from test_comparison_speed import DENSE_CELL, measured, write

from wide.cli.main import main
from wide.comparison import run as cell_runner
from wide.comparison.run import draw
from wide.records import Cell, RecordFile

pytestmark = pytest.mark.usefixtures("drawn_at_once")

FIGURE = "quality-sparsity"
SHORT = [
    *("--dtype=float32", "--device=cpu", "--sparsities=0.5", "--methods=slicegpt", "--recover.steps=0"),
    *("--eval.tokens=128", "--eval.window=32", "--train.sequence_length=32"),
]


@pytest.fixture(scope="module", autouse=True)
def drawing():
    pytest.importorskip("matplotlib")


@pytest.fixture
def finished(tmp_path):
    """Return a folder of a comparison with its cells' records alone."""
    folder = write(tmp_path / "run", ["slicegpt"])
    (folder / "compare.jsonl").rename(folder / "grid.jsonl")
    RecordFile(folder / "cells/slicegpt/records.jsonl", device="cpu").append(measured(Cell("slicegpt", 0.5, 17), 12.0))
    RecordFile(folder / "cells/dense/records.jsonl", device="cpu").append(measured(DENSE_CELL, 10.0))
    return folder


@pytest.fixture(scope="module")
def everyday(tiny_model_folder, prose_folder, tmp_path_factory):
    settings = tmp_path_factory.mktemp("settings") / "methods.yaml"
    settings.write_text(yaml.safe_dump({"slicegpt": {"num_windows": 2, "window_length": 32}}))
    where = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--config", str(settings)]
    return ["compare", *SHORT, *where]


def pictures(folder):
    return (folder / "report.html").read_text().count("data:image/svg+xml")


def test_tables_are_drawn_with_the_figures_of_wide_report(finished, capsys):
    assert main(["report", str(finished)]) == 0
    page = (finished / "report.html").read_text()
    assert pictures(finished) == 2
    capsys.readouterr()
    draw(finished)
    assert (finished / "report.html").read_text() == page
    assert f"  {finished / 'figures'}\n" in capsys.readouterr().out
    assert not list(finished.glob("**/.*"))


def test_without_matplotlib_the_page_says_how_to_draw_figures(finished, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    draw(finished)
    words = "figures are not drawn without matplotlib: pip install 'wide[report]', then wide report FOLDER"
    assert f"note     {words}" in capsys.readouterr().out
    page = (finished / "report.html").read_text().replace("&#39;", "'")
    assert words in page
    assert "<table>" in page


def test_pictures_are_replaced_whole(finished, monkeypatch):
    from matplotlib.figure import Figure

    assert main(["report", str(finished)]) == 0
    picture = finished / f"figures/{FIGURE}.png"
    before, real = picture.read_bytes(), Figure.savefig

    def stop_half_way(self, file, **how):
        if how["format"] == "png":
            file.write_bytes(b"half")
            raise KeyboardInterrupt
        return real(self, file, **how)

    monkeypatch.setattr(Figure, "savefig", stop_half_way)
    assert main(["report", str(finished)]) == 130
    assert picture.read_bytes() == before
    assert not list(finished.glob("**/.*"))


def test_a_comparison_ends_with_figures(everyday, tmp_path, capsys):
    assert main([*everyday, "--output", str(tmp_path / "run")]) == 0
    assert pictures(tmp_path / "run") == 3
    assert (tmp_path / f"run/figures/{FIGURE}.png").is_file()
    assert "note  " not in capsys.readouterr().out


@pytest.mark.parametrize("shard", [[], ["--shard=next"]], ids=["alone", "shared"])
def test_a_comparison_that_is_stopped_leaves_a_page(shard, everyday, tmp_path, monkeypatch):
    real = cell_runner.apply

    def stop(model, method, *args, **options):
        if method.name == "slicegpt" and options["output"] is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(model, method, *args, **options)

    given = [*everyday, "--output", str(tmp_path / "run"), *shard]
    with monkeypatch.context() as patch:
        patch.setattr(cell_runner, "apply", stop)
        assert main(given) == 130
    assert "dense" in (tmp_path / "run/report.html").read_text()
    assert main([*given, *([] if shard else ["--resume"])]) == 0
    assert pictures(tmp_path / "run") == 3
