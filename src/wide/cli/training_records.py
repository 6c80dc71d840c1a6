"""What a training stage left behind, as records of the run."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wide.records import Record, read_records

_METRICS_FILE = "metrics.jsonl"
_MOST_POINTS = 200
_RATE = "tokens_per_second"
_SUMMARY = {
    _RATE: "token/s",
    "seconds": "s",
    "steps": "step",
    "tokens": "token",
    "peak_memory_bytes": "B",
}


def training_records(subject: str, summary: Mapping[str, Any], folder: Path) -> Iterator[Record]:
    """Yield the course of a stage, thinned to what a figure can show, and its summary.

    Where the summary has no rate, because no step was left to a resumed run, it is that of the recorded steps.

    Args:
        subject: The stage.
        summary: What the trainer wrote about the stage.
        folder: Of the stage, where the trainer keeps its metrics.
    """
    metrics = folder / _METRICS_FILE
    points = read_records(metrics)[0] if metrics.is_file() else []
    yield from _course(subject, points)
    found = {_RATE: _rate(points), **{name: value for name, value in summary.items() if value is not None}}
    for name, unit in _SUMMARY.items():
        value = found.get(name)
        if isinstance(value, int | float):
            yield Record(subject=subject, metric=f"training.{name}", value=value, unit=unit, where="training")


def _rate(points: Sequence[Record]) -> float | None:
    """Return tokens per second over all recorded steps, which have equally many tokens; None where none says it."""
    rates = [point.value for point in points if point.metric == f"training.{_RATE}" and point.step is not None]
    known = [rate for rate in rates if isinstance(rate, int | float) and rate > 0]
    return statistics.harmonic_mean(known) if known else None


def _course(subject: str, points: Sequence[Record]) -> Iterator[Record]:
    steps = sorted({record.step for record in points if record.step is not None})
    every = max(1, len(steps) // _MOST_POINTS)
    shown = {*steps[::every], *steps[-1:]}
    for record in points:
        if record.step in shown:
            yield replace(record, subject=subject)
