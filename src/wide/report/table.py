"""Tables of texts, and that of runs: one line per measured model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wide.report.figure import LOOKS, Row
from wide.report.selection import NAMES, Selection
from wide.standard_error import perplexity_stderr

ADAPTED = {"stage 1+2": "stage 2", "pruned + LoRA": "LoRA"}
"""Subject -> what fitted it to the training text."""
PERPLEXITY = "token_perplexity"
_SHARES: dict[str, str] = LOOKS["tables"]["shares"]
"""Column -> metric; that of the sparsity that the run was to reach is left to the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Texts in rows and columns: the first column is text, the others are numbers; rows are as long as the header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of_rows(cls, rows: Sequence[Row], *, nothing: str = "") -> "Table":
        """Return a table of rows of values, to four digits; columns without any value are left out."""
        every = dict.fromkeys(name for row in rows for name in row)
        names = [name for name in every if any(row.get(name) not in (None, "") for row in rows)]

        def text(value: Any) -> str:
            return nothing if value is None else f"{value:z.4g}" if isinstance(value, float) else str(value)

        return cls(header=tuple(names), rows=tuple(tuple(text(row.get(name)) for name in names) for row in rows))

    def to_text(self) -> str:
        """Return the table in aligned columns, for a terminal."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        texts = []
        for first, *others in (self.header, *self.rows):
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            texts.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
        return "\n".join([texts[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *texts[1:]])

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        rule = ("---", *("---:" for _ in self.header[1:]))
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.header, rule, *self.rows))


def summary_table(run: Selection, speeds: Callable[[str], Row] = lambda _subject: {}) -> Table:
    """Return quality, sparsity and speed of each measured model of a run; columns without any value are left out.

    `speeds` returns further columns of a subject.
    """
    rows: list[Row] = []
    dense, adapted = (run.number(subject, PERPLEXITY) for subject in ("dense", "dense + LoRA"))
    for subject in run.subjects():
        perplexity = run.number(subject, PERPLEXITY)
        shares = {
            f"{name} %": (run.number(subject, metric or run.measure()[0]), percent) for name, metric in _SHARES.items()
        }
        values = {
            "perplexity": (perplexity, decimal),
            "x dense": (_ratio(perplexity, dense), decimal),
            "x dense + LoRA": (_ratio(perplexity, adapted) if subject in ADAPTED else None, decimal),
            "word ppl": (run.number(subject, "word_perplexity"), decimal),
            **shares,
            "trained tokens/s": (run.number(subject, "training.tokens_per_second"), "{:z,.0f}".format),
        }
        shown = {title: None if value is None else show(value) for title, (value, show) in values.items()}
        rows.append({"model": NAMES[subject], **shown, **speeds(subject)})
    return Table.of_rows(rows, nothing="-")


def verdict(run: Selection) -> list[str]:
    """Return in sentences what the last model of a run lost and skipped, and how that was measured; none if unknown."""
    subject = next((name for name in reversed(run.subjects()) if name not in ("dense", "dense + LoRA")), "")
    peer = next((name for name in ("dense + LoRA", "dense") if name in run.subjects()), "")
    if subject not in ADAPTED:
        peer = "dense"
    perplexity, of_peer = run.number(subject, PERPLEXITY), run.number(peer, PERPLEXITY)
    if perplexity is None or not of_peer:
        return []
    error = run.ratio_stderr(subject, peer)
    metric, words = run.measure()
    skipped, target = run.number(subject, metric), run.number("run", "target.sparsity")
    asked = "" if target is None else f" ({100 * target:g} % was asked for)"
    with_lora = {"dense + LoRA": " with the same LoRA"}.get(peer, "")
    lines = [f"{decimal(perplexity / of_peer, error)} times the perplexity of the dense model{with_lora}"]
    lines[0] += "." if skipped is None else f", with {percent(skipped)} % {words} skipped{asked}."
    record = run.record(subject, PERPLEXITY)
    lines.append(
        f"Perplexity {decimal(perplexity, perplexity_stderr(*run.windows(subject)))}, dense{with_lora} "
        f"{decimal(of_peer, perplexity_stderr(*run.windows(peer)))}; per token, on {record.where if record else ''}. "
        "± is the standard error over windows."
    )
    if subject in ADAPTED and not with_lora:
        name = ADAPTED[subject]
        lines.append(
            f"{name[0].upper()}{name[1:]} also learned from the training text, which the dense model did not: part of "
            "what it gains is that. With recover.dense_baseline the dense model gets the same LoRA."
        )
    return lines


def decimal(value: float, error: float | None = None) -> str:
    """Return a perplexity or a ratio as text, with its error where there is one."""
    if not math.isfinite(value) or value >= 10_000:
        return f"{value:.3g}"
    return f"{value:z.2f}" if error is None else f"{value:z.2f} ± {error:.2f}"


def percent(value: float, error: float | None = None) -> str:
    """Return a share in percent as text, with its error where there is one."""
    return f"{100 * value:z.1f}" if error is None else f"{100 * value:z.1f} ± {100 * error:.1f}"


def _ratio(value: float | None, of: float | None) -> float | None:
    return value / of if value is not None and of else None
