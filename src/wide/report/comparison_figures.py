"""The figure of a comparison: what each method is worth over sparsity."""

import math
from collections.abc import Iterator
from typing import Any

from wide.report.comparison import DENSE, RATIO, RETENTION, Comparison, Row, Value
from wide.report.figure import Figure, Sheet
from wide.report.selection import MissingRecordsError
from wide.report.style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, legend_above

_STYLES = (("o", BLUE), ("s", ORANGE), ("^", GREEN), ("D", PURPLE), ("v", VERMILION), ("P", SKY))
_PANELS = ((RATIO, "perplexity, x dense"), (RETENTION, "average accuracy, share of dense"))


def _lines(comparison: Comparison, metric: str) -> Iterator[tuple[Row, list[tuple[float, Value]]]]:
    for row in comparison.rows:
        if row.method == DENSE:
            continue
        found = [(sparsity, comparison.value(row, sparsity, metric)) for sparsity in comparison.sparsities]
        points = [(sparsity, value) for sparsity, value in found if value is not None and math.isfinite(value.mean)]
        if points:
            yield row, points


def _name(row: Row) -> str:
    return f"{row.method} + LoRA" if row.recovered else row.method


def _measured(comparison: Comparison) -> list[tuple[str, str]]:
    panels = [(metric, label) for metric, label in _PANELS if any(_lines(comparison, metric))]
    if not panels:
        raise MissingRecordsError("no finished cell with a 'token_perplexity' or 'accuracy.average' beside a dense one")
    return panels


def _draw(figure: Any, comparison: Comparison) -> str:
    panels = _measured(comparison)
    methods = [method for method in dict.fromkeys(row.method for row in comparison.rows) if method != DENSE]
    styles = dict(zip(methods, _STYLES * len(methods), strict=False))
    sentences = []
    for axes, (metric, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for row, points in _lines(comparison, metric):
            marker, colour = styles[row.method]
            axes.errorbar(
                [100 * sparsity for sparsity, _ in points],
                [value.mean for _, value in points],
                yerr=[value.error or 0.0 for _, value in points],
                fmt=marker + ("-" if row.recovered else "--"),
                color=colour,
                fillstyle="full" if row.recovered else "none",
                capsize=3,
                label=_name(row),
            )
            best = ", ".join(f"{value.mean:.2f} at {100 * sparsity:.3g} %" for sparsity, value in points)
            sentences.append(f"{label}, {_name(row)}: {best}")
        axes.axhline(1, color="black", linewidth=1)
        if metric == RATIO:
            axes.set_yscale("log")
        axes.set_xlabel("target sparsity, %")
        axes.set_ylabel(label)
        legend_above(axes, columns=2)
    return "Quality over sparsity; dashed and hollow without LoRA. " + "; ".join(sentences) + "."


def _sheet(comparison: Comparison) -> Sheet:
    rows = (
        (metric, row.method, int(row.recovered), sparsity, value.mean, value.error, value.seeds)
        for metric, _ in _measured(comparison)
        for row, points in _lines(comparison, metric)
        for sparsity, value in points
    )
    return Sheet(("metric", "method", "recovered", "target", "mean", "error", "seeds"), tuple(rows))


COMPARISON_FIGURES: tuple[Figure[Comparison], ...] = (
    Figure(name="quality-sparsity", title="Quality over sparsity", size=(9.0, 4.4), draw=_draw, sheet=_sheet),
)
"""Figures of a comparison."""
