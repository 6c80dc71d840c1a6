"""The door to matplotlib: figures as SVG for the page and together as one PNG."""

import io
from pathlib import Path
from typing import Any

from wide.errors import MissingExtraError
from wide.report.figures import FIGURES, Draw
from wide.report.selection import MissingRecordsError, Selection

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
}


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


def draw_svg(draw: Draw, size: tuple[float, float], run: Selection) -> tuple[str, str]:
    """Return one figure as SVG and the sentence that describes it.

    Args:
        draw: One of `wide.report.figures`.
        size: Width and height in inches.
        run: What to draw.

    Raises:
        MissingRecordsError: If records that it needs are missing.
    """
    with _style():
        figure = _new_figure(size)
        description = draw(figure, run)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue(), description


def save_png(path: Path, run: Selection) -> None:
    """Write all figures below each other as one picture; where records are missing the picture says so."""
    heights = [size[1] + 0.5 for _, _, size in FIGURES]
    with _style():
        whole = _new_figure((9.0, sum(heights)))
        parts = whole.subfigures(len(FIGURES), 1, height_ratios=heights)
        for part, (title, draw, _) in zip(parts, FIGURES, strict=True):
            part.suptitle(title, fontweight="bold", x=0.01, ha="left")
            try:
                draw(part, run)
            except MissingRecordsError as missing:
                part.text(0.5, 0.5, str(missing), ha="center", va="center")
        whole.savefig(path, format="png", dpi=_DPI)


def _new_figure(size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _style() -> Any:
    require_matplotlib()
    import matplotlib

    return matplotlib.rc_context(_STYLE)
