"""What a comparison leaves behind: the records of all cells in one file, and the tables drawn from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wide.report.comparison import PERPLEXITY, RATIO, read_comparison
from wide.report.comparison_tables import to_text
from wide.report.folders import draw_comparison
from wide.report.reading import collect
from wide.runs.process import say

_FIGURES = {
    "perplexity": PERPLEXITY,
    "ratio": RATIO,
    "accuracy": "accuracy.average",
    "linear_flops": "sparsity.linear_flops_layers",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonRow:
    """One row of a comparison at one sparsity; figures are means over seeds, None where nothing was measured.

    Args:
        method: Name of the row; 'dense' is the model as it is.
        sparsity: Target, in [0, 1); 0 for the dense model.
        perplexity: Token perplexity on held-out text.
        ratio: That perplexity relative to the dense model's.
        accuracy: Mean accuracy over tasks, in [0, 1].
        linear_flops: Share of the matrix-product work of all decoder layers that is saved, in [0, 1].
        failure: Why a cell of the row could not be measured; empty if none failed.
    """

    method: str
    recovered: bool
    sparsity: float
    seeds: tuple[int, ...]
    perplexity: float | None
    ratio: float | None
    accuracy: float | None
    linear_flops: float | None
    failure: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonResult:
    """What `wide.compare` found.

    Args:
        rows: One entry for each row and sparsity, the dense model first.
        table: The tables as text, for a terminal.
    """

    folder: Path
    rows: tuple[ComparisonRow, ...]
    table: str


def read_results(folder: str | Path) -> ComparisonResult:
    """Return what has been measured in the folder of a comparison, finished or not.

    Raises DataError if it is not the folder of a comparison.
    """
    comparison, rows = read_comparison(Path(folder)), []
    for row, sparsity in comparison.points():
        values = {name: comparison.value(row, sparsity, metric) for name, metric in _FIGURES.items()}
        told: dict[str, Any] = {name: None if value is None else value.mean for name, value in values.items()}
        told |= {"method": row.method, "recovered": row.recovered, "seeds": tuple(comparison.seeds(row, sparsity))}
        failure = next(iter(comparison.failures(row, sparsity).values()), "")
        rows.append(ComparisonRow(sparsity=sparsity, failure=failure, **told))
    return ComparisonResult(folder=Path(folder), rows=tuple(rows), table=to_text(comparison))


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
