"""The door to matplotlib: draws any `Figure` as SVG and PNG, so that it can be read in grey and by any eye."""

import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from wide.errors import MissingExtraError
from wide.report.figure import Figure, MissingRecordsError, Row, Source
from wide.report.writing import replacing, write_whole

FOLDER = "figures"
"""Folder beside a report that holds its figures as SVG, PNG and CSV."""
# Okabe and Ito's palette, which people with any colour vision can tell apart; neighbours differ in lightness.
BLUE, ORANGE, GREEN, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#707070"
PURPLE, VERMILION, YELLOW = "#CC79A7", "#D55E00", "#F0E442"
CYCLE = (BLUE, ORANGE, GREEN, SKY, GREY, PURPLE, VERMILION)
"""Colours in their order. They, markers and dashes repeat after different numbers, so that pairs do not."""
MARKERS = "os^DvPX*<>phd"
FILLS = (
    *((BLUE, ""), (ORANGE, "//"), (SKY, ".."), (VERMILION, "xx"), (YELLOW, ""), ("#404040", "")),
    *(("#B0B0B0", "\\\\"), (GREEN, "--"), ("#FFFFFF", ""), (PURPLE, "++")),
)
"""Colour and hatch of bars and their parts, in their order."""
_DASHES = ("-", "--", "-.")
_ACROSS = (
    *("-", ":", "-.", (0, (8, 2, 1, 2, 1, 2)), (0, (1, 4)), (0, (4, 3))),
    *((0, (3, 1, 1, 1, 1, 1)), (0, (10, 3)), (0, (2, 1, 2, 5))),
)
_DPI, _WIDTH, _WIDE, _BAR = 150, 9.0, 2.5, 0.3
_MANY_ENTRIES, _MANY_CELLS, _MANY_TICKS = 8, 8, 48
_STYLE = {
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "lines.markersize": 5,
    # Outlines instead of font names: the picture looks the same on every machine.
    "svg.fonttype": "path",
    # Identifiers inside the file are hashes, with this instead of random salt: same records, same bytes.
    "svg.hashsalt": "wide",
}
_LIGHT, _DARK = (244, 248, 252), (0, 48, 104)
_WHITE_FROM = 0.7


def shade(share: float) -> str:
    """Return the colour of a share in [0, 1] on the scale from light to dark blue, whose lightness falls evenly."""
    share = min(max(share, 0.0), 1.0)
    parts = (round(light + share * (dark - light)) for light, dark in zip(_LIGHT, _DARK, strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)


def ink(share: float) -> str:
    """Return the colour of letters that can be read on `shade(share)`."""
    return "#ffffff" if share >= _WHITE_FROM else "#000000"


def has_matplotlib() -> bool:
    """Return whether figures can be drawn."""
    return find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Refuse early where figures cannot be drawn.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "the report needs matplotlib: pip install 'wide[report]', or switch it off with --report false"
        ) from error


def draw_svg(figure: Figure[Source], source: Source) -> tuple[str, str]:
    """Return one figure as SVG and the sentence that describes it.

    Raises:
        MissingRecordsError: If records that it needs are missing.
    """
    with _style():
        return _as_svg(draw(figure, source)), figure.describe(source)


def save_figure(figure: Figure[Source], source: Source, folder: Path) -> tuple[str, str]:
    """Write a figure as SVG and PNG and its values as CSV, and return what `draw_svg` does.

    Args:
        figure: The figure.
        source: What it shows.
        folder: Of the report; the files go into `FOLDER` inside it.

    Raises:
        MissingRecordsError: If records that it needs are missing; nothing is written then.
    """
    place = folder / FOLDER / figure.name
    values, words = figure.to_csv(source), figure.describe(source)
    with _style():
        drawn = draw(figure, source)
        svg = _as_svg(drawn)
        with replacing(place.with_suffix(".png")) as unfinished:
            drawn.savefig(unfinished, format="png", dpi=_DPI)
    write_whole(place.with_suffix(".svg"), svg)
    write_whole(place.with_suffix(".csv"), values)
    return svg, words


