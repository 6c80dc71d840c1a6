"""The door to matplotlib: figures as SVG for the page, each in its files, and together as one PNG."""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from wide.errors import MissingExtraError
from wide.report.figure import Figure, Source
from wide.report.selection import MissingRecordsError
from wide.report.writing import replacing, write_whole

FOLDER = "figures"
"""Folder beside a report that holds its figures as SVG, PNG and CSV."""
_DPI = 150
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
        drawn = _new_figure(figure.size_of(source))
        description = figure.draw(drawn, source)
        return _as_svg(drawn), description


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
    values = figure.sheet(source).to_csv()
    with _style():
        drawn = _new_figure(figure.size_of(source))
        description = figure.draw(drawn, source)
        svg = _as_svg(drawn)
        with replacing(place.with_suffix(".png")) as unfinished:
            drawn.savefig(unfinished, format="png", dpi=_DPI)
    write_whole(place.with_suffix(".svg"), svg)
    write_whole(place.with_suffix(".csv"), values)
    return svg, description


def save_png(path: Path, figures: Sequence[Figure[Source]], source: Source) -> None:
    """Write figures below each other as one picture; where records are missing the picture says so."""
    heights = [figure.size[1] + 0.5 for figure in figures]
    with _style():
        whole = _new_figure((9.0, sum(heights)))
        parts = whole.subfigures(len(figures), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, figure in zip(parts, figures, strict=True):
            part.suptitle(figure.title, fontweight="bold", x=0.01, ha="left")
            try:
                figure.draw(part, source)
            except MissingRecordsError as missing:
                part.text(0.5, 0.5, str(missing), ha="center", va="center", wrap=True)
        with replacing(path) as unfinished:
            whole.savefig(unfinished, format="png", dpi=_DPI)


def _as_svg(drawn: Any) -> str:
    stream = io.StringIO()
    drawn.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def _new_figure(size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=size, layout="constrained")


@contextmanager
def _style() -> Iterator[None]:
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A sign that the font lacks shows as a box; texts of tokens may hold any.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield
