"""The tables of a comparison, for the terminal, as Markdown, CSV and HTML."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from wide.report.comparison import PERPLEXITY, RATIO, RETENTION, TASK, Comparison, Row, Value
from wide.report.table import Table


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a row.

    Args:
        title: Above the column.
        metric: As `Comparison.value` takes it.
        show: Mean and error as text.
    """

    title: str
    metric: str
    show: Callable[[float, float | None], str]


def _decimal(value: float, error: float | None) -> str:
    if not math.isfinite(value) or value >= 10_000:
        return f"{value:.3g}"
    return f"{value:z.2f}" if error is None else f"{value:z.2f} ± {error:.2f}"


def _ratio(value: float, error: float | None) -> str:
    return f"{value:.3g}" if value >= 1000 else f"{value:z.3f}" if error is None else f"{value:z.3f} ± {error:.3f}"


def _percent(value: float, error: float | None) -> str:
    return f"{100 * value:z.1f}" if error is None else f"{100 * value:z.1f} ± {100 * error:.1f}"


def _amount(value: float, _error: float | None) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:z.0f}"


def _seconds(value: float, _error: float | None) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:z.1f}"


QUALITY = (
    Column("ppl", PERPLEXITY, _decimal),
    Column("x dense", RATIO, _ratio),
    Column("WikiText token ppl", "wikitext.token_perplexity", _decimal),
    Column("word ppl", "word_perplexity", _decimal),
    Column("accuracy %", "accuracy.average", _percent),
    Column("retention %", RETENTION, _percent),
)
"""What a row is worth."""
FACTS = (
    Column("nominal %", "sparsity.mean", _percent),
    Column("attention %", "sparsity.attention", _percent),
    Column("FFN %", "sparsity.ffn", _percent),
    Column("linear FLOPs %", "sparsity.linear_flops_layers", _percent),
    Column("parameters %", "sparsity.parameters_removed", _percent),
    Column("KV kept %", "sparsity.kv_cache_kept", _percent),
    Column("tokens fwd", "method.tokens_forward", _amount),
    Column("tokens fwd+bwd", "method.tokens_backward", _amount),
    Column("seconds", "method.seconds", _seconds),
)
"""What a row removes, and what it cost."""
TASK_NAMES = {
    "arc_easy": "ARC-E",
    "arc_challenge": "ARC-C",
    "boolq": "BoolQ",
    "winogrande": "WinoGrande",
    "piqa": "PIQA",
    "openbookqa": "OBQA",
    "hellaswag": "HellaSwag",
}
"""Zero-shot tasks as the paper's tables call them, in their order."""
_WORD, _AVERAGE, _RETENTION = QUALITY[3:]

LEGEND = (
    "ppl: token perplexity on held-out text. With one seed, ± is the standard error by bootstrap over windows of text "
    "(for 'x dense' the two models are resampled together); with several seeds, figures are means and ± is the "
    "standard deviation between seeds. With one seed the tasks carry the standard error over items, and their average "
    "that of independent tasks; WikiText's perplexities carry that over its documents.",
    "attention, FFN: share that is left out, mean over layers, in units of the method (layers, heads and channels, "
    "groups, dimensions of the residual stream, weights); nominal: the mean of the two. linear FLOPs: share of the "
    "matrix-product work of all decoder layers that is saved, keys and values included, the output head not; single "
    "zeros save none. parameters: share of the decoder layers' parameters that no token needs. KV kept: share of the "
    "key-value cache.",
    "seed: of calibration and training. tokens and seconds: calibration text and time; in rows with LoRA, those of the "
    "LoRA stage alone. fwd: forward only; fwd+bwd: forward with backward.",
)


def quality_table(comparison: Comparison) -> Table:
    """Return one line a row and, for each sparsity, what it is worth."""
    used = [column for column in QUALITY if _is_measured(comparison, column)]
    header = tuple(f"{100 * s:.4g} %: {column.title}" for s in comparison.sparsities for column in used)
    lines = []
    for row in comparison.rows:
        cells = [_cell(comparison, row, s, column) for s in comparison.sparsities for column in used]
        lines.append((_name(comparison, row), *cells))
    return Table(header=("method", *header), rows=tuple(lines))


def tasks_table(comparison: Comparison) -> Table | None:
    """Return each zero-shot task of each row at each sparsity, as the paper's appendix does; None without tasks."""
    tasks = _task_columns(comparison)
    return _by_target(comparison, (_WORD, *tasks, _AVERAGE, _RETENTION)) if tasks else None


def facts_table(comparison: Comparison) -> Table:
    """Return, for each row at each sparsity, what it removes and what it cost."""
    return _by_target(comparison, FACTS, has_seeds=True)


def _by_target(comparison: Comparison, columns: Sequence[Column], *, has_seeds: bool = False) -> Table:
    used = [column for column in columns if _is_measured(comparison, column)]
    lines = []
    for row, sparsity in _points(comparison):
        target = "-" if comparison.is_dense(row) else f"{100 * sparsity:.4g}"
        seeds = [", ".join(map(str, comparison.seeds(row, sparsity))) or "-"] if has_seeds else []
        cells = [_cell(comparison, row, sparsity, column) for column in used]
        lines.append((_name(comparison, row), target, *seeds, *cells))
    names = ("method", "target %", *(["seed"] if has_seeds else []))
    return Table(header=(*names, *(column.title for column in used)), rows=tuple(lines))


