"""The files that a comparison leaves behind: tables as text, Markdown, CSV and one HTML page."""

from pathlib import Path

from wide.report.cell_speeds import read_speeds
from wide.report.comparison import Comparison
from wide.report.comparison_figures import COMPARISON_FIGURES
from wide.report.comparison_tables import comparison_title, to_csv, to_html, to_markdown
from wide.report.drawing import FOLDER, has_matplotlib
from wide.report.page import document, facts, figure_sections, missing_section, notes_section
from wide.report.selection import read_selection
from wide.report.writing import write_whole

TABLE, SHEET, PAGE = "table.md", "table.csv", "report.html"
_LATER = (
    "figures are not drawn while cells are left to other processes; the process that ends last draws them, and wide "
    "report FOLDER does so now"
)
_NO_MATPLOTLIB = "figures need matplotlib: pip install 'wide[report]', then wide report FOLDER"


def read_comparison(records: Path) -> Comparison:
    """Return the comparison that a file of records describes, with the speeds that its cells hold beside it.

    Raises:
        DataError: If there are no readable records, or not those of a comparison.
    """
    return Comparison(read_selection(records), *read_speeds(records.parent))


def draw_comparison(comparison: Comparison, folder: Path, *, later: bool = False) -> tuple[list[Path], list[str]]:
    """Write what `write_comparison` does, with figures in the page and in `figures`; return the paths and all notes.

    Where figures are not drawn, the page and a note say why.

    Args:
        comparison: What was measured.
        folder: Where the files go.
        later: Leave the figures to a process that goes on measuring.
    """
    reason = _LATER if later else "" if has_matplotlib() else _NO_MATPLOTLIB
    if reason:
        more = missing_section("Figures", reason)
    else:
        more = "".join(figure_sections(COMPARISON_FIGURES, comparison, folder))
    paths = write_comparison(comparison, folder, more=more)
    if not reason and (folder / FOLDER).is_dir():
        paths.append(folder / FOLDER)
    return paths, [*comparison.notes, *filter(None, [reason])]


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
