"""Throughput and memory of naive, grouped, fused and dense products, and the traffic that explains them.

Traffic is accounted, and where the profiler's counters lie beside the bench's file, measured, too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wide.report.bench_files import NAIVE_BYTES
from wide.report.figure import Figure, Sheet
from wide.report.naive_bytes import L2, MEASURED, RATIO, READ, TRAFFIC, WRITTEN, of_other_devices
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
_MEMORY, _ACCOUNTED, _STORED = "peak_memory_bytes", "accounted_traffic_bytes", "accounted_storage_bytes"
_AXES = {"M": "M, whole tokens", "N": "N, output groups", "K": "K, input groups"}
_ROWS = (
    ("active_tflops", 1.0, "TFLOP/s on executing pairs"),
    (_MEMORY, 2.0**20, "peak memory, MiB"),
    (_ACCOUNTED, 2.0**20, "accounted traffic, MiB"),
)
# A row of its own: factors of two cannot be read beside six orders of magnitude.
_MEASURED_ROW = (RATIO, 1.0, "measured / accounted\ntraffic")
_MEASURED_COLUMNS = ("read", "written", "both", "x traffic", "L2")


def _records(profile: Profile) -> list[Mapping[str, Any]]:
    found = profile.naive()
    if not found:
        raise MissingRecordsError("no records of naive products (naive.json); run wide bench --operators naive")
    return found


def _draw(figure: Any, profile: Profile) -> str:
    records = _records(profile)
    axes_names = [axis for axis in _AXES if any(record["axis"] == axis for record in records)]
    rows = _rows(records)
    panels = figure.subplots(len(rows), len(axes_names), squeeze=False, sharex=True, sharey="row")
    for row, (metric, scale, label) in zip(panels, rows, strict=True):
        row[0].set_ylabel(label)
        for axes, axis in zip(row, axes_names, strict=True):
            found = [record for record in records if record["axis"] == axis]
            _draw_panel(axes, found, metric, scale)
            if metric == _MEMORY:
                _draw_accounted(axes, found, scale)
            if metric == RATIO:
                _scale_of_factors(axes)
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
        f"Pruned products by axis, on {records[0]['device']}; at {largest}: "
        + ("; ".join(words) or "not timed")
        + f".{_measured_words(profile)}"
        + "".join(f" {sentence}" for sentence in of_other_devices(profile.files))
    )


def _rows(records: list[Mapping[str, Any]]) -> tuple[tuple[str, float, str], ...]:
    """Return metric, unit and label of each row of panels."""
    return (*_ROWS, _MEASURED_ROW) if any(RATIO in record for record in records) else _ROWS


def _height(profile: Profile) -> float:
    return 2.4 * len(_rows(_records(profile)))


def _measured_words(profile: Profile) -> str:
    """Return what was measured of the traffic and what was not, a sentence each; empty where no counters are there."""
    records = _records(profile)
    found = [record for record in records if TRAFFIC in record]
    if not found:
        return " No traffic of these products was measured." if profile.holds(NAIVE_BYTES) else ""
    sizes, largest = {record["size"] for record in found}, max(record["size"] for record in found)
    ratios = [f"{r['axis']}, {r['candidate']}: {r[RATIO]:.2f}x" for r in found if r["size"] == largest and RATIO in r]
    known = {(r["axis"], r["candidate"], r["size"]) for r in found}
    lacking = [way for r in records if (way := (r["axis"], r["candidate"], r["size"])) not in known]
    others = [f"{axis}, {name} at {size}" for axis, name, size in lacking if size in sizes]
    others += [f"any at {size}" for *_, size in lacking if size not in sizes]
    return (
        " Measured traffic: bytes from and to memory by the profiler's counters, of all kernels of a way, sorting "
        f"included, each with cold caches; over the accounted ones at {largest}: {'; '.join(ratios) or '-'}."
        + (f" Not measured: {'; '.join(dict.fromkeys(others))}." if others else "")
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
    result = {r["size"]: r[_ACCOUNTED] / 3 for r in records if r["candidate"] == "dense"}
    for name, (colour, _) in _CANDIDATES.items():
        points = [
            (sizes.index(record["size"]), (record[_STORED] + result[record["size"]]) / scale)
            for record in records
            if record["candidate"] == name and record["size"] in result and _STORED in record
        ]
        if points:
            axes.plot(*zip(*points, strict=True), ":", color=colour, linewidth=1.5, marker="_", markersize=12)


def _scale_of_factors(axes: Any) -> None:
    """Put powers of two at an axis of factors, and a line where both are equal."""
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
    axes.axhline(1, color="black", linewidth=1)


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
        _MEMORY,
        _ACCOUNTED,
        _STORED,
        *MEASURED,
        "not_run",
        "failure",
    )
    return Sheet(header, tuple(tuple(record.get(name) for name in header) for record in _records(profile)))


def traffic_table(profile: Profile) -> Table:
    """Return what each way must move and store by the paper's accounting, and what it was measured to move, MiB.

    Raises:
        MissingRecordsError: If there are no records of naive products.
    """
    header = ("way", "axis", "M = N = K", "traffic", "x dense", "storage", *_MEASURED_COLUMNS)
    found = _records(profile)
    dense = {(r["axis"], r["size"]): r[_ACCOUNTED] for r in found if r["candidate"] == "dense"}
    lines = []
    for record in found:
        moved, stored = record[_ACCOUNTED], record.get(_STORED)
        peer = dense.get((record["axis"], record["size"]))
        lines.append(
            (
                str(record["candidate"]),
                str(record["axis"]),
                f"{record['size']}",
                f"{moved / 2**20:,.1f}",
                f"{moved / peer:,.2f}" if peer else "-",
                _mebibytes(stored),
                *(_mebibytes(record.get(name)) for name in (READ, WRITTEN, TRAFFIC)),
                f"{record[RATIO]:,.2f}" if RATIO in record else "-",
                _mebibytes(record.get(L2)),
            )
        )
    return Table(header=header, rows=tuple(lines))


def _mebibytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.1f}"


def _files(profile: Profile) -> list[str]:
    """Return the files of the bench that are drawn, and the counters beside them."""
    drawn = [str(record["file"]) for record in _records(profile)]
    places = {Path(path).parent for path in drawn}
    counted = [file.path for file in profile.files if file.name == NAIVE_BYTES and Path(file.path).parent in places]
    return [*drawn, *counted]


NAIVE_FIGURES: tuple[Figure[Profile], ...] = (
    Figure(
        name="naive",
        title="Naive, grouped, fused and dense products",
        size=(9.0, 7.2),
        draw=_draw,
        sheet=_sheet,
        height=_height,
        files=_files,
    ),
)
"""Figures of naive beside fused products."""
