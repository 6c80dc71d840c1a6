"""The tables of a comparison, for the terminal, as Markdown, CSV and sections of a page."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from wide.report.comparison import TASK, Comparison, Row
from wide.report.figure import LOOKS, to_csv
from wide.report.page import Section
from wide.report.table import Table, decimal, percent


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a row: `metric` as `Comparison.value` takes it, and what shows mean and error as text."""

    title: str
    metric: str
    show: Callable[[float, float | None], str]


def _ratio(value: float, error: float | None) -> str:
    return f"{value:.3g}" if value >= 1000 else f"{value:z.3f}" if error is None else f"{value:z.3f} ± {error:.3f}"


def _amount(value: float, _error: float | None) -> str:
    value = float(f"{value:.3g}")
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:z.0f}"


_SHOW = {"decimal": decimal, "percent": percent, "ratio": _ratio, "amount": _amount}
_SHOW["seconds"] = lambda value, _error: f"{value:,.0f}" if value >= 10 else f"{value:z.1f}"
QUALITY, FACTS = (
    tuple(Column(title, metric, _SHOW[show]) for title, metric, show in LOOKS["tables"][part])
    for part in ("quality", "facts")
)
"""What a row is worth; what it removes, and what it cost."""
TASK_NAMES: dict[str, str] = LOOKS["tables"]["tasks"]
"""Zero-shot tasks as the paper's tables call them, in their order."""
_WORD, _AVERAGE, _RETENTION = QUALITY[3:]


def comparison_sections(comparison: Comparison) -> list[Section]:
    """Return what a page says beside figures: tables, what their columns mean, deviations and failures."""
    tasks, notes = tasks_table(comparison), footnotes(comparison)
    return [
        Section(title="Quality", tables=[quality_table(comparison)]),
        *([Section(title="Zero-shot tasks", tables=[tasks])] if tasks else []),
        Section(
            title="What is removed, and what it cost", tables=[facts_table(comparison)], texts=LOOKS["tables"]["legend"]
        ),
        *([Section(title="Deviations and failures", items=notes)] if notes else []),
    ]


def quality_table(comparison: Comparison) -> Table:
    """Return one line a row and, for each sparsity, what it is worth."""
    used, names = _measured(comparison, QUALITY), _names(comparison)
    header = tuple(f"{100 * s:.4g} %: {column.title}" for s in comparison.sparsities for column in used)
    rows = tuple(
        (names[row], *(_cell(comparison, row, s, column) for s in comparison.sparsities for column in used))
        for row in comparison.rows
    )
    return Table(header=("method", *header), rows=rows)


def tasks_table(comparison: Comparison) -> Table | None:
    """Return each zero-shot task of each row at each sparsity, as the paper's appendix does; None without tasks."""
    tasks = _task_columns(comparison)
    return _by_target(comparison, (_WORD, *tasks, _AVERAGE, _RETENTION)) if tasks else None


def facts_table(comparison: Comparison) -> Table:
    """Return, for each row at each sparsity, what it removes and what it cost."""
    return _by_target(comparison, FACTS, has_seeds=True)


def footnotes(comparison: Comparison) -> list[str]:
    """Return where rows deviate from their originals, numbered as the rows are, and which cells failed and why."""
    notes = [
        f"[{number}] {row.name}: {sentence}"
        for row, number in _numbers(comparison).items()
        for sentence in comparison.deviations(row)
    ]
    for stage, reason in comparison.failures().items():
        name = Row(stage.cell.method, stage.recovered).name
        notes.append(f"failed: {name}, {stage.cell.sparsity:.4g}, seed {stage.cell.seed}: {reason}")
    return notes


def to_text(comparison: Comparison) -> str:
    """Return tables and footnotes for a terminal."""
    tables = [table.to_text() for section in comparison_sections(comparison) for table in section.tables]
    return "\n\n".join([*tables, "\n".join(footnotes(comparison))]).rstrip()


