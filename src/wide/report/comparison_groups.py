"""The figure of a comparison whose rows differ in the size of FFN groups."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wide.report.comparison import DENSE, RATIO, Comparison, Row, Value
from wide.report.figure import Figure, Sheet
from wide.report.selection import MissingRecordsError
from wide.report.style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, legend_above

_SIZE = "ffn_group_size"
_STYLES = (("o", BLUE), ("s", ORANGE), ("^", GREEN), ("D", PURPLE), ("v", VERMILION), ("P", SKY))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """A row at one sparsity: its group size and what it is worth."""

    row: Row
    sparsity: float
    size: int
    value: Value


def _settings(comparison: Comparison, row: Row, sparsity: float) -> Mapping[str, Any]:
    text = comparison.text(Row(row.method, False), sparsity, "settings")
    found = json.loads(text) if text else {}
    return found if isinstance(found, dict) else {}


def _lines(comparison: Comparison) -> dict[str, list[_Point]]:
    """Return the rows that differ in the size of groups alone, where there are at least two sizes."""
    lines: dict[tuple[Any, ...], list[_Point]] = {}
    for row in comparison.rows:
        for sparsity in comparison.sparsities if row.method != DENSE else ():
            settings = _settings(comparison, row, sparsity)
            value = comparison.value(row, sparsity, RATIO)
            size = settings.get(_SIZE)
            if size is None or value is None or not math.isfinite(value.mean):
                continue
            others = json.dumps({key: value for key, value in settings.items() if key != _SIZE}, sort_keys=True)
            point = _Point(row=row, sparsity=sparsity, size=int(size), value=value)
            lines.setdefault((others, sparsity, row.recovered), []).append(point)
    found = {}
    for (_, sparsity, recovered), points in lines.items():
        if len({point.size for point in points}) > 1:
            name = f"{100 * sparsity:.4g} %{', with LoRA' if recovered else ''}"
            name = name if name not in found else f"{name}, {points[0].row.method}"
            found[name] = sorted(points, key=lambda point: (point.size, point.row.method))
    if not found:
        raise MissingRecordsError(
            f"no rows that differ in {_SIZE} alone; compare variants of one method with several group sizes"
        )
    return found


def _draw(figure: Any, comparison: Comparison) -> str:
    lines = _lines(comparison)
    axes = figure.subplots()
    sizes = sorted({point.size for points in lines.values() for point in points})
    targets = sorted({points[0].sparsity for points in lines.values()})
    sentences = []
    for name, points in lines.items():
        marker, colour = _STYLES[targets.index(points[0].sparsity) % len(_STYLES)]
        recovered = points[0].row.recovered
        axes.errorbar(
            [sizes.index(point.size) for point in points],
            [point.value.mean for point in points],
            yerr=[point.value.error or 0.0 for point in points],
            fmt=marker + ("-" if recovered else "--"),
            color=colour,
            fillstyle="full" if recovered else "none",
            capsize=3,
            label=name,
        )
        sentences.append(f"{name}: " + ", ".join(f"{point.value.mean:.2f} at {point.size}" for point in points))
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("channels of an FFN group")
    axes.set_ylabel("perplexity, x dense")
    legend_above(axes, columns=3)
    return "Quality over the size of groups; dashed and hollow without LoRA. " + "; ".join(sentences) + "."


def _sheet(comparison: Comparison) -> Sheet:
    rows = (
        (point.row.method, int(point.row.recovered), point.sparsity, point.size, point.value.mean, point.value.error)
        for points in _lines(comparison).values()
        for point in points
    )
    return Sheet(("method", "recovered", "target", _SIZE, "ratio", "error"), tuple(rows))


GROUP_FIGURE: Figure[Comparison] = Figure(
    name="quality-groups", title="Quality over the size of groups", size=(9.0, 3.6), draw=_draw, sheet=_sheet
)
"""Perplexity over the size of FFN groups."""