def _task_columns(comparison: Comparison) -> list[Column]:
    """Return a column for each task that was measured, the paper's first and in its order."""
    order = list(TASK_NAMES)
    found = []
    for label in comparison.task_labels():
        # Behind the name stands how many items a subset has.
        task, space, rest = label.partition(" ")
        rank = order.index(task) if task in order else len(order)
        title = f"{TASK_NAMES.get(task, task)}{space}{rest}"
        found.append((rank, title, Column(title, f"{TASK}{label}", _percent)))
    return [column for *_, column in sorted(found, key=lambda entry: entry[:2])]


def footnotes(comparison: Comparison) -> list[str]:
    """Return where rows deviate from their originals, numbered as the rows are, and which cells failed and why."""
    lines = [
        f"[{number}] {_plain_name(row)}: {sentence}"
        for row, number in _numbers(comparison).items()
        for sentence in comparison.deviations(row)
    ]
    for failure in comparison.failures():
        name = _plain_name(Row(failure.cell.method, failure.recovered))
        lines.append(f"failed: {name}, {failure.cell.sparsity:.4g}, seed {failure.cell.seed}: {failure.reason}")
    return lines


def to_text(comparison: Comparison) -> str:
    """Return everything for a terminal."""
    parts = [table.to_text() for table in _tables(comparison)]
    return "\n\n".join([*parts, "\n".join(footnotes(comparison))]).rstrip()


def to_markdown(comparison: Comparison) -> str:
    """Return everything as Markdown."""
    parts = [f"# {comparison_title(comparison)}", *(table.to_markdown() for table in _tables(comparison)), *LEGEND]
    notes = footnotes(comparison)
    if notes:
        parts += ["## Deviations and failures", "\n".join(f"- {note}" for note in notes)]
    return "\n\n".join(parts) + "\n"


def to_csv(comparison: Comparison) -> str:
    """Return a line for each row at each sparsity, with all figures unrounded and their errors."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    columns = [*QUALITY, *_task_columns(comparison), *FACTS]
    names = [name for column in columns for name in (column.metric, f"{column.metric}.error")]
    writer.writerow(["method", "recovered", "target", "seeds", "seed", "failed", *names])
    for row, sparsity in _points(comparison):
        values = [comparison.value(row, sparsity, column.metric) for column in columns]
        figures = [figure for value in values for figure in _figures(value)]
        target = "" if comparison.is_dense(row) else sparsity
        failed = "; ".join(failure.reason for failure in comparison.failures(row, sparsity))
        seeds = comparison.seeds(row, sparsity)
        writer.writerow(
            [row.method, int(row.recovered), target, len(seeds), " ".join(map(str, seeds)), failed, *figures]
        )
    return stream.getvalue()


def to_html(comparison: Comparison) -> str:
    """Return the section of a page."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in footnotes(comparison))
    legend = "".join(f"<p>{escape(text)}</p>" for text in LEGEND)
    tasks = tasks_table(comparison)
    tables = quality_table(comparison).to_html()
    tables += "" if tasks is None else f"<h2>Zero-shot tasks</h2>{tasks.to_html()}"
    tables += f"<h2>What is removed, and what it cost</h2>{facts_table(comparison).to_html()}"
    return f"<h2>Quality</h2>{tables}{legend}" + (f"<h2>Deviations and failures</h2><ul>{notes}</ul>" if notes else "")


def comparison_title(comparison: Comparison) -> str:
    """Return what was compared, in a line."""
    return f"Pruning methods on {comparison.run.text('run', 'model') or 'a model'}"


def _points(comparison: Comparison) -> Iterator[tuple[Row, float]]:
    """Yield the dense rows once, then the others sparsity by sparsity."""
    yield from ((row, 0.0) for row in comparison.rows if comparison.is_dense(row))
    for sparsity in comparison.sparsities:
        yield from ((row, sparsity) for row in comparison.rows if not comparison.is_dense(row))


def _tables(comparison: Comparison) -> list[Table]:
    found = quality_table(comparison), tasks_table(comparison), facts_table(comparison)
    return [table for table in found if table is not None]


def _is_measured(comparison: Comparison, column: Column) -> bool:
    return any(comparison.value(row, sparsity, column.metric) for row, sparsity in _points(comparison))


def _cell(comparison: Comparison, row: Row, sparsity: float, column: Column) -> str:
    value = comparison.value(row, sparsity, column.metric)
    if value is not None:
        return column.show(value.mean, value.error)
    return "failed" if column is QUALITY[0] and comparison.failures(row, sparsity) else "-"


def _figures(value: Value | None) -> tuple[float | str, float | str]:
    # A zero has no sign in the sheet either.
    return ("", "") if value is None else (value.mean + 0.0, "" if value.error is None else value.error + 0.0)


def _numbers(comparison: Comparison) -> dict[Row, int]:
    return {row: number for number, row in enumerate(filter(comparison.deviations, comparison.rows), 1)}


def _plain_name(row: Row) -> str:
    return f"{row.method} + LoRA" if row.recovered else row.method


def _name(comparison: Comparison, row: Row) -> str:
    number = _numbers(comparison).get(row)
    return _plain_name(row) + ("" if number is None else f" [{number}]")
