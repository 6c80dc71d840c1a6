"""What a comparison leaves behind: the records of all cells in one file, and the tables drawn from them."""

from dataclasses import dataclass
from pathlib import Path

from wide.errors import DataError
from wide.report.comparison import PERPLEXITY, RATIO, Comparison, read_comparison
from wide.report.comparison_tables import to_text
from wide.report.folders import draw_comparison
from wide.report.writing import write_whole
from wide.runs.folder import CELLS, COMPARISON, GRID, RECORDS
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
        recovered: Whether LoRA was trained on top.
        sparsity: Target, in [0, 1); 0 for the dense model.
        seeds: The seeds that were measured.
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
        folder: Where its cells, records, tables and page lie.
        rows: One entry for each row and sparsity, the dense model first.
        table: The tables as text, for a terminal.
    """

    folder: Path
    rows: tuple[ComparisonRow, ...]
    table: str


def read_results(folder: str | Path) -> ComparisonResult:
    """Return what has been measured in the folder of a comparison, finished or not.

    Raises:
        DataError: If it is not the folder of a comparison.
    """
    comparison = read_comparison(collect(Path(folder)))
    return ComparisonResult(folder=Path(folder), rows=tuple(_rows(comparison)), table=to_text(comparison))


def _rows(comparison: Comparison) -> list[ComparisonRow]:
    found = []
    for row in comparison.rows:
        for sparsity in [0.0] if comparison.is_dense(row) else comparison.sparsities:
            figures = {
                name: None if (value := comparison.value(row, sparsity, metric)) is None else value.mean
                for name, metric in _FIGURES.items()
            }
            failures = comparison.failures(row, sparsity)
            found.append(
                ComparisonRow(
                    method=row.method,
                    recovered=row.recovered,
                    sparsity=sparsity,
                    seeds=tuple(comparison.seeds(row, sparsity)),
                    failure=failures[0].reason if failures else "",
                    **figures,
                )
            )
    return found


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
