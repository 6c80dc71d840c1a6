"""The figures of a comparison: what each method is worth over sparsity, work, the size of groups, and speed."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from wide.report.comparison import DENSE, FINISHED, PERPLEXITY, RATIO, RETENTION, Comparison, Row, Value
from wide.report.figure import Figure, MissingRecordsError, required
from wide.report.figure import Row as Drawn
from wide.report.selection import SUBLAYERS

_WORK = "sparsity.linear_flops_layers"
_PANELS = {RATIO: "perplexity, x dense", RETENTION: "average accuracy, share of dense"}
_SIZES = {"ffn_group_size": "channels of an FFN group", "attention_group_size": "query channels of an attention group"}
_MIDDLE = 0.5
_OF_SPEED = (
    *("what", "tokens", "batch", "speedup", "median_us", "skipped_attention", "skipped_ffn", "candidate", "device"),
)
# What is worse than this many times dense would squeeze everything else.
_HIGHEST = 6


def _points(comparison: Comparison, metric: str) -> Iterator[tuple[Row, float, Value]]:
    for row in comparison.rows:
        for sparsity in comparison.sparsities if not comparison.is_dense(row) else ():
            value = comparison.value(row, sparsity, metric)
            if value is not None and math.isfinite(value.mean):
                yield row, sparsity, value


def _over_sparsity(comparison: Comparison) -> list[Drawn]:
    return [
        {
            "metric": metric,
            "panel": panel,
            "method": row.method,
            "recovered": int(row.recovered),
            "target": sparsity,
            "target, %": 100 * sparsity,
            "mean": value.mean,
            "error": value.error,
            "seeds": value.seeds,
        }
        for metric, panel in _PANELS.items()
        for row, sparsity, value in _points(comparison, metric)
    ]


def _dense_lines(comparison: Comparison) -> Mapping[str, Mapping[str, float]]:
    """Return the dense model with LoRA: LoRA fits the calibration text, so that it is the fair partner of rows."""
    values = {panel: comparison.value(Row(DENSE, True), 0.0, metric) for metric, panel in _PANELS.items()}
    known = {panel: value.mean for panel, value in values.items() if value is not None}
    return {DENSE: dict.fromkeys(_PANELS.values(), 1.0)} | ({f"{DENSE} + LoRA": known} if known else {})


def _over_work(comparison: Comparison) -> list[Drawn]:
    rows: list[Drawn] = []
    for row, sparsity, value in _points(comparison, RATIO):
        work = comparison.value(row, sparsity, _WORK)
        if work is not None and work.mean > 0.0:
            rows.append(
                {
                    "panel": _PANELS[RATIO],
                    "method": row.method,
                    "recovered": int(row.recovered),
                    "target": sparsity,
                    "skipped_work": work.mean,
                    "work, %": 100 * work.mean,
                    "ratio": value.mean,
                    "error": value.error,
                }
            )
    return sorted(rows, key=lambda row: (str(row["method"]), row["recovered"] or 0, row["skipped_work"] or 0))


def _over_groups(comparison: Comparison) -> list[Drawn]:
    """Return the rows that differ in one size of groups alone, where there are at least two of it."""
    rows: list[Drawn] = []
    for key, panel in _SIZES.items():
        lines: dict[tuple[Any, ...], list[tuple[int, Row, Value]]] = {}
        for row, sparsity, value in _points(comparison, RATIO):
            settings = dict(comparison.settings(row.method, sparsity))
            size = settings.pop(key, None)
            if size is not None:
                alike = (json.dumps(settings, sort_keys=True), sparsity, row.recovered)
                lines.setdefault(alike, []).append((int(size), row, value))
        several = {alike: points for alike, points in lines.items() if len({size for size, *_ in points}) > 1}
        for (_, sparsity, recovered), points in several.items():
            twins = [other for other, *rest in several if rest == [sparsity, recovered]]
            name = f", {points[0][1].method} and alike" if len(twins) > 1 else ""
            for size, row, value in sorted(points, key=lambda point: (point[0], point[1].method)):
                rows.append(
                    {
                        "varied": key,
                        "panel": panel,
                        "line": f"{100 * sparsity:.4g} %{name}",
                        "method": row.method,
                        "recovered": int(recovered),
                        "target": sparsity,
                        "size": size,
                        "ratio": value.mean,
                        "error": value.error,
                    }
                )
    return rows


def _over_speed(comparison: Comparison) -> list[Drawn]:
    dense = comparison.value(Row(DENSE, False), 0.0, PERPLEXITY)
    top = math.inf if dense is None else _HIGHEST * dense.mean
    rows: list[Drawn] = []
    for cell, forward in comparison.speeds:
        subject = cell.subject(recovered=False)
        value = comparison.run.number(subject, PERPLEXITY)
        is_finished = comparison.run.text(subject, "status") == FINISHED
        # Speed of another model says nothing about this one.
        if is_finished and value is not None and forward.model == comparison.run.text("run", "model"):
            rows.append(
                {
                    "shape": forward.shape,
                    **asdict(cell),
                    "perplexity": value,
                    "drawn": min(value, top),
                    "words": f"{100 * cell.sparsity:.3g}{' ↑' if value > top else ''}",
                    **{name: getattr(forward, name) for name in _OF_SPEED},
                }
            )
    # Prefills before steps, the larger shape first.
    size = {row["shape"]: -float(row["tokens"] or 0) * float(row["batch"] or 0) for row in rows}
    return sorted(
        rows, key=lambda row: (row["what"] != "prefill", size[row["shape"]], str(row["method"]), row["sparsity"])
    )


def _over_layers(comparison: Comparison) -> list[Drawn]:
    """Return what rows without LoRA skip in each layer, at the target nearest to 50 % at which layers were measured."""
    for target in sorted(comparison.sparsities, key=lambda each: (abs(each - _MIDDLE), each)):
        shares: dict[str, dict[str, dict[int, float]]] = {}
        for row in comparison.rows:
            for stage in [] if row.recovered or comparison.is_dense(row) else comparison.finished(row, target)[:1]:
                found = {key: dict(comparison.run.by_layer(stage, f"sparsity.{key}")) for key in SUBLAYERS}
                if any(found.values()):
                    shares[row.method] = {key: layers for key, layers in found.items() if layers}
        if shares:
            return layer_rows(shares)
    raise MissingRecordsError(
        "no record 'sparsity.attention' or 'sparsity.ffn' of a layer among the finished cells; wide compare writes them"
    )


def layer_rows(shares: Mapping[str, Mapping[str, Mapping[int, float]]]) -> list[Drawn]:
    """Return the rows of a figure of skipped shares over layers.

    Args:
        shares: By name, sublayer and layer; a layer without a share is dense there, because models have all layers.
    """
    layers = sorted({layer for lines in shares.values() for points in lines.values() for layer in points})
    return [
        {"panel": words, "name": name, "half": key, "layer": layer, "skipped": lines[key].get(layer, 0.0)}
        for key, words in SUBLAYERS.items()
        for name, lines in shares.items()
        if key in lines
        for layer in layers
    ]


def layers_figure(rows: Any, about: str) -> Figure[Any]:
    """Return the figure of skipped shares over layers of several models."""
    return Figure(
        name="layers-compared",
        title="Sparsity by layer, compared",
        rows=rows,
        panel="panel",
        x="layer",
        y="skipped",
        by="name",
        scale=100,
        top=103,
        x_label="decoder layer",
        y_label="skipped or pruned, %",
        about=f"What is skipped in each layer in percent, {about}",
        columns=2,
        height=3.6,
    )


_QUALITY: dict[str, Any] = {"error": "error", "filled": "recovered", "height": 4.6, "columns": 2}
COMPARISON_FIGURES: tuple[Figure[Comparison], ...] = (
    Figure(
        name="quality-sparsity",
        title="Quality over sparsity",
        rows=lambda comparison: required(
            _over_sparsity(comparison),
            "no finished cell with a 'token_perplexity' or 'accuracy.average' beside a dense one",
        ),
        panel="panel",
        x="target, %",
        y="mean",
        by="method",
        lines=_dense_lines,
        log="wide",
        x_label="target sparsity, %",
        about="Quality over the target sparsity, beside the dense model (black)",
        **_QUALITY,
    ),
    Figure(
        name="quality-work",
        title="Quality over skipped work",
        rows=lambda comparison: required(
            _over_work(comparison),
            f"no finished cell with '{_WORK}' above 0 and a 'token_perplexity' beside a dense one",
        ),
        panel="panel",
        x="work, %",
        y="ratio",
        by="method",
        lines=_dense_lines,
        log="wide",
        x_label="matrix products of the decoder layers that are skipped (measured), %",
        about="Perplexity over the work that is really left out, beside the dense model (black)",
        **_QUALITY,
    ),
    Figure(
        name="quality-groups",
        title="Quality over the size of groups",
        rows=lambda comparison: required(
            _over_groups(comparison),
            "no rows that differ in ffn_group_size alone, or in attention_group_size; compare variants of one method "
            "with several group sizes",
        ),
        panel="panel",
        x="size",
        y="ratio",
        by="line",
        error="error",
        filled="recovered",
        even=True,
        log="wide",
        y_label="perplexity, x dense",
        about="Perplexity beside dense over the size of groups",
        columns=2,
        height=3.8,
    ),
    Figure(
        name="quality-speed",
        title="Quality against measured speed",
        rows=lambda comparison: required(
            _over_speed(comparison),
            "no cell whose perplexity and whose speed are both measured; time a comparison's cells on a GPU with wide "
            "profile --model M --comparison DIR",
        ),
        panel="shape",
        x="speedup",
        y="drawn",
        by="method",
        words="words",
        log=True,
        x_label="measured speed-up over its dense peer",
        y_label="perplexity",
        about="Perplexity of each checkpoint, calibrated only, against its own measured speed; numbers are targets in %"
        f", an arrow stands for more than {_HIGHEST} x dense; lower right is better",
        columns=2,
    ),
    layers_figure(_over_layers, "without LoRA, at the target nearest to 50 %"),
)
"""Figures of a comparison."""
