"""Lines of operators whose points say by their filling what the kernel is written in."""

from collections.abc import Iterable, Sequence
from typing import Any

from wide.report.profiles import OperatorPoint

KERNELS = {"cuda": ("full", "CUDA C++"), "gluon": ("left", "Gluon"), "triton": ("none", "Triton")}
"""Backend -> filling of its points, and its name; any other is drawn as a small dot."""
_OTHER = ("full", "")


def draw_points(axes: Any, places: Sequence[int], points: Sequence[OperatorPoint], style: str, colour: str) -> Any:
    """Draw a line with a point for each measurement, and return what stands for it in a legend.

    Args:
        axes: Of matplotlib.
        places: Of the points along the axis.
        points: What was measured.
        style: Marker, then dash.
        colour: Of the line.
    """
    marker, dash = style[0], style[1:]
    axes.plot(places, [point.speedup for point in points], dash, color=colour)
    for place, point in zip(places, points, strict=True):
        fill, known = KERNELS.get(point.backend, _OTHER)
        size = 6.5 if known else 3.0
        axes.plot(
            place, point.speedup, marker, color=colour, fillstyle=fill, markerfacecoloralt="white", markersize=size
        )
    return axes.plot([], [], style, color=colour)[0]


def kernel_legend(figure: Any, points: Iterable[OperatorPoint]) -> None:
    """Say above the panels what the fillings mean, of the kernels that are drawn."""
    from matplotlib.lines import Line2D

    drawn = {point.backend for point in points}
    options: dict[str, Any] = {"marker": "o", "color": "black", "markerfacecoloralt": "white", "linestyle": "none"}
    handles = [
        Line2D([], [], fillstyle=fill, label=f"kernel in {name}", **options)
        for backend, (fill, name) in KERNELS.items()
        if backend in drawn
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize="small")


def kernel_name(point: OperatorPoint) -> str:
    """Return what a point's kernel is written in, for words."""
    return KERNELS.get(point.backend, ("", point.backend))[1]
