"""Tables of figures in the pages are those of the records."""

import collections
import importlib.util
import re
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "tools/tables.py"
spec = importlib.util.spec_from_file_location("tables", FILE)
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


@pytest.mark.parametrize("page", [page for page in tables.pages() if "<!-- table:" in page.read_text()], ids=str)
def test_tables_of_a_page_are_fresh(page):
    text = page.read_text(encoding="utf-8")
    assert tables.rendered(text) == text, f"{page} is stale: make tables"


def test_what_stands_between_the_marks_is_replaced_and_nothing_else():
    text = "before\n<!-- table: house -->\nold\n<!-- end -->\nafter\n"
    new = tables.rendered(text)
    assert re.fullmatch(r"before\n<!-- table: house -->\n\| what .*\n<!-- end -->\nafter\n", new, re.DOTALL)
    assert tables.rendered(new) == new


def test_a_table_that_there_is_not_is_named_with_those_that_there_are():
    with pytest.raises(KeyError, match=r"no table 'qualty'; there are quality"):
        tables.rendered("<!-- table: qualty -->\n<!-- end -->")


def test_languages_stand_side_by_side(monkeypatch):
    row = {"operator": "gate and up", "size": "4096 rows", "share": 0.5}
    monkeypatch.setattr(tables, "targets", lambda _: [{**row, "languages": {"triton": 1.5, "cute": 1.25}}])
    assert "| gate and up, 4096 rows | 1.50 | - | - | 1.25 |" in tables.TABLES["columns"]().to_markdown()


@pytest.mark.parametrize("name", ["quality-real", "quality-real-larger", "quality-real-columns", "eight-bits-real"])
def test_what_was_not_measured_is_no_zero(name, monkeypatch):
    nothing = collections.defaultdict(lambda: tables.Selection([]))
    monkeypatch.setattr(tables, "study", lambda _="": nothing)
    assert {cell for row in tables.TABLES[name]().rows for cell in row[1:]} == {"-"}


@pytest.mark.parametrize("figure", tables.FIGURES[2:], ids=lambda figure: figure.name)
def test_quality_beside_speed_has_a_panel_for_each_regime_and_measure(figure):
    points = figure.table(None)
    rows = collections.Counter(row["panel"] for row in points)
    assert len(rows) == 2 * figure.columns
    assert len(set(rows.values())) == 1
