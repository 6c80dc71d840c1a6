"""Naive dynamic depth taken apart: what indices, gathering, sorting and scattering cost beside the product."""

from collections.abc import Mapping
from typing import Any

from wide.report.figure import Figure, Sheet
from wide.report.profiles import Profile
from wide.report.selection import MissingRecordsError
from wide.report.style import BLUE, GREEN, ORANGE, VERMILION
from wide.report.table import Table

_REST = "rest"
PARTS = {
    "indices": (VERMILION, "//"),
    "sort": (VERMILION, ".."),
    "gather": (ORANGE, ""),
    "GEMM": (BLUE, ""),
    "scatter": (GREEN, "\\\\"),
    _REST: ("#404040", ""),
}
"""Part -> colour and hatch, in the order in which they run; parts of one hatch differ in lightness."""
_TITLES = {"indices": "indices, host waits"}
_BAR, _MARGINS = 0.19, 1.6
# A gap of so many bars between numbers of rows.
_GAP = 1.0
Record = Mapping[str, Any]


def _timed(profile: Profile) -> list[Record]:
    found = profile.depth()
    if not found:
        raise MissingRecordsError(
            "no timed record of naive dynamic depth (depth.json); run wide bench --operators naive_depth on a GPU"
        )
    return found


def _products(profile: Profile) -> dict[str, dict[int, list[Record]]]:
    """Return the timed records by product and number of rows."""
    found: dict[str, dict[int, list[Record]]] = {}
    several = len({(record["device"], record["active"]) for record in _timed(profile)}) > 1
    for record in sorted(_timed(profile), key=lambda each: int(each["rows"])):
        name = f"{record['width_in']} to {record['width_out']}"
        name += f", {record['device']}, {100 * record['active']:.0f} % execute" if several else ""
        found.setdefault(name, {}).setdefault(record["rows"], []).append(record)
    return found


def _height(profile: Profile) -> float:
    most = max(sum(len(ways) + _GAP for ways in rows.values()) for rows in _products(profile).values())
    return _MARGINS + _BAR * most


def _dense_us(record: Record) -> float:
    """Return the time of the dense product in the same race."""
    return float(record["median_us"]) * float(record["speedup"])


def _rest(record: Record) -> float:
    """Return what the whole takes beyond its parts; below zero where they overlap or find less in the cache alone."""
    return float(record["median_us"]) - sum(record["parts_us"].values())


def _length(record: Record) -> float:
    return float(record["median_us"]) - min(0.0, _rest(record))


def _draw(figure: Any, profile: Profile) -> str:
    found = _products(profile)
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    sentences = []
    for axes, (name, sizes) in zip(panels, found.items(), strict=True):
        place, labels = 0.0, []
        for rows, records in sizes.items():
            for record in records:
                labels.append((place, f"{record['candidate']}, {rows:,}"))
                _draw_bar(axes, place, record)
                place += 1
                sentences.append(f"{name}, {rows} rows, {_in_words(record)}")
            place += _GAP
        axes.set_yticks([place for place, _ in labels], [label for _, label in labels], fontsize="small")
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=1)
        longest = max(_length(record) / _dense_us(record) for records in sizes.values() for record in records)
        # Room for the words behind the longest bar.
        axes.set_xlim(0, 1.5 * max(1.0, longest))
        axes.set_title(f"product of {name}", fontsize="medium", loc="left")
        axes.set_xlabel("time, x of the dense product")
        axes.grid(visible=False, axis="y")
    _legend(figure)
    devices = ", ".join(dict.fromkeys(str(record["device"]) for record in _timed(profile)))
    return (
        f"Time by stage of a product that whole tokens skip, on {devices}; the black line is the dense product: "
        + "; ".join(sentences)
        + "."
    )


def _draw_bar(axes: Any, place: float, record: Record) -> None:
    dense, begin = _dense_us(record), 0.0
    lengths = {**record["parts_us"], _REST: max(0.0, _rest(record))}
    for name, (colour, hatch) in PARTS.items():
        width = lengths.get(name, 0.0) / dense
        axes.barh(place, width, left=begin, color=colour, hatch=hatch, edgecolor="black", linewidth=0.5)
        begin += width
    words = f"{record['median_us']:,.0f} us, {record['speedup']:.2f}x"
    # Never before the line of the dense product, which would cross the words.
    beside = (max(1.0, begin), place)
    axes.annotate(words, beside, xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)


def _in_words(record: Record) -> str:
    parts = ", ".join(f"{name} {us:z.1f}" for name, us in record["parts_us"].items())
    return f"{record['candidate']}: {record['median_us']:.1f} us ({parts}), {record['speedup']:.2f}x"


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.5, label=_TITLES.get(name, name))
        for name, (colour, hatch) in PARTS.items()
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=6, frameon=False, fontsize="small")


def _sheet(profile: Profile) -> Sheet:
    header = ("device", "rows", "width_in", "width_out", "active", "candidate", "error", "median_us", "speedup")
    rows = (
        (*(record.get(name) for name in header), part, us, record.get("accounted_traffic_bytes", {}).get(part))
        for record in _timed(profile)
        for part, us in (*record["parts_us"].items(), (_REST, _rest(record)))
    )
    return Sheet((*header, "part", "us", "accounted_traffic_bytes"), tuple(rows))


def depth_table(profile: Profile) -> Table:
    """Return one line for each way of each product: microseconds whole and by stage, and what dense has over it.

    Raises:
        MissingRecordsError: If nothing was timed.
    """
    header = ("way", "product", "tokens", "us", "x dense", *PARTS)
    lines = []
    for name, sizes in _products(profile).items():
        for rows, records in sizes.items():
            for record in records:
                times = {**record["parts_us"], _REST: _rest(record)}
                parts = [times.get(part) for part in PARTS]
                lines.append(
                    (
                        str(record["candidate"]),
                        name,
                        f"{rows}",
                        f"{record['median_us']:.1f}",
                        f"{record['speedup']:.2f}",
                        *("-" if us is None else f"{us:z.1f}" for us in parts),
                    )
                )
    return Table(header=header, rows=tuple(lines))


DEPTH_FIGURES: tuple[Figure[Profile], ...] = (
    Figure(
        name="naive-breakdown",
        title="Where the time of naive dynamic depth goes",
        size=(9.0, 5.0),
        draw=_draw,
        sheet=_sheet,
        files=lambda profile: [str(record["file"]) for record in _timed(profile)],
        height=_height,
    ),
)
"""Figures of naive dynamic depth taken apart."""
