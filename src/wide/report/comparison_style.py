"""What the figures of a comparison share: a marker and a colour for each method, and axes of perplexities."""

from collections.abc import Mapping, Sequence
from typing import Any

from wide.report.comparison import Comparison
from wide.report.style import CYCLE, MARKERS

Styles = dict[str, tuple[str, str]]
Dash = str | tuple[int, tuple[int, ...]]


def method_styles(comparison: Comparison) -> Styles:
    """Return the marker and the colour of each method, the same in all figures of a comparison."""
    return styles_of(list(dict.fromkeys(row.method for row in comparison.rows if not comparison.is_dense(row))))


def styles_of(names: Sequence[str]) -> Styles:
    """Return a marker and a colour for each name, in their order."""
    return {name: (MARKERS[place % len(MARKERS)], CYCLE[place % len(CYCLE)]) for place, name in enumerate(names)}


def logarithmic(axes: Any) -> None:
    """Let the vertical axis of perplexities be logarithmic, with numbers that can be read."""
    from matplotlib.ticker import LogLocator, ScalarFormatter

    axes.set_yscale("log")
    # Powers of ten alone would leave most axes without two numbers.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(LogLocator(subs=()))


def method_legend(figure: Any, styles: Styles, *, stages: bool, lines: Mapping[str, Dash] | None = None) -> None:
    """Put a legend of methods beside the axes, where it can hide no data.

    Args:
        figure: Of matplotlib.
        styles: Of the methods that are drawn.
        stages: Whether hollow and filled points tell rows without and with LoRA.
        lines: Black lines across the axes, with their dashes.
    """
    from matplotlib.lines import Line2D

    entries = [
        Line2D([], [], marker=marker, color=colour, linestyle="none", label=method)
        for method, (marker, colour) in styles.items()
    ]
    if stages:
        hollow = Line2D([], [], marker="o", color="black", fillstyle="none", linestyle="--", label="without LoRA")
        entries.append(hollow)
        entries.append(Line2D([], [], marker="o", color="black", linestyle="-", label="with LoRA"))
    entries += [
        Line2D([], [], color="black", linewidth=1, linestyle=dash, label=name) for name, dash in (lines or {}).items()
    ]
    figure.legend(handles=entries, loc="outside right upper", frameon=False, fontsize="small")
