"""Skipped shares over the layers, of several models in one picture: of a comparison's rows, or of runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wide.report.cells import Cell
from wide.report.comparison import DENSE, Comparison, Row
from wide.report.comparison_style import Styles, method_legend, method_styles, styles_of
from wide.report.evidence import Evidence
from wide.report.figure import Figure, Sheet
from wide.report.selection import MissingRecordsError
from wide.report.style import HALF_NAMES, whole_numbers

_HALF = 0.5
_NAME, _TITLE, _SIZE = "layers-compared", "Sparsity by layer, compared", (9.0, 3.8)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """One model: its name, and for each half-layer the (layer, skipped share) pairs, first layer first."""

    name: str
    halves: dict[str, list[tuple[int, float]]]


def _draw(figure: Any, lines: Sequence[_Line], styles: Styles, about: str) -> str:
    halves = [half for half in HALF_NAMES if any(half in line.halves for line in lines)]
    panels = figure.subplots(1, len(halves), squeeze=False, sharey=True)[0]
    sentences = []
    for axes, half in zip(panels, halves, strict=True):
        for line in lines:
            points = line.halves.get(half, [])
            marker, colour = styles[line.name]
            shares = [100 * share for _, share in points]
            axes.plot([layer for layer, _ in points], shares, f"{marker}-", color=colour, linewidth=1.2, alpha=0.9)
            if points:
                most = max(points, key=lambda point: point[1])
                words = f"{sum(shares) / len(shares):.0f} % on average, most in layer {most[0]}"
                sentences.append(f"{HALF_NAMES[half]}, {line.name}: {words}")
        axes.set_ylim(-3, 103)
        axes.set_title(HALF_NAMES[half], fontsize="medium")
        axes.set_xlabel("decoder layer")
        whole_numbers(axes.xaxis)
    panels[0].set_ylabel("skipped or pruned, %")
    method_legend(figure, {line.name: styles[line.name] for line in lines}, stages=False)
    return f"What is skipped in each layer, {about}. " + "; ".join(sentences) + "."


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
            seeds = [] if row.recovered or row.method == DENSE else comparison.seeds(row, target)
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
)
"""Of a comparison's rows at one target."""
LAYERS_OF_RUNS: Figure[Evidence] = Figure(
    name=_NAME, title=_TITLE, size=_SIZE, draw=_draw_runs, sheet=lambda evidence: _sheet(_of_runs(evidence))
)
"""Of the last model of each run."""
