"""The figures of a comparison: what each method is worth over sparsity, work and speed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from wide.records import Stage
from wide.report.comparison import DENSE, FINISHED, PERPLEXITY, RATIO, RETENTION, Comparison, Row, Value
from wide.report.figure import Row as Drawn
from wide.report.figure import figures
from wide.report.selection import SUBLAYERS

_WORK = "sparsity.linear_flops_layers"
_PANELS = {RATIO: "perplexity, x dense", RETENTION: "average accuracy, share of dense"}
_MIDDLE = 0.5
_SPEED = ("what", "tokens", "batch", "speedup", "median_us", "skipped_attention", "skipped_ffn", "candidate", "device")
# What is worse than this many times dense would squeeze everything else; figures.yaml says so, too.
_HIGHEST = 6


def _points(comparison: Comparison, metric: str) -> Iterator[tuple[Row, float, Value]]:
    for row in comparison.rows:
        for sparsity in comparison.sparsities if not row.is_dense else ():
            value = comparison.value(row, sparsity, metric)
            if value is not None and math.isfinite(value.mean):
                yield row, sparsity, value


def _place(row: Row, sparsity: float) -> Drawn:
    return {"method": row.method, "recovered": int(row.recovered), "target": sparsity}


def _over_sparsity(comparison: Comparison) -> list[Drawn]:
    return [
        {
            "metric": metric,
            "panel": panel,
            **_place(row, sparsity),
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
                    **_place(row, sparsity),
                    "skipped_work": work.mean,
                    "work, %": 100 * work.mean,
                    "ratio": value.mean,
                    "error": value.error,
                }
            )
    return sorted(rows, key=lambda row: (str(row["method"]), row["recovered"] or 0, row["skipped_work"] or 0))


def _over_speed(comparison: Comparison) -> list[Drawn]:
    dense = comparison.value(Row(DENSE, False), 0.0, PERPLEXITY)
    top = math.inf if dense is None else _HIGHEST * dense.mean
    rows: list[Drawn] = []
    for cell, forward in comparison.speeds:
        subject = Stage(cell, recovered=False)
        value = comparison.run.number(subject, PERPLEXITY)
        is_finished = comparison.run.text(subject, "status") == FINISHED
        # Speed of another model says nothing about this one.
        if is_finished and value is not None and forward["model"] == comparison.run.text("run", "model"):
            batch = "" if forward["batch"] == 1 else f", batch {forward['batch']}"
            cached = "cached" if forward["what"] == "decode" else "tokens"
            rows.append(
                {
                    "shape": f"{forward['what']}, {forward['tokens']} {cached}{batch}",
                    **asdict(cell),
                    "perplexity": value,
                    "drawn": min(value, top),
                    "words": f"{100 * cell.sparsity:.3g}{' ↑' if value > top else ''}",
                    **{name: forward[name] for name in _SPEED},
                }
            )
    # Prefills before steps, the larger shape first.
    size = {row["shape"]: -row["tokens"] * row["batch"] for row in rows}
    return sorted(rows, key=lambda row: (row["what"] != "prefill", size[row["shape"]], row["method"], row["sparsity"]))


def _over_layers(comparison: Comparison) -> list[Drawn]:
    """Return what rows without LoRA skip in each layer, at the target nearest to 50 % at which layers were measured.

    A layer without a share is dense there, because models have all layers.
    """
    for target in sorted(comparison.sparsities, key=lambda each: (abs(each - _MIDDLE), each)):
        shares = {}
        for row in comparison.rows:
            for stage in [] if row.recovered or row.is_dense else comparison.finished(row, target)[:1]:
                shares[row.method] = {key: dict(comparison.run.by_layer(stage, f"sparsity.{key}")) for key in SUBLAYERS}
        layers = sorted({layer for halves in shares.values() for by_layer in halves.values() for layer in by_layer})
        if layers:
            return [
                {"panel": words, "name": name, "half": key, "layer": layer, "skipped": halves[key].get(layer, 0.0)}
                for key, words in SUBLAYERS.items()
                for name, halves in shares.items()
                if halves[key]
                for layer in layers
            ]
    return []


COMPARISON_FIGURES = figures(
    "comparison",
    {
        "quality-sparsity": _over_sparsity,
        "quality-work": _over_work,
        "quality-speed": _over_speed,
        "layers-compared": _over_layers,
    },
    lines={"quality-sparsity": _dense_lines, "quality-work": _dense_lines},
)
"""Figures of a comparison."""
