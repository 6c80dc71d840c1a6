"""The figure of a comparison whose cells were timed: what each is worth against its measured speed."""

from dataclasses import dataclass
from typing import Any

from wide.report.comparison import DENSE, FINISHED, PERPLEXITY, Comparison, Row, record_files
from wide.report.comparison_style import logarithmic, method_legend, method_styles
from wide.report.figure import Figure, Sheet
from wide.report.labels import place_labels
from wide.report.profiles import Forward
from wide.report.selection import MissingRecordsError

_COLUMNS = 2
# What is worse than this many times dense would squeeze everything else.
_HIGHEST = 6
_MIDDLE = 0.5
# More numbers below a narrow panel would run together.
_TICKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """One checkpoint at one shape: its own perplexity and its own speed."""

    method: str
    sparsity: float
    seed: int
    perplexity: float
    forward: Forward


def _points(comparison: Comparison) -> list[_Point]:
    points = []
    for speed in comparison.speeds:
        cell, forward = speed.cell, speed.forward
        subject = cell.subject(recovered=False)
        value = comparison.run.number(subject, PERPLEXITY)
        is_finished = comparison.run.text(subject, "status") == FINISHED
        # Speed of another model says nothing about this one.
        if is_finished and value is not None and forward.model == comparison.run.text("run", "model"):
            points.append(
                _Point(method=cell.method, sparsity=cell.sparsity, seed=cell.seed, perplexity=value, forward=forward)
            )
    if not points:
        raise MissingRecordsError(
            "no cell whose perplexity and whose speed are both measured; time a comparison's cells on a GPU with wide "
            "profile --model M --comparison DIR"
        )
    return sorted(points, key=lambda point: (point.method, point.sparsity, point.seed))


def _panels(comparison: Comparison) -> dict[str, list[_Point]]:
    """Return the points by shape: prefills before steps, the larger shape first."""
    points = _points(comparison)
    shapes = sorted(
        {(p.forward.what != "prefill", -p.forward.batch * p.forward.tokens, p.forward.shape) for p in points}
    )
    return {shape: [point for point in points if point.forward.shape == shape] for *_, shape in shapes}


def _height(comparison: Comparison) -> float:
    return 0.4 + 3.4 * -(-len(_panels(comparison)) // _COLUMNS)


def _draw(figure: Any, comparison: Comparison) -> str:
    from matplotlib.ticker import MaxNLocator

    panels, styles, sentences = _panels(comparison), method_styles(comparison), []
    dense = comparison.value(Row(DENSE, False), 0.0, PERPLEXITY)
    top = float("inf") if dense is None else _HIGHEST * dense.mean
    grid = figure.subplots(-(-len(panels) // _COLUMNS), min(len(panels), _COLUMNS), squeeze=False, sharey=True)
    for axes, (shape, points) in zip(grid.flatten(), panels.items(), strict=False):
        for method in dict.fromkeys(point.method for point in points):
            line = [point for point in points if point.method == method]
            _draw_line(axes, line, styles[method], top)
            values = ", ".join(f"{point.forward.speedup:.2f}x at {point.perplexity:.1f}" for point in line)
            sentences.append(f"{shape}, {method}: {values}")
        if dense is not None:
            axes.plot(1, dense.mean, "*", color="black", markersize=11)
            axes.annotate("dense", (1, dense.mean), xytext=(6, -9), textcoords="offset points", fontsize="x-small")
        axes.axvline(1, color="black", linewidth=1)
        axes.margins(x=0.12, y=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=_TICKS, steps=[1, 2, 5, 10], min_n_ticks=3))
        logarithmic(axes)
        axes.set_title(shape, fontsize="medium", loc="left")
    for axes in grid.flatten()[len(panels) :]:
        axes.set_axis_off()
    figure.supxlabel("measured speed-up over its dense peer (left of the line: slower than dense)", fontsize="medium")
    figure.supylabel("perplexity", fontsize="medium")
    drawn = dict.fromkeys(point.method for points in panels.values() for point in points)
    method_legend(figure, {method: styles[method] for method in styles if method in drawn}, stages=False)
    targets = {point.sparsity for points in panels.values() for point in points}
    if len(targets) > 1:
        # Where words fit is known when all else has its place.
        figure.draw_without_rendering()
        for axes, points in zip(grid.flatten(), panels.values(), strict=False):
            _name_targets(axes, points, top)
    numbers = "numbers are targets in %" if len(targets) > 1 else f"all at a target of {100 * targets.pop():.3g} %"
    return (
        f"Perplexity of each checkpoint, calibrated only, against its own measured speed; {numbers}. "
        f"Lower right is better. Arrows stand for perplexities above {_HIGHEST} x dense. " + "; ".join(sentences) + "."
    )


def _draw_line(axes: Any, line: list[_Point], style: tuple[str, str], top: float) -> None:
    marker, colour = style
    shown = [point for point in line if point.perplexity <= top]
    places = [(point.forward.speedup, point.perplexity) for point in shown]
    if places:
        axes.plot(*zip(*places, strict=True), f"{marker}-", color=colour, linewidth=1)
    for point in line:
        if point.perplexity > top:
            axes.annotate(
                f"{100 * point.sparsity:.3g}",
                (point.forward.speedup, 0.99),
                xytext=(point.forward.speedup, 0.86),
                xycoords=("data", "axes fraction"),
                arrowprops={"arrowstyle": "->", "color": colour},
                color=colour,
                fontsize=6.5,
                ha="center",
            )
            # Only so that the axis reaches there.
            axes.plot(point.forward.speedup, top, marker="")


def _name_targets(axes: Any, points: list[_Point], top: float) -> None:
    """Write the targets beside the ends and the middle of each line: all of them would cover each other."""
    labels = []
    for method in dict.fromkeys(point.method for point in points):
        line = [point for point in points if point.method == method and point.perplexity <= top]
        targets = [point.sparsity for point in line]
        labels += [
            (f"{100 * point.sparsity:.3g}", (point.forward.speedup, point.perplexity))
            for point in line
            if point.sparsity in (min(targets), max(targets), _MIDDLE)
        ]
    place_labels(axes, labels, size=6.5)


def _sheet(comparison: Comparison) -> Sheet:
    header = ("method", "sparsity", "seed", "what", "tokens", "batch", "perplexity", "speedup", "median_us")
    more = ("skipped_attention", "skipped_ffn", "candidate", "device")
    rows = (
        (
            *(point.method, point.sparsity, point.seed),
            *(point.forward.what, point.forward.tokens, point.forward.batch),
            *(point.perplexity, point.forward.speedup, point.forward.median_us),
            *(point.forward.skipped or (None, None)),
            *(point.forward.candidate, point.forward.device),
        )
        for point in _points(comparison)
    )
    return Sheet((*header, *more), tuple(rows))


SPEED_FIGURE: Figure[Comparison] = Figure(
    name="quality-speed",
    title="Quality against measured speed",
    size=(9.0, 4.0),
    draw=_draw,
    sheet=_sheet,
    files=lambda comparison: [
        *record_files(comparison),
        *(point.forward.file for point in _points(comparison)),
    ],
    height=_height,
)
"""Perplexity of cells against the speed that was measured of the same checkpoints."""
