"""Throughput and memory of naive, grouped, fused and dense products, and the traffic that explains them."""

from collections.abc import Mapping
from typing import Any

from wide.report.figure import Figure, Sheet
from wide.report.profiles import Profile
from wide.report.selection import MissingRecordsError
from wide.report.style import BLUE, GREEN, GREY, ORANGE

_CANDIDATES = {
    "dense": (GREY, "o-"),
    "gather-scatter": (ORANGE, "s--"),
    "grouped product": (GREEN, "^-."),
    "fused": (BLUE, "D-"),
}
_AXES = {"M": "M, whole tokens", "N": "N, output groups", "K": "K, input groups"}
_ROWS = (
    ("active_tflops", 1.0, "TFLOP/s on executing pairs"),
    ("peak_memory_bytes", 2.0**20, "peak memory, MiB"),
    ("accounted_traffic_bytes", 2.0**20, "accounted traffic, MiB"),
)


def _records(profile: Profile) -> list[Mapping[str, Any]]:
    found = profile.naive()
    if not found:
        raise MissingRecordsError("no records of naive products (naive.json); run python -m wide.profiling.naive")
    return found


def _draw(figure: Any, profile: Profile) -> str:
    records = _records(profile)
    axes_names = [axis for axis in _AXES if any(record["axis"] == axis for record in records)]
    panels = figure.subplots(len(_ROWS), len(axes_names), squeeze=False, sharex=True, sharey="row")
    for row, (metric, scale, label) in zip(panels, _ROWS, strict=True):
        row[0].set_ylabel(label)
        for axes, axis in zip(row, axes_names, strict=True):
            _draw_panel(axes, [record for record in records if record["axis"] == axis], metric, scale)
    for axes, axis in zip(panels[0], axes_names, strict=True):
        axes.set_title(_AXES[axis], fontsize="medium")
    for axes in panels[-1]:
        axes.set_xlabel("M = N = K")
    lines = panels[0][0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper center", ncols=4, frameon=False, fontsize="small")
    largest = max(record["size"] for record in records)
    words = [
        f"{record['axis']}, {record['candidate']}: {record['active_tflops']:.1f} TFLOP/s"
        for record in records
        if record["size"] == largest and "active_tflops" in record
    ]
    return (
        f"Pruned products by axis, on {records[0]['device']}; at {largest}: " + ("; ".join(words) or "not timed") + "."
    )


def _draw_panel(axes: Any, records: list[Mapping[str, Any]], metric: str, scale: float) -> None:
    sizes = sorted({record["size"] for record in records})
    for name, (colour, style) in _CANDIDATES.items():
        points = [
            (sizes.index(record["size"]), record[metric] / scale)
            for record in records
            if record["candidate"] == name and record.get(metric)
        ]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=colour, label=name)
        else:
            # Named in the legend all the same: that it is missing is seen.
            axes.plot([], [], style, color=colour, label=name)
    axes.set_yscale("log")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    if not any(record.get(metric) for record in records):
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)


def _sheet(profile: Profile) -> Sheet:
    header = (
        "device",
        "axis",
        "size",
        "group_size",
        "active",
        "candidate",
        "error",
        "median_us",
        "speedup",
        "active_tflops",
        "peak_memory_bytes",
        "accounted_traffic_bytes",
        "accounted_storage_bytes",
        "not_run",
        "failure",
    )
    return Sheet(header, tuple(tuple(record.get(name) for name in header) for record in _records(profile)))


NAIVE_FIGURES: tuple[Figure[Profile], ...] = (
    Figure(name="naive", title="Naive, grouped, fused and dense products", size=(9.0, 7.2), draw=_draw, sheet=_sheet),
)
"""Figures of naive beside fused products."""
