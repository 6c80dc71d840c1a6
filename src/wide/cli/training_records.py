"""What a training stage left behind, as records of the run."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from wide.records import Record, read_records

_METRICS_FILE = "metrics.jsonl"
_MOST_POINTS = 200
_SUMMARY = {
    "tokens_per_second": "token/s",
    "seconds": "s",
    "steps": "step",
    "tokens": "token",
    "peak_memory_bytes": "B",
}


def training_records(subject: str, summary: Mapping[str, Any], folder: Path) -> Iterator[Record]:
    """Yield the course of a stage, thinned to what a figure can show, and its summary.

    Args:
        subject: The stage.
        summary: What the trainer wrote about the stage.
        folder: Of the stage, where the trainer keeps its metrics.
    """
    yield from _course(subject, folder / _METRICS_FILE)
    for name, unit in _SUMMARY.items():
        value = summary.get(name)
        if isinstance(value, int | float):
            yield Record(subject=subject, metric=f"training.{name}", value=value, unit=unit, where="training")


def _course(subject: str, metrics: Path) -> Iterator[Record]:
    if not metrics.is_file():
        return
    records, _ = read_records(metrics)
    steps = sorted({record.step for record in records if record.step is not None})
    every = max(1, len(steps) // _MOST_POINTS)
    shown = {*steps[::every], *steps[-1:]}
    for record in records:
        if record.step in shown:
            yield replace(record, subject=subject)
