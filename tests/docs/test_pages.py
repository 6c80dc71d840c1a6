"""Commands and links that the pages show exist; the Python of the pages runs in `make docs`."""

import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.md"))
    if "_build" not in page.parts
]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@functools.cache
def snippets():
    spec = importlib.util.spec_from_file_location("snippets", ROOT / "tools/snippets.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["snippets"] = module
    spec.loader.exec_module(module)
    return module


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_are_understood(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tool = snippets()
    refused = {line: tool.check_command(arguments) for line, arguments in tool.commands(page)}
    assert {line: message for line, message in refused.items() if message} == {}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_a_command_with_a_wrong_flag_is_found():
    assert "no_such_flag" in snippets().check_command(["prune", "--no_such_flag", "1"])


def test_a_command_over_several_lines_is_one(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\nwide eval --model M \\\n  --data D  # why\n```\n")
    assert list(snippets().commands(page)) == [(2, ["eval", "--model", "M", "--data", "D"])]