def to_markdown(comparison: Comparison) -> str:
    """Return all sections as Markdown."""
    parts = [
        f"# {comparison_title(comparison)}",
        *(section.to_markdown() for section in comparison_sections(comparison)),
    ]
    return "\n\n".join(parts) + "\n"


def to_sheet(comparison: Comparison) -> str:
    """Return as CSV a line for each row at each sparsity, with all figures unrounded and their errors."""
    return to_csv(list(lines(comparison)), exact=True)


def comparison_title(comparison: Comparison) -> str:
    """Return what was compared, in a line."""
    return f"Pruning methods on {comparison.run.text('run', 'model') or 'a model'}"


def lines(comparison: Comparison) -> Iterator[dict[str, str | float | None]]:
    """Yield for each row at each sparsity what it is, and all figures unrounded with their errors."""
    columns = [*QUALITY, *_task_columns(comparison), *FACTS]
    for row, sparsity in comparison.points():
        seeds = comparison.seeds(row, sparsity)
        line: dict[str, str | float | None] = {
            "method": row.method,
            "recovered": int(row.recovered),
            "target": None if row.is_dense else sparsity,
            "seeds": len(seeds),
            "seed": " ".join(map(str, seeds)),
            "failed": "; ".join(comparison.failures(row, sparsity).values()),
        }
        for column in columns:
            value = comparison.value(row, sparsity, column.metric)
            line[column.metric] = None if value is None else value.mean
            line[f"{column.metric}.error"] = None if value is None else value.error
        yield line


def _by_target(comparison: Comparison, columns: Sequence[Column], *, has_seeds: bool = False) -> Table:
    used, names = _measured(comparison, columns), _names(comparison)
    rows = []
    for row, sparsity in comparison.points():
        target = "-" if row.is_dense else f"{100 * sparsity:.4g}"
        seeds = [", ".join(map(str, comparison.seeds(row, sparsity))) or "-"] if has_seeds else []
        rows.append((names[row], target, *seeds, *(_cell(comparison, row, sparsity, column) for column in used)))
    header = ("method", "target %", *(["seed"] if has_seeds else []))
    return Table(header=(*header, *(column.title for column in used)), rows=tuple(rows))


def _task_columns(comparison: Comparison) -> list[Column]:
    """Return a column for each task that was measured, the paper's first and in its order."""
    order = list(TASK_NAMES)
    found = []
    for metric in comparison.task_metrics():
        # Behind the name stands how many items a subset has.
        task, space, rest = metric.removeprefix(TASK).partition(" ")
        rank = order.index(task) if task in order else len(order)
        title = f"{TASK_NAMES.get(task, task)}{space}{rest}"
        found.append((rank, title, Column(title, metric, percent)))
    return [column for *_, column in sorted(found, key=lambda entry: entry[:2])]


def _measured(comparison: Comparison, columns: Sequence[Column]) -> list[Column]:
    points = list(comparison.points())
    return [each for each in columns if any(comparison.value(*point, each.metric) for point in points)]


def _cell(comparison: Comparison, row: Row, sparsity: float, column: Column) -> str:
    value, failed = comparison.value(row, sparsity, column.metric), comparison.failures(row, sparsity)
    if value is None:
        return "failed" if column is QUALITY[0] and failed else "-"
    seeds = len(comparison.seeds(row, sparsity)) + len(failed)
    # Beside means of all seeds this one is of others.
    of = "" if value.seeds == seeds else f" ({value.seeds} of {seeds} seeds)"
    return f"{column.show(value.mean, value.error)}{of}"


def _numbers(comparison: Comparison) -> dict[Row, int]:
    return {row: number for number, row in enumerate(filter(comparison.deviations, comparison.rows), 1)}


def _names(comparison: Comparison) -> dict[Row, str]:
    numbers = _numbers(comparison)
    return {row: f"{row.name} [{numbers[row]}]" if row in numbers else row.name for row in comparison.rows}
