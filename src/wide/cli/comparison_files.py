"""The folder of a comparison: one folder a cell, and all their records in one file."""

from pathlib import Path

from wide.cli.console import say
from wide.cli.run_folder import CELLS, COMPARISON, GRID, RECORDS
from wide.errors import DataError
from wide.report.comparison_page import draw_comparison, read_comparison
from wide.report.comparison_tables import to_text
from wide.report.writing import write_whole


def collect(folder: Path) -> Path:
    """Write the records of the grid and of all cells into one file and return its path.

    Args:
        folder: Of the comparison; some of its cells may be missing or still running.

    Raises:
        DataError: If it is not the folder of a comparison.
    """
    grid = folder / GRID
    if not grid.is_file():
        raise DataError(f"{folder} holds no comparison: {GRID} is missing; name the --output of a wide compare")
    files = [grid, *sorted((folder / CELLS).glob(f"*/{RECORDS}"))]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    # A process that was killed while it wrote leaves a line without an end.
    write_whole(folder / COMPARISON, "".join(text if text.endswith("\n") else f"{text}\n" for text in texts))
    return folder / COMPARISON


def draw(folder: Path, *, later: bool = False, quiet: bool = False) -> None:
    """Write tables, page and figures of whatever has been measured, and print the tables.

    Args:
        folder: Of the comparison.
        later: Leave the figures to a process that goes on measuring; the page says so.
        quiet: Print nothing.

    Raises:
        DataError: If it is not the folder of a comparison.
    """
    records = collect(folder)
    comparison = read_comparison(records)
    paths, notes = draw_comparison(comparison, folder, later=later)
    if quiet:
        return
    say(to_text(comparison))
    say("\nwritten:")
    for path in (records, *paths):
        say(f"  {path}")
    for note in dict.fromkeys(notes):
        say(f"note     {note}")
