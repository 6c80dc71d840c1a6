"""The figure of a comparison whose rows differ in the size of groups, of the FFN or of attention."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from wide.report.comparison import RATIO, Comparison, Row, Value, record_files
from wide.report.comparison_style import logarithmic
from wide.report.figure import Figure, Sheet
from wide.report.selection import MissingRecordsError
from wide.report.style import CYCLE, MARKERS, legend_above

_SIZES = {"ffn_group_size": "channels of an FFN group", "attention_group_size": "query channels of an attention group"}
_STYLES = tuple(zip(MARKERS, CYCLE, strict=False))
_FFN = "ffn_group_size"
_WIDE = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """A row at one sparsity: the size of its groups and what it is worth."""

    row: Row
    sparsity: float
    size: int
    value: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """Rows that differ in one size alone, with what else they are set to."""

    settings: Mapping[str, Any]
    points: list[_Point]


def _lines(comparison: Comparison, key: str) -> dict[str, list[_Point]]:
    """Return the rows that differ in one size alone, where there are at least two of it."""
    lines: dict[tuple[Any, ...], _Line] = {}
    trained: dict[tuple[Any, ...], list[Any]] = {}
    kept: list[tuple[tuple[Any, ...], Any, _Line]] = []
    for row in comparison.rows:
        for sparsity in comparison.sparsities if not comparison.is_dense(row) else ():
            settings = comparison.settings(row.method, sparsity)
            value = comparison.value(row, sparsity, RATIO)
            size = settings.get(key)
            if size is None or value is None or not math.isfinite(value.mean):
                continue
            others = {name: value for name, value in settings.items() if name != key}
            point = _Point(row=row, sparsity=sparsity, size=int(size), value=value)
            alike = (json.dumps(others, sort_keys=True), sparsity, row.recovered)
            training = comparison.training(row.method, sparsity)
            # Rows of older records, which do not say how they were trained, join the first of those that are alike.
            known = trained.setdefault(alike, [])
            if training is not None and training not in known:
                known.append(training)
            kept.append((alike, training, _Line(settings=others, points=[point])))
    for alike, training, line in kept:
        place = (*alike, 0 if training is None else trained[alike].index(training))
        lines.setdefault(place, replace(line, points=[])).points.extend(line.points)
    several = [line for line in lines.values() if len({point.size for point in line.points}) > 1]
    found: dict[str, list[_Point]] = {}
    for line in several:
        first = line.points[0]
        name = f"{100 * first.sparsity:.4g} %{_apart(line, several)}{', with LoRA' if first.row.recovered else ''}"
        name = name if name not in found else f"{name}, {first.row.method}"
        found[name] = sorted(line.points, key=lambda point: (point.size, point.row.method))
    return found


def _apart(line: _Line, lines: list[_Line]) -> str:
    """Return the words among a line's settings that other lines do not share."""
    words = [
        str(value)
        for name, value in line.settings.items()
        if isinstance(value, str) and any(other.settings.get(name) != value for other in lines)
    ]
    return "".join(f", {word}" for word in words)


def _panels(comparison: Comparison) -> dict[str, dict[str, list[_Point]]]:
    panels = {key: lines for key in _SIZES if (lines := _lines(comparison, key))}
    if not panels:
        raise MissingRecordsError(
            f"no rows that differ in {_FFN} alone, or in attention_group_size; compare variants of one method with "
            "several group sizes"
        )
    return panels


def _draw(figure: Any, comparison: Comparison) -> str:
    panels, sentences = _panels(comparison), []
    for axes, (key, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels.items(), strict=True
    ):
        _draw_panel(axes, lines, key)
        sentences += [
            f"{key}, {name}: " + ", ".join(f"{point.value.mean:.2f} at {point.size}" for point in points)
            for name, points in lines.items()
        ]
        axes.set_ylabel("perplexity, x dense" if key == next(iter(panels)) else "")
    ratios = [point.value.mean for lines in panels.values() for points in lines.values() for point in points]
    if max(ratios) > _WIDE * min(ratios):
        # One size that breaks the model would press all others onto one line.
        logarithmic(axes)
    return "Quality over the size of groups; dashed and hollow without LoRA. " + "; ".join(sentences) + "."


def _draw_panel(axes: Any, lines: Mapping[str, list[_Point]], key: str) -> None:
    sizes = sorted({point.size for points in lines.values() for point in points})
    kinds = list(dict.fromkeys(name.removesuffix(", with LoRA") for name in lines))
    for name, points in lines.items():
        marker, colour = _STYLES[kinds.index(name.removesuffix(", with LoRA")) % len(_STYLES)]
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
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel(_SIZES[key])
    legend_above(axes, columns=2)


def _sheet(comparison: Comparison) -> Sheet:
    rows = (
        (
            point.row.method,
            int(point.row.recovered),
            point.sparsity,
            key,
            point.size,
            point.value.mean,
            point.value.error,
        )
        for key, lines in _panels(comparison).items()
        for points in lines.values()
        for point in points
    )
    return Sheet(("method", "recovered", "target", "varied", "size", "ratio", "error"), tuple(rows))


GROUP_FIGURE: Figure[Comparison] = Figure(
    name="quality-groups",
    title="Quality over the size of groups",
    size=(9.0, 3.8),
    draw=_draw,
    sheet=_sheet,
    files=record_files,
)
"""Perplexity over the size of FFN groups and of attention groups."""
