"""Throughput and memory of naive, grouped, fused and dense products, and the traffic that explains them."""

from collections.abc import Mapping
from typing import Any

from wide.report.figure import Figure, Sheet
from wide.report.profiles import Profile
from wide.report.selection import MissingRecordsError
from wide.report.style import BLUE, GREEN, GREY, ORANGE
from wide.report.table import Table

_CANDIDATES = {
    "dense": (GREY, "o-"),
    "gather-scatter": (ORANGE, "s--"),
    "grouped product": (GREEN, "^-."),
    "fused": (BLUE, "D-"),
}
_MEMORY = "peak_memory_bytes"
_AXES = {"M": "M, whole tokens", "N": "N, output groups", "K": "K, input groups"}
_ROWS = (
    ("active_tflops", 1.0, "TFLOP/s on executing pairs"),
    (_MEMORY, 2.0**20, "peak memory, MiB"),
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
            found = [record for record in records if record["axis"] == axis]
            _draw_panel(axes, found, metric, scale)
            if metric == _MEMORY:
                _draw_accounted(axes, found, scale)
    for axes, axis in zip(panels[0], axes_names, strict=True):
        axes.set_title(_AXES[axis], fontsize="medium")
    for axes in panels[-1]:
        axes.set_xlabel("M = N = K")
    _legend(figure, panels[0][0])
    largest = max(record["size"] for record in records)
    words = [
        f"{record['axis']}, {record['candidate']}: {record['active_tflops']:.1f} TFLOP/s"
        for record in records
        if record["size"] == largest and "active_tflops" in record
    ]
    return (
        "Dotted: the memory that intermediates and the result should take, by the paper's accounting. "
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


def _draw_accounted(axes: Any, records: list[Mapping[str, Any]], scale: float) -> None:
    """Draw what intermediates and the result should take, beside what was measured."""
    sizes = sorted({record["size"] for record in records})
    # The dense product moves its two factors and its result, three matrices of one size.
    result = {r["size"]: r["accounted_traffic_bytes"] / 3 for r in records if r["candidate"] == "dense"}
    for name, (colour, _) in _CANDIDATES.items():
        points = [
            (sizes.index(record["size"]), (record["accounted_storage_bytes"] + result[record["size"]]) / scale)
            for record in records
            if record["candidate"] == name and record["size"] in result and "accounted_storage_bytes" in record
        ]
        if points:
            axes.plot(*zip(*points, strict=True), ":", color=colour, linewidth=1.5, marker="_", markersize=12)


def _legend(figure: Any, axes: Any) -> None:
    from matplotlib.lines import Line2D

    lines, labels = axes.get_legend_handles_labels()
    lines.append(Line2D([], [], color="black", linestyle=":", marker="_", markersize=12))
    labels.append("accounted, with the result")
    figure.legend(lines, labels, loc="outside upper center", ncols=5, frameon=False, fontsize="small")


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


def traffic_table(profile: Profile) -> Table:
    """Return what each way must move and store by the paper's accounting, MiB.

    Raises:
        MissingRecordsError: If there are no records of naive products.
    """
    header = ("way", "axis", "M = N = K", "traffic", "x dense", "storage")
    found = _records(profile)
    dense = {(r["axis"], r["size"]): r["accounted_traffic_bytes"] for r in found if r["candidate"] == "dense"}
    lines = []
    for record in found:
        moved, stored = record["accounted_traffic_bytes"], record.get("accounted_storage_bytes")
        peer = dense.get((record["axis"], record["size"]))
        lines.append(
            (
                str(record["candidate"]),
                str(record["axis"]),
                f"{record['size']}",
                f"{moved / 2**20:,.1f}",
                f"{moved / peer:,.2f}" if peer else "-",
                "-" if stored is None else f"{stored / 2**20:,.1f}",
            )
        )
    return Table(header=header, rows=tuple(lines))


NAIVE_FIGURES: tuple[Figure[Profile], ...] = (
    Figure(
        name="naive",
        title="Naive, grouped, fused and dense products",
        size=(9.0, 7.2),
        draw=_draw,
        sheet=_sheet,
        files=lambda profile: [str(record["file"]) for record in _records(profile)],
    ),
)
"""Figures of naive beside fused products."""
