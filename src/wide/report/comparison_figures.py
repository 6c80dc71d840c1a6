"""The figures of a comparison: what each method is worth over sparsity, and over the size of groups."""

import math
from collections.abc import Iterator
from typing import Any

from wide.report.comparison import DENSE, RATIO, RETENTION, Comparison, Row, Value
from wide.report.comparison_groups import GROUP_FIGURE
from wide.report.figure import Figure, Sheet
from wide.report.selection import MissingRecordsError
from wide.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

# As many shapes as methods; they and the colours repeat after different numbers, so that pairs do not.
_MARKERS = "os^DvPX*<>phd"
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, GREY)
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
    styles = {
        method: (_MARKERS[place % len(_MARKERS)], _COLOURS[place % len(_COLOURS)])
        for place, method in enumerate(methods)
    }
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
            )
            best = ", ".join(f"{value.mean:.2f} at {100 * sparsity:.3g} %" for sparsity, value in points)
            sentences.append(f"{label}, {_name(row)}: {best}")
        axes.axhline(1, color="black", linewidth=1)
        if metric == RATIO:
            _logarithmic(axes)
        axes.set_xlabel("target sparsity, %")
        axes.set_ylabel(label)
    _legend(figure, {row.method: styles[row.method] for metric, _ in panels for row, _ in _lines(comparison, metric)})
    return "Quality over sparsity; dashed and hollow without LoRA. " + "; ".join(sentences) + "."


def _logarithmic(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, ScalarFormatter

    axes.set_yscale("log")
    # Powers of ten alone would leave most axes without two numbers.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(LogLocator(subs=()))


def _legend(figure: Any, styles: dict[str, tuple[str, str]]) -> None:
    from matplotlib.lines import Line2D

    entries = [
        Line2D([], [], marker=marker, color=colour, linestyle="none", label=method)
        for method, (marker, colour) in styles.items()
    ]
    entries.append(Line2D([], [], marker="o", color="black", fillstyle="none", linestyle="--", label="without LoRA"))
    entries.append(Line2D([], [], marker="o", color="black", linestyle="-", label="with LoRA"))
    figure.legend(handles=entries, loc="outside right upper", frameon=False, fontsize="small")


def _sheet(comparison: Comparison) -> Sheet:
    rows = (
        (metric, row.method, int(row.recovered), sparsity, value.mean, value.error, value.seeds)
        for metric, _ in _measured(comparison)
        for row, points in _lines(comparison, metric)
        for sparsity, value in points
    )
    return Sheet(("metric", "method", "recovered", "target", "mean", "error", "seeds"), tuple(rows))


COMPARISON_FIGURES: tuple[Figure[Comparison], ...] = (
    Figure(name="quality-sparsity", title="Quality over sparsity", size=(9.0, 4.8), draw=_draw, sheet=_sheet),
    GROUP_FIGURE,
)
"""Figures of a comparison."""
