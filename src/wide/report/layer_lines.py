"""Skipped shares over the layers, of several models in one picture: of a comparison's rows, or of runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wide.report.cells import Cell
from wide.report.comparison import Comparison, Row, record_files
from wide.report.comparison_style import Styles, method_styles, styles_of
from wide.report.evidence import Evidence
from wide.report.figure import Figure, Sheet
from wide.report.selection import MissingRecordsError
from wide.report.style import DASHES, HALF_NAMES, whole_numbers

_HALF = 0.5
_NAME, _TITLE, _SIZE = "layers-compared", "Sparsity by layer, compared", (9.0, 3.8)
# More lines in one panel cannot be told apart; the next ones get panels below.
_MOST, _ROW = 6, 2.8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """One model: its name, and for each half-layer the (layer, skipped share) pairs, first layer first."""

    name: str
    halves: dict[str, list[tuple[int, float]]]


def _height(count: int) -> float:
    return 0.4 + _ROW * -(-count // _MOST)


def _draw(figure: Any, lines: Sequence[_Line], styles: Styles, about: str) -> str:
    halves = [half for half in HALF_NAMES if any(half in line.halves for line in lines)]
    rows = -(-len(lines) // _MOST)
    # Equally full: 8 lines are two rows of 4.
    each = -(-len(lines) // rows)
    grid = figure.subplots(rows, len(halves), squeeze=False, sharex=True, sharey=True)
    for number, panels in enumerate(grid):
        shown = lines[number * each : (number + 1) * each]
        for axes, half in zip(panels, halves, strict=True):
            _draw_panel(axes, shown, half, styles)
            if number == 0:
                axes.set_title(HALF_NAMES[half], fontsize="medium")
        handles, names = panels[0].get_legend_handles_labels()
        panels[-1].legend(
            handles,
            names,
            loc="center left",
            bbox_to_anchor=(1.02, 0.5),
            frameon=False,
            fontsize="small",
            handlelength=3.2,
        )
    for axes in grid[-1]:
        axes.set_xlabel("decoder layer")
        whole_numbers(axes.xaxis)
    figure.supylabel("skipped or pruned, %", fontsize="medium")
    words = "; ".join(_in_words(line, half) for half in halves for line in lines if line.halves.get(half))
    return f"What is skipped in each layer, {about}. {words}."


def _draw_panel(axes: Any, lines: Sequence[_Line], half: str, styles: Styles) -> None:
    for place, line in enumerate(lines):
        points = line.halves.get(half, [])
        marker, colour = styles[line.name]
        axes.plot(
            [layer for layer, _ in points],
            [100 * share for _, share in points],
            marker=marker,
            linestyle=DASHES[place % len(DASHES)],
            color=colour,
            linewidth=1.2,
            label=line.name,
        )
    axes.set_ylim(-3, 103)


def _in_words(line: _Line, half: str) -> str:
    points = line.halves[half]
    most = max(points, key=lambda point: point[1])
    mean = 100 * sum(share for _, share in points) / len(points)
    return f"{HALF_NAMES[half]}, {line.name}: {mean:z.0f} % on average, most in layer {most[0]}"


def _sheet(lines: Sequence[_Line]) -> Sheet:
    rows = (
        (line.name, half, layer, share)
        for line in lines
        for half, points in line.halves.items()
        for layer, share in points
    )
    return Sheet(("name", "half", "layer", "skipped"), tuple(rows))


def _of_comparison(comparison: Comparison) -> tuple[float, list[_Line]]:
    """Return a target and the rows whose layers were measured at it, without LoRA; of the targets that nearest 50 %."""
    for target in sorted(comparison.sparsities, key=lambda each: (abs(each - _HALF), each)):
        lines = []
        for row in comparison.rows:
            seeds = [] if row.recovered or comparison.is_dense(row) else comparison.seeds(row, target)
            if seeds:
                lines += _line(comparison, row, target, seeds[0])
        if lines:
            return target, _with_dense_layers(lines)
    raise MissingRecordsError(
        "no record 'sparsity.attention' or 'sparsity.ffn' of a layer among the finished cells; wide compare writes them"
    )


def _with_dense_layers(lines: Sequence[_Line]) -> list[_Line]:
    """Return the lines with 0 where a layer has no record: it is dense there, and rows of one model have its layers."""
    layers = {layer for line in lines for points in line.halves.values() for layer, _ in points}
    whole = []
    for line in lines:
        shares = {half: dict(points) for half, points in line.halves.items()}
        filled = {half: [(layer, known.get(layer, 0.0)) for layer in sorted(layers)] for half, known in shares.items()}
        whole.append(_Line(name=line.name, halves=filled))
    return whole


def _line(comparison: Comparison, row: Row, target: float, seed: int) -> list[_Line]:
    subject = Cell(row.method, target, seed).subject(recovered=row.recovered)
    found = {half: comparison.run.by_layer(subject, f"sparsity.{half}") for half in HALF_NAMES}
    halves = {half: points for half, points in found.items() if points}
    return [_Line(name=row.method, halves=halves)] if halves else []


def _draw_comparison(figure: Any, comparison: Comparison) -> str:
    target, lines = _of_comparison(comparison)
    return _draw(figure, lines, method_styles(comparison), f"at a target of {100 * target:.4g} %, without LoRA")


def _of_runs(evidence: Evidence) -> list[_Line]:
    """Return the last model of each run, where there are several runs whose layers were measured."""
    lines = []
    for run in evidence.runs:
        subject = run.records.last_subject_with_layers()
        found = {half: run.records.by_layer(subject or "", f"sparsity.{half}") for half in HALF_NAMES}
        halves = {half: points for half, points in found.items() if points}
        lines += [_Line(name=run.name, halves=halves)] if halves else []
    if len(lines) < 2:
        raise MissingRecordsError(f"it takes two runs whose layers were measured, there are {len(lines)}")
    return lines


def _draw_runs(figure: Any, evidence: Evidence) -> str:
    lines = _of_runs(evidence)
    return _draw(figure, lines, styles_of([line.name for line in lines]), "by the last model of each run")


LAYERS_OF_METHODS: Figure[Comparison] = Figure(
    name=_NAME,
    title=_TITLE,
    size=_SIZE,
    draw=_draw_comparison,
    sheet=lambda comparison: _sheet(_of_comparison(comparison)[1]),
    height=lambda comparison: _height(len(_of_comparison(comparison)[1])),
    files=record_files,
)
"""Of a comparison's rows at one target."""
LAYERS_OF_RUNS: Figure[Evidence] = Figure(
    name=_NAME,
    title=_TITLE,
    size=_SIZE,
    draw=_draw_runs,
    sheet=lambda evidence: _sheet(_of_runs(evidence)),
    height=lambda evidence: _height(len(_of_runs(evidence))),
    files=lambda evidence: [origin.path for run in evidence.runs for origin in run.records.origins],
)
"""Of the last model of each run."""
