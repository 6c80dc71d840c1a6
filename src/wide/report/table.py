"""Tables, and that of a run: one line per measured model."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from wide.report.figure import Row, Value
from wide.report.selection import NAMES, SUBLAYERS, Selection

ADAPTED = {"stage 1+2": "stage 2", "pruned + LoRA": "LoRA"}
"""Subject -> what fitted it to the training text."""
_BESIDE_ADAPTED = "x dense + LoRA"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Texts in rows and columns.

    Args:
        header: Names of the columns; the first column is text, the others are numbers.
        rows: As many texts as the header has.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> "Table":
        """Return a table of rows of values, to four digits; columns without any value are left out."""
        every = dict.fromkeys(name for row in rows for name in row)
        names = [name for name in every if any(row.get(name) not in (None, "") for row in rows)]
        return cls(header=tuple(names), rows=tuple(tuple(_plain(row.get(name)) for name in names) for row in rows))

    def to_text(self) -> str:
        """Return the table in aligned columns, for a terminal."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        texts = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([texts[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *texts[1:]])

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        rule = ("---", *("---:" for _ in self.header[1:]))
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.header, rule, *self.rows))

    def to_html(self) -> str:
        """Return the table as HTML that scrolls sideways where it is too wide."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.header)
        rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def summary_table(run: Selection) -> Table:
    """Return quality, sparsity and training speed of each measured model; columns without any value are left out."""
    dense, adapted = (run.number(subject, "token_perplexity") for subject in ("dense", "dense + LoRA"))
    columns = [
        ("perplexity", "token_perplexity", decimal),
        ("x dense", "token_perplexity", lambda value: _ratio(value, dense)),
        (_BESIDE_ADAPTED, "token_perplexity", lambda value: _ratio(value, adapted)),
        ("word ppl", "word_perplexity", decimal),
        ("accuracy %", "accuracy.average", percent),
        ("retention %", "accuracy.retention", percent),
        ("attention %", "sparsity.attention", percent),
        ("FFN %", "sparsity.ffn", percent),
        ("mean %", "sparsity.mean", percent),
        ("linear FLOPs %", "sparsity.linear_flops", percent),
        ("trained tokens/s", "training.tokens_per_second", lambda value: f"{value:z,.0f}"),
    ]
    subjects = run.subjects()
    used = [column for column in columns if any(run.number(subject, column[1]) is not None for subject in subjects)]
    if adapted is None:
        used = [column for column in used if column[0] != _BESIDE_ADAPTED]
    rows = []
    for subject in subjects:
        values = [
            (None if name == _BESIDE_ADAPTED and subject not in ADAPTED else run.number(subject, metric), show)
            for name, metric, show in used
        ]
        rows.append((NAMES[subject], *("-" if value is None else show(value) for value, show in values)))
    return Table(header=("model", *(name for name, _, _ in used)), rows=tuple(rows))


def layer_lines(run: Selection) -> list[str]:
    """Return the sparsity of each layer of the last measured model, as lines for a terminal; none if not measured."""
    subject = run.last_subject_with_layers()
    if subject is None:
        return []
    lines = [f"skipped groups per layer, {subject}"]
    for key, name in SUBLAYERS.items():
        rates = run.by_layer(subject, f"sparsity.{key}")
        if rates:
            lines.append(f"  {name:<10}" + " ".join(f"{100 * rate:z3.0f}%" for _, rate in rates))
    return lines


def decimal(value: float) -> str:
    """Return a perplexity as text."""
    return f"{value:z.2f}" if value < 10_000 else f"{value:.3g}"


def percent(value: float) -> str:
    """Return a share in percent, as text."""
    return f"{100 * value:z.1f}"


def _plain(value: Value) -> str:
    return "" if value is None else f"{value:z.4g}" if isinstance(value, float) else str(value)


def _ratio(value: float, dense: float | None) -> str:
    return "-" if not dense else f"{value / dense:z.2f}"
