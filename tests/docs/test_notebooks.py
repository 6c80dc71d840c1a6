"""The notebooks run from top to bottom, with few steps."""

import json
import sys
import types
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"


def cells(name, kind="code"):
    content = json.loads((FOLDER / f"{name}.ipynb").read_text())
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == kind]


@pytest.fixture
def shown(monkeypatch):
    """Stand in for what a notebook server displays things with."""
    things = []
    stand_in = types.ModuleType("IPython.display")
    stand_in.HTML = stand_in.SVG = str
    stand_in.display = things.append
    package = types.ModuleType("IPython")
    # Matplotlib asks a loaded IPython for its version and its shell.
    package.version_info, package.get_ipython = (9, 0, 0), lambda: None
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", stand_in)
    return things


def execute(name, monkeypatch):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setenv("WIDE_NOTEBOOK_STEPS", "2")
    names = {"__name__": "__main__"}
    for number, source in enumerate(cells(name)):
        exec(compile(source, f"{name}.ipynb, code cell {number}", "exec"), names)
    return names


@pytest.mark.slow
def test_routing_is_looked_at(monkeypatch, shown, capsys):
    execute("look_at_the_routing", monkeypatch)
    assert len(shown) == 1
    assert shown[0].count("<span") > 20
    assert "layer 5 ffn" in capsys.readouterr().out


@pytest.mark.slow
def test_ten_lines_prune(monkeypatch, capsys):
    names = execute("prune_in_ten_lines", monkeypatch)
    assert names["report"].sparsity.mean > 0.2
    assert "wide_router.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.ipynb"))])
def test_notebooks_are_kept_without_results(name):
    content = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in content["cells"])
    assert cells(name, "markdown")[0].startswith("# ")
