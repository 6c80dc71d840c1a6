"""The files that a comparison leaves behind: tables as text, Markdown, CSV and one HTML page."""

from pathlib import Path

from wide.report.cell_speeds import read_speeds
from wide.report.comparison import Comparison
from wide.report.comparison_tables import comparison_title, to_csv, to_html, to_markdown
from wide.report.page import document, facts, notes_section
from wide.report.selection import read_selection
from wide.report.writing import write_whole

TABLE, SHEET, PAGE = "table.md", "table.csv", "report.html"


def read_comparison(records: Path) -> Comparison:
    """Return the comparison that a file of records describes, with the speeds that its cells hold beside it.

    Raises:
        DataError: If there are no readable records, or not those of a comparison.
    """
    return Comparison(read_selection(records), *read_speeds(records.parent))


def write_comparison(comparison: Comparison, folder: Path, *, more: str = "") -> list[Path]:
    """Write `table.md`, `table.csv` and `report.html` into a folder and return their paths.

    Each file is replaced whole, so that several processes that draw the same comparison do not mix their halves.

    Args:
        comparison: What was measured.
        folder: Where the files go.
        more: Further sections of the page, as HTML.
    """
    body = facts(comparison.run) + to_html(comparison) + more + notes_section(comparison.notes)
    page = document(comparison_title(comparison), body)
    texts = {TABLE: to_markdown(comparison), SHEET: to_csv(comparison), PAGE: page}
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]
