"""The figures of a comparison: what each method is worth over sparsity, work, the size of groups, and speed."""

import math
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from wide.report.comparison import DENSE, RATIO, RETENTION, Comparison, Row, Value, record_files
from wide.report.comparison_groups import GROUP_FIGURE
from wide.report.comparison_speed import SPEED_FIGURE
from wide.report.comparison_style import Dash, Styles, logarithmic, method_legend, method_styles
from wide.report.figure import Figure, Sheet
from wide.report.layer_lines import LAYERS_OF_METHODS
from wide.report.selection import MissingRecordsError

_WORK = "sparsity.linear_flops_layers"
# Of the dense model with LoRA, several only where rows have different ones; short enough for the lines of a legend.
# After eight they repeat.
_DASHES: tuple[Dash, ...] = (
    *(":", "-.", (0, (8, 2, 1, 2, 1, 2))),
    *((0, (1, 4)), (0, (4, 3)), (0, (3, 1, 1, 1, 1, 1)), (0, (10, 3)), (0, (2, 1, 2, 5))),
)
_PANELS = ((RATIO, "perplexity, x dense"), (RETENTION, "average accuracy, share of dense"))


def _lines(comparison: Comparison, metric: str) -> Iterator[tuple[Row, list[tuple[float, Value]]]]:
    for row in comparison.rows:
        if comparison.is_dense(row):
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
    panels, styles, sentences = _measured(comparison), method_styles(comparison), []
    for axes, (metric, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for row, points in _lines(comparison, metric):
            _plot(axes, row, styles, [100 * sparsity for sparsity, _ in points], [value for _, value in points])
            best = ", ".join(f"{value.mean:.2f} at {100 * sparsity:.3g} %" for sparsity, value in points)
            sentences.append(f"{label}, {_name(row)}: {best}")
        _dense_lines(axes, comparison, metric)
        axes.set_xlabel("target sparsity, %")
        axes.set_ylabel(label)
    shown = {row.method: styles[row.method] for metric, _ in panels for row, _ in _lines(comparison, metric)}
    _legend(figure, comparison, shown, [metric for metric, _ in panels])
    return "Quality over sparsity; dashed and hollow without LoRA. " + "; ".join(sentences) + "."


def _plot(axes: Any, row: Row, styles: Styles, places: Sequence[float], values: Sequence[Value]) -> None:
    marker, colour = styles[row.method]
    axes.errorbar(
        places,
        [value.mean for value in values],
        yerr=[value.error or 0.0 for value in values],
        fmt=marker + ("-" if row.recovered else "--"),
        color=colour,
        fillstyle="full" if row.recovered else "none",
        capsize=3,
    )


def _dense_lines(axes: Any, comparison: Comparison, metric: str) -> None:
    axes.axhline(1, color="black", linewidth=1)
    for row, dash in _adapted(comparison).items():
        value = comparison.value(row, 0.0, metric)
        if value is not None:
            # LoRA fits the calibration text, too: the dense model with the same LoRA is the fair partner of such rows.
            axes.axhline(value.mean, color="black", linewidth=1, linestyle=dash)
    if metric == RATIO:
        logarithmic(axes)


def _adapted(comparison: Comparison) -> dict[Row, Dash]:
    """Return the dashes of the dense model with each LoRA, measured or not: the same in all figures."""
    rows = [row for row in comparison.rows if comparison.is_dense(row) and row.recovered]
    return dict(zip(rows, cycle(_DASHES), strict=False))


def _legend(figure: Any, comparison: Comparison, shown: Styles, metrics: Sequence[str]) -> None:
    """Put a legend beside axes of these metrics."""
    lines: dict[str, Dash] = {DENSE: "-"}
    lines |= {
        _name(row): dash
        for row, dash in _adapted(comparison).items()
        if any(comparison.value(row, 0.0, metric) is not None for metric in metrics)
    }
    method_legend(figure, shown, stages=any(row.recovered for row in comparison.rows), lines=lines)


def _sheet(comparison: Comparison) -> Sheet:
    rows = (
        (metric, row.method, int(row.recovered), sparsity, value.mean, value.error, value.seeds)
        for metric, _ in _measured(comparison)
        for row, points in _lines(comparison, metric)
        for sparsity, value in points
    )
    return Sheet(("metric", "method", "recovered", "target", "mean", "error", "seeds"), tuple(rows))


def _by_work(comparison: Comparison) -> Iterator[tuple[Row, list[tuple[float, float, Value]]]]:
    """Yield the rows that skip matrix products, with (share of the layers' work, target, perplexity to dense)."""
    for row, points in _lines(comparison, RATIO):
        works = [(comparison.value(row, sparsity, _WORK), sparsity, value) for sparsity, value in points]
        found = sorted(
            ((work.mean, sparsity, value) for work, sparsity, value in works if work is not None and work.mean > 0.0),
            key=lambda point: point[:2],
        )
        if found:
            yield row, found


def _measured_work(comparison: Comparison) -> list[tuple[Row, list[tuple[float, float, Value]]]]:
    lines = list(_by_work(comparison))
    if not lines:
        raise MissingRecordsError(
            f"no finished cell with '{_WORK}' above 0 and a 'token_perplexity' beside a dense one"
        )
    return lines


def _draw_work(figure: Any, comparison: Comparison) -> str:
    lines, styles, axes, sentences = _measured_work(comparison), method_styles(comparison), figure.subplots(), []
    for row, points in lines:
        _plot(axes, row, styles, [100 * work for work, _, _ in points], [value for _, _, value in points])
        words = ", ".join(f"{value.mean:.2f} at {100 * work:.3g} %" for work, _, value in points)
        sentences.append(f"{_name(row)}: {words}")
    _dense_lines(axes, comparison, RATIO)
    axes.set_xlabel("matrix products of the decoder layers that are skipped (measured), %")
    axes.set_ylabel(_PANELS[0][1])
    shown = {row.method: styles[row.method] for row, _ in lines}
    _legend(figure, comparison, shown, [RATIO])
    return "Perplexity over the work that is really left out; hollow without LoRA. " + "; ".join(sentences) + "."


def _work_sheet(comparison: Comparison) -> Sheet:
    rows = (
        (row.method, int(row.recovered), target, work, value.mean, value.error)
        for row, points in _measured_work(comparison)
        for work, target, value in points
    )
    return Sheet(("method", "recovered", "target", "skipped_work", "ratio", "error"), tuple(rows))


COMPARISON_FIGURES: tuple[Figure[Comparison], ...] = (
    Figure(
        name="quality-sparsity",
        title="Quality over sparsity",
        size=(9.0, 4.8),
        draw=_draw,
        sheet=_sheet,
        files=record_files,
    ),
    Figure(
        name="quality-work",
        title="Quality over skipped work",
        size=(9.0, 4.8),
        draw=_draw_work,
        sheet=_work_sheet,
        files=record_files,
    ),
    GROUP_FIGURE,
    SPEED_FIGURE,
    LAYERS_OF_METHODS,
)
"""Figures of a comparison."""
