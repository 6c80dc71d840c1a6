"""What a comparison leaves behind: the records of all cells in one file, and the tables drawn from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wide.report.comparison import read_comparison
from wide.report.comparison_tables import lines, to_text
from wide.report.folders import draw_comparison
from wide.report.reading import collect
from wide.runs.process import say


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonResult:
    """What `wide.compare` found.

    Args:
        rows: One entry for each row and sparsity, the dense model first, as `table.csv` has them; `pandas.DataFrame`
            takes them. Figures are means over seeds, None where nothing was measured.
        table: The tables as text, for a terminal.
    """

    folder: Path
    rows: tuple[Mapping[str, Any], ...]
    table: str


def read_results(folder: str | Path) -> ComparisonResult:
    """Return what has been measured in the folder of a comparison, finished or not.

    Raises DataError if it is not the folder of a comparison.
    """
    comparison = read_comparison(Path(folder))
    return ComparisonResult(folder=Path(folder), rows=tuple(lines(comparison)), table=to_text(comparison))


def draw(folder: Path, *, quiet: bool = False) -> None:
    """Write tables, page and figures of whatever has been measured, and print the tables.

    Raises DataError if it is not the folder of a comparison.
    """
    records = collect(folder)
    comparison = read_comparison(folder)
    if not quiet:
        say(f"drawing  {folder}")
    paths, notes = draw_comparison(comparison, folder)
    if not quiet:
        written = [f"  {path}" for path in (records, *paths)]
        say("\n".join([to_text(comparison), "\nwritten:", *written, *(f"note     {n}" for n in dict.fromkeys(notes))]))