def save_png(path: Path, figures: Sequence[Figure[Source]], source: Source) -> None:
    """Write figures below each other as one picture; where records are missing the picture says so."""
    heights = [_height(figure, source) + 0.5 for figure in figures]
    with _style():
        whole = _canvas(sum(heights))
        parts = whole.subfigures(len(figures), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, figure in zip(parts, figures, strict=True):
            part.suptitle(figure.title, fontweight="bold", x=0.01, ha="left")
            try:
                _fill(part, figure, source)
            except MissingRecordsError as missing:
                part.text(0.5, 0.5, str(missing), ha="center", va="center", wrap=True)
        with replacing(path) as unfinished:
            whole.savefig(unfinished, format="png", dpi=_DPI)


def draw(figure: Figure[Source], source: Source) -> Any:
    """Return a figure of matplotlib with what is to be seen."""
    drawn = _canvas(_height(figure, source))
    _fill(drawn, figure, source)
    return drawn


def _canvas(height: float) -> Any:
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(_WIDTH, height), layout="constrained")


def _height(figure: Figure[Source], source: Source) -> float:
    try:
        panels = figure.panels(figure.table(source))
    except MissingRecordsError:
        return figure.height
    if figure.kind == "stack":
        return 0.8 + sum(0.75 + _BAR * len({row[figure.x] for row in rows}) for rows in panels.values())
    return figure.height * -(-len(panels) // figure.columns)


def _fill(drawn: Any, figure: Figure[Source], source: Source) -> None:
    rows = figure.table(source)
    panels = figure.panels(rows)
    if not panels:
        raise MissingRecordsError(f"no value {figure.y!r} among the records")
    columns = 1 if figure.kind == "stack" else min(figure.columns, len(panels))
    lengths = [_BAR * len({row[figure.x] for row in found}) + 0.75 for found in panels.values()]
    shared = figure.kind in ("line", "bar") and figure.y_label != ""
    grid = drawn.subplots(
        -(-len(panels) // columns),
        columns,
        squeeze=False,
        sharey="row" if shared else "none",
        gridspec_kw={"height_ratios": lengths} if figure.kind == "stack" else {},
    ).flatten()
    order = list(dict.fromkeys(str(row[figure.by]) for row in rows if row[figure.y] is not None)) if figure.by else [""]
    across = {} if figure.lines is None else figure.lines(source)
    for axes, (name, found) in zip(grid, panels.items(), strict=False):
        if figure.kind == "image":
            _image(drawn, axes, figure, found)
        elif figure.kind == "stack":
            _stack(axes, figure, found, order)
        else:
            _plot(axes, figure, found, order)
            _lines_across(axes, figure, [heights.get(name) for heights in across.values()])
        axes.set_title(name, fontsize="medium", loc="left")
    # Only now: panels that share an axis share the greatest height of all of them.
    for axes, found in zip(grid, panels.values(), strict=False):
        if figure.kind in ("line", "bar"):
            _height_axis(axes, figure, found)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    drawn.supxlabel(figure.x_label, fontsize="medium")
    if figure.kind != "image":
        drawn.supylabel(figure.y_label, fontsize="medium")
        shown = {name for found in panels.values() for name, _ in figure.series(found)}
        _legend(drawn, figure, [name for name in order if name in shown], order, rows, across)


def _plot(axes: Any, figure: Figure[Any], rows: Sequence[Row], order: Sequence[str]) -> None:
    named = figure.even or any(isinstance(row[figure.x], str) for row in rows)
    places = list(dict.fromkeys(row[figure.x] for row in rows))
    if named and all(isinstance(place, int | float) for place in places):
        places.sort(key=lambda place: float(place or 0))
    series = figure.series(rows)
    width = 0.8 / len(series)
    written: list[tuple[str, float, float]] = []
    for number, ((name, filled), points) in enumerate(series.items()):
        x = [places.index(row[figure.x]) if named else float(row[figure.x] or 0) for row in points]
        y = [figure.scale * float(row[figure.y] or 0) for row in points]
        if figure.kind == "bar":
            colour, hatch = FILLS[order.index(name) % len(FILLS)]
            at = [place + (number - (len(series) - 1) / 2) * width for place in x]
            axes.bar(at, y, width, color=colour, hatch=hatch, edgecolor="black", linewidth=0.6)
        else:
            style = _line_style(order.index(name), filled=filled)
            errors = [figure.scale * float(row[figure.error] or 0) for row in points] if figure.error else None
            # Without a gap in the numbers a line is a line; where it is many steps, markers would hide it.
            axes.errorbar(x, y, yerr=errors, capsize=3, **(style | ({"marker": ""} if len(x) > _MANY_TICKS else {})))
        if figure.ideal:
            known = [(place, row[figure.ideal]) for place, row in zip(x, points, strict=True)]
            ideal = [(place, figure.scale * float(value)) for place, value in known if value is not None]
            if ideal:
                colour = CYCLE[order.index(name) % len(CYCLE)]
                axes.plot(*zip(*ideal, strict=True), color=colour, linestyle=":", marker="_", markersize=12)
        if figure.words:
            written += [
                (str(row[figure.words] or ""), *at) for row, at in zip(points, zip(x, y, strict=True), strict=True)
            ]
    for number, (words, place, height) in enumerate(written if figure.words else ()):
        # Equal words of points that lie on each other would only smear.
        near = [abs(place - x) + abs(height - y) for text, x, y in written[:number] if text == words]
        if words and min(near, default=1.0) > 0.2:
            offset = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 7}
            axes.annotate(words, (place, height), **offset)
    if named:
        axes.set_xticks(range(len(places)), [_tick(place) for place in places])
        if sum(len(_tick(place)) for place in places) > _MANY_TICKS:
            axes.tick_params(axis="x", rotation=90 if len(places) > _MANY_CELLS else 20, labelsize="small")
    elif all(isinstance(place, int) for place in places):
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(
            MaxNLocator(integer=True, min_n_ticks=1, nbins=4 if max(float(place or 0) for place in places) > 99 else 9)
        )


def _tick(place: Any) -> str:
    # Tokens are counted in powers of two: 4k is 4096.
    if isinstance(place, int) and place >= 1024 and place % 1024 == 0:
        return f"{place // 1024}k"
    return f"{place:g}" if isinstance(place, float) else str(place)


def _height_axis(axes: Any, figure: Figure[Any], rows: Sequence[Row]) -> None:
    heights = [float(row[figure.y] or 0) for row in rows]
    heights = [height for height in heights if height > 0]
    if figure.log is True or (figure.log == "wide" and heights and max(heights) > _WIDE * min(heights)):
        from matplotlib.ticker import LogLocator, ScalarFormatter

        axes.set_yscale("log")
        span = max(heights, default=1.0) / min(heights, default=1.0)
        if span < 200:
            # Powers of ten alone would leave most axes without two numbers.
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0) if span < 15 else (1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_locator(LogLocator(subs=()))
    elif not figure.log:
        axes.set_ylim(min(0.0, axes.get_ylim()[0] if min(heights, default=0.0) < 0 else 0.0), figure.top)


def _lines_across(axes: Any, figure: Figure[Any], heights: Sequence[float | None]) -> None:
    if figure.line_at is not None:
        axes.axhline(figure.line_at, color="black", linewidth=1)
    for number, height in enumerate(heights):
        if height is not None:
            axes.axhline(height, color="black", linewidth=1, linestyle=_ACROSS[number % len(_ACROSS)])


def _line_style(number: int, *, filled: bool) -> dict[str, Any]:
    dash = _DASHES[number // len(CYCLE) % len(_DASHES)]
    return {
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": dash if filled else "--",
        "color": CYCLE[number % len(CYCLE)],
        "fillstyle": "full" if filled else "none",
    }


def _stack(axes: Any, figure: Figure[Any], rows: Sequence[Row], order: Sequence[str]) -> None:
    bars = list(dict.fromkeys(str(row[figure.x]) for row in rows))
    ends = dict.fromkeys(bars, 0.0)
    for row in rows:
        bar, part = str(row[figure.x]), str(row[figure.by])
        colour, hatch = FILLS[order.index(part) % len(FILLS)]
        width = max(0.0, figure.scale * float(row[figure.y] or 0))
        options = {"color": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}
        axes.barh(bars.index(bar), width, left=ends[bar], **options)
        ends[bar] += width
    words = {str(row[figure.x]): str(row[figure.words] or "") for row in rows} if figure.words else {}
    line = figure.line_at or 0.0
    for bar, text in words.items():
        # Never across the line, which would cover the words.
        place = (max(line, ends[bar]), bars.index(bar))
        axes.annotate(text, place, xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)
    if figure.line_at is not None:
        axes.axvline(figure.line_at, color="black", linewidth=1)
    axes.set_yticks(range(len(bars)), bars, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * max(line, *ends.values()))
    axes.grid(visible=False, axis="y")


def _image(drawn: Any, axes: Any, figure: Figure[Any], rows: Sequence[Row]) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    across, down = (list(dict.fromkeys(row[column] for row in rows)) for column in (figure.x, figure.by))
    cells = [[math.nan] * len(across) for _ in down]
    for row in rows:
        value = row[figure.y]
        cells[down.index(row[figure.by])][across.index(row[figure.x])] = math.nan if value is None else float(value)
    ends = [VERMILION, "#ffffff", shade(1.0)] if figure.signed else [shade(0.0), shade(1.0)]
    colours = LinearSegmentedColormap.from_list("values", ends).with_extremes(bad="#bbbbbb")
    low = -1.0 if figure.signed else 0.0
    image = axes.imshow(cells, aspect="auto", cmap=colours, vmin=low, vmax=1, interpolation="nearest")
    for y, line in enumerate(cells):
        for x, value in enumerate(line):
            # In grey a negative cell would be taken for a positive one.
            hatch = "xx" if math.isnan(value) else "////" if figure.signed and value < -0.05 else ""
            if hatch:
                look: dict[str, Any] = {"facecolor": "none", "edgecolor": "#00000060", "linewidth": 0.0}
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, hatch=hatch, **look))
            if figure.signed and len(across) <= _MANY_CELLS and not math.isnan(value):
                colour = "white" if value > 0.5 else "black"
                axes.text(x, y, f"{value:z.1f}", ha="center", va="center", fontsize="x-small", color=colour)
    for axis, names in ((axes.xaxis, across), (axes.yaxis, down)):
        named = any(isinstance(name, str) for name in names)
        every = -(-len(names) // (_MANY_TICKS if named else 16 if axis is axes.xaxis else 6))
        shown = range(0, len(names), every)
        axis.set_ticks(shown, [str(names[place]) for place in shown])
    if any(isinstance(name, str) for name in across):
        axes.tick_params(axis="x", rotation=90, labelsize="small")
    axes.grid(visible=False)
    axes.set_ylabel(figure.by)
    drawn.colorbar(image, ax=axes, label=figure.y_label)


def _legend(
    drawn: Any,
    figure: Figure[Any],
    names: Sequence[str],
    order: Sequence[str],
    rows: Sequence[Row],
    across: Mapping[str, Mapping[str, float]],
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = []
    look: dict[str, Any]
    for name in names if figure.by else ():
        number = order.index(name)
        if figure.kind == "line":
            style = _line_style(number, filled=True)
            entries.append(Line2D([], [], label=name, **(style | ({"linestyle": "none"} if figure.filled else {}))))
        else:
            colour, hatch = FILLS[number % len(FILLS)]
            entries.append(Patch(facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.5, label=name))
    kinds = {bool(row[figure.filled]) for row in rows} if figure.filled else set()
    if len(kinds) > 1:
        for filled, label in zip((True, False), figure.filled_means, strict=True):
            look = {"fillstyle": "full" if filled else "none", "linestyle": "-" if filled else "--"}
            entries.append(Line2D([], [], marker="o", color="black", label=label, **look))
    if figure.ideal:
        entries.append(Line2D([], [], color="black", linestyle=":", marker="_", label=figure.ideal_means))
    panels = figure.panels(rows)
    for number, (name, heights) in enumerate(across.items()):
        if not any(panel in panels for panel in heights):
            continue
        look = {"linestyle": _ACROSS[number % len(_ACROSS)], "linewidth": 1}
        entries.append(Line2D([], [], color="black", label=name, **look))
    if entries:
        beside = len(entries) > _MANY_ENTRIES and figure.kind != "stack"
        place = {"loc": "outside right upper"} if beside else {"loc": "outside upper right"}
        columns = 1 if beside else max(1, min(4, 100 // max(len(entry.get_label()) + 6 for entry in entries)))
        drawn.legend(handles=entries, ncols=columns, frameon=False, fontsize="small", **place)


def _as_svg(drawn: Any) -> str:
    stream = io.StringIO()
    drawn.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A sign that the font lacks shows as a box; texts of tokens may hold any.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield
