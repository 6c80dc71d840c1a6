"""The one module that imports matplotlib: draws a `Figure` as SVG and PNG, readable in grey and by any eye."""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from wide.errors import MissingExtraError
from wide.report.figure import Figure, Row, to_csv
from wide.writing import replacing, write_whole

FOLDER = "figures"
"""Folder beside a report that holds its figures as SVG, PNG and CSV."""
# Okabe and Ito's palette, which people with any colour vision can tell apart; neighbours differ in lightness.
BLUE, ORANGE, GREEN, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#707070"
PURPLE, VERMILION = "#CC79A7", "#D55E00"
CYCLE = (BLUE, ORANGE, GREEN, SKY, GREY, PURPLE, VERMILION)
"""Colours in their order. They, markers and dashes repeat after different numbers, so that pairs do not."""
MARKERS = "os^DvPX*<>phd"
_DASHES = ("-", "--", "-.")
_HATCHES = ("", "//", "..", "xx")
_ACROSS = ("-", ":", "-.")
_DPI, _WIDTH, _WIDE = 150, 9.0, 2.5
_MANY_ENTRIES, _MANY_CELLS, _MANY_TICKS, _MANY_MARKERS = 8, 8, 48, 24
_STYLE = resources.files("wide.report") / "wide.mplstyle"
LIGHT, DARK = "#f4f8fc", "#003068"
"""The ends of the scale of shares, along which lightness falls evenly."""


def require_matplotlib() -> None:
    """Raise MissingExtraError early where figures cannot be drawn, because matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "the report needs matplotlib: pip install 'wide[report]', or switch it off with --report false"
        ) from error


def save_figure(figure: Figure, source: Any, folder: Path) -> tuple[str, Sequence[Row]]:
    """Write a figure as SVG and PNG and its values as CSV, and return the SVG and the values.

    Raises MissingRecordsError, and writes nothing, if records that it needs are missing.
    """
    place, rows, svg = folder / FOLDER / figure.name, figure.table(source), io.StringIO()
    with style(), replacing(place.with_suffix(".png")) as unfinished:
        drawn = draw(figure, rows, source)
        drawn.savefig(svg, format="svg", metadata={"Date": None})
        drawn.savefig(unfinished, format="png", dpi=_DPI)
    write_whole(place.with_suffix(".svg"), svg.getvalue())
    write_whole(place.with_suffix(".csv"), to_csv(rows))
    return svg.getvalue(), rows


def draw(figure: Figure, rows: Sequence[Row], source: Any) -> Any:
    """Return a figure of matplotlib that shows rows of `Figure.table`."""
    from matplotlib.figure import Figure as Canvas

    panels, across = figure.panels(rows), figure.lines(source)
    columns = min(figure.columns, len(panels))
    lines = -(-len(panels) // columns)
    drawn = Canvas(figsize=(_WIDTH, figure.height * lines), layout="constrained")
    shared: Any = "row" if figure.kind != "image" and figure.y_label else "none"
    grid = drawn.subplots(lines, columns, squeeze=False, sharey=shared).flatten()
    drawn.supxlabel(figure.x_label, fontsize="medium")
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, (name, found) in zip(grid, panels.items(), strict=False):
        axes.set_title(name, fontsize="medium", loc="left")
        if figure.kind == "image":
            _image(drawn, axes, figure, found)
    if figure.kind == "image":
        return drawn
    drawn.supylabel(figure.y_label, fontsize="medium")
    order = _order(figure, rows, source) if figure.by else [""]
    for axes, (name, found) in zip(grid, panels.items(), strict=False):
        _plot(axes, figure, found, order)
        if figure.line_at is not None:
            axes.axhline(figure.line_at, color="black", linewidth=1)
        for dash, heights in zip(_ACROSS, across.values(), strict=False):
            if name in heights:
                axes.axhline(heights[name], color="black", linewidth=1, linestyle=dash)
    # Only now: panels that share an axis share the greatest height of all of them.
    for axes, found in zip(grid, panels.values(), strict=False):
        _scale_height(axes, figure, [figure.scale * row[figure.y] for row in found])
    _legend(drawn, figure, order, rows, [name for name, heights in across.items() if set(heights) & set(panels)])
    return drawn


def _order(figure: Figure, rows: Sequence[Row], source: Any) -> list[str]:
    """Return names, whose places choose colour and marker: a name has the same ones in all figures of a source."""
    names = dict.fromkeys(str(row[figure.by]) for row in rows if row[figure.y] is not None)
    fixed = (("attention", "FFN"), getattr(source, "methods", ()))
    return list(dict.fromkeys([*next((each for each in fixed if {*each} & {*names}), ()), *names]))


def _plot(axes: Any, figure: Figure, rows: Sequence[Row], order: Sequence[str]) -> None:
    named = figure.even or any(isinstance(row[figure.x], str) for row in rows)
    places = list(dict.fromkeys(row[figure.x] for row in rows))
    if named and all(isinstance(place, int | float) for place in places):
        places.sort()
    series = figure.series(rows)
    width = 0.8 / len(series)
    for number, ((name, filled), points) in enumerate(series.items()):
        x = [places.index(row[figure.x]) if named else row[figure.x] for row in points]
        y = [figure.scale * row[figure.y] for row in points]
        style = _bar_style(order.index(name)) if figure.kind == "bar" else _line_style(order.index(name), filled=filled)
        if figure.kind == "bar":
            axes.bar([place + (number - (len(series) - 1) / 2) * width for place in x], y, width, **style)
        else:
            errors = [figure.scale * (row[figure.error] or 0.0) for row in points] if figure.error else None
            # Where a line is many steps, a marker at each would hide it.
            axes.errorbar(x, y, yerr=errors, capsize=3, markevery=-(-len(x) // _MANY_MARKERS), **style)
        if figure.ideal:
            ideal = [math.nan if row[figure.ideal] is None else figure.scale * row[figure.ideal] for row in points]
            axes.plot(x, ideal, color=style["color"], linestyle=":", marker="_", markersize=12)
        for row, *place in zip(points, x, y, strict=True) if figure.words else ():
            words = str(row[figure.words] or "")
            axes.annotate(words, place, xytext=(4, 4), textcoords="offset points", fontsize=7)
    if named:
        axes.set_xticks(range(len(places)), [_tick(place) for place in places])
        if sum(len(_tick(place)) for place in places) * figure.columns > _MANY_TICKS:
            axes.tick_params(axis="x", rotation=90 if len(places) > _MANY_CELLS else 20, labelsize="small")
    elif all(isinstance(place, int) for place in places):
        axes.locator_params(axis="x", integer=True, min_n_ticks=1, nbins=5)


def _tick(place: Any) -> str:
    # Tokens are counted in powers of two: 4k is 4096.
    if isinstance(place, int) and place >= 1024 and place % 1024 == 0:
        return f"{place // 1024}k"
    return f"{place:g}" if isinstance(place, float) else str(place)


def _scale_height(axes: Any, figure: Figure, heights: Sequence[float]) -> None:
    positive = [height for height in heights if height > 0]
    span = max(positive, default=1.0) / min(positive, default=1.0)
    if figure.log is True or (figure.log == "wide" and span > _WIDE):
        from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

        axes.set_yscale("log")
        if span < 200:
            # Powers of ten alone would leave most axes without two numbers.
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0) if span < 15 else (1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_locator(NullLocator())
    elif not figure.log:
        axes.set_ylim(min(0.0, axes.get_ylim()[0] if min(heights, default=0.0) < 0 else 0.0), figure.top)


def _line_style(number: int, *, filled: bool) -> dict[str, Any]:
    dash = _DASHES[number // len(CYCLE) % len(_DASHES)]
    return {
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": dash if filled else "--",
        "color": CYCLE[number % len(CYCLE)],
        "fillstyle": "full" if filled else "none",
    }


def _bar_style(number: int) -> dict[str, Any]:
    hatch = _HATCHES[number % len(_HATCHES)]
    return {"facecolor": CYCLE[number % len(CYCLE)], "hatch": hatch, "edgecolor": "black", "linewidth": 0.6}


def _image(drawn: Any, axes: Any, figure: Figure, rows: Sequence[Row]) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    across, down = (list(dict.fromkeys(row[column] for row in rows)) for column in (figure.x, figure.by))
    cells = [[math.nan] * len(across) for _ in down]
    for row in rows:
        value = row[figure.y]
        cells[down.index(row[figure.by])][across.index(row[figure.x])] = math.nan if value is None else value
    ends = [VERMILION, "#ffffff", DARK] if figure.signed else [LIGHT, DARK]
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
    for axis, names in ((axes.xaxis, across), (axes.yaxis, down)):
        named = any(isinstance(name, str) for name in names)
        shown = range(0, len(names), -(-len(names) // (_MANY_TICKS if named else 16 if axis is axes.xaxis else 6)))
        axis.set_ticks(shown, [str(names[place]) for place in shown])
    if any(isinstance(name, str) for name in across):
        axes.tick_params(axis="x", rotation=90, labelsize="small")
    axes.grid(visible=False)
    axes.set_ylabel(figure.by)
    drawn.colorbar(image, ax=axes, label=figure.y_label)


def _legend(drawn: Any, figure: Figure, order: Sequence[str], rows: Sequence[Row], across: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = []
    drawn_names = {str(row[figure.by]) for row in rows if figure.by and row[figure.y] is not None}
    for number, name in enumerate(order):
        if name not in drawn_names:
            continue
        if figure.kind == "bar":
            entries.append(Patch(label=name, **_bar_style(number)))
        else:
            style = _line_style(number, filled=True) | ({"linestyle": "none"} if figure.filled else {})
            entries.append(Line2D([], [], label=name, **style))
    black: list[tuple[str, dict[str, Any]]] = []
    if figure.filled and len({bool(row[figure.filled]) for row in rows}) > 1:
        black.append(("with LoRA", {"marker": "o"}))
        black.append(("without LoRA", {"marker": "o", "fillstyle": "none", "linestyle": "--"}))
    if figure.ideal:
        black.append((figure.ideal_means, {"marker": "_", "linestyle": ":"}))
    black += [(name, {"linestyle": dash, "linewidth": 1}) for name, dash in zip(across, _ACROSS, strict=False)]
    entries += [Line2D([], [], color="black", label=name, **look) for name, look in black]
    if entries:
        beside = len(entries) > _MANY_ENTRIES
        widest = max(len(entry.get_label()) for entry in entries)
        columns = 1 if beside else max(1, min(4, 100 // (widest + 6)))
        place = "outside right upper" if beside else "outside upper right"
        drawn.legend(handles=entries, ncols=columns, frameon=False, fontsize="small", loc=place)


@contextmanager
def style() -> Iterator[None]:
    """Draw in the block as all figures are drawn."""
    require_matplotlib()
    from matplotlib import style as styles

    with styles.context(str(_STYLE)), warnings.catch_warnings():
        # A sign that the font lacks shows as a box; texts of tokens may hold any.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield
