"""What all figures share: colours, markers and dashes that can be told apart in grey, and legends that hide no data."""

from collections.abc import Mapping
from typing import Any

# Okabe and Ito's palette, which people with any colour vision can tell apart.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#707070"
SKY, YELLOW, VERMILION, PURPLE = "#56B4E9", "#F0E442", "#D55E00", "#CC79A7"
CYCLE = (BLUE, ORANGE, GREEN, SKY, GREY, PURPLE, VERMILION)
"""Colours of lines in their order: neighbours differ in lightness, but some of the seven are equally light."""
MARKERS = "os^DvPX*<>phd"
"""Markers of lines in their order; they and the colours repeat after different numbers, so that pairs do not."""
DASHES = ("-", "--", "-.")
"""Dashes of lines in their order; dotted lines are ceilings and targets."""
HALF_NAMES = {"attention": "attention", "ffn": "FFN"}
HALF_COLOURS = {"attention": BLUE, "ffn": ORANGE}
HALF_HATCHES = {"attention": "", "ffn": "//"}

_LIGHT, _DARK = (244, 248, 252), (0, 48, 104)
# From here on white letters are easier to read than black ones.
_WHITE_FROM = 0.7


def shade(share: float) -> str:
    """Return the colour of a share in [0, 1] on the scale from light to dark blue, whose lightness falls evenly."""
    share = min(max(share, 0.0), 1.0)
    parts = (round(light + share * (dark - light)) for light, dark in zip(_LIGHT, _DARK, strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)


def ink(share: float) -> str:
    """Return the colour of letters that can be read on `shade(share)`."""
    return "#ffffff" if share >= _WHITE_FROM else "#000000"


def share_colours() -> Any:
    """Return `shade` as a colour map of matplotlib; what is missing is hatched by the axes' own colour."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("share", [shade(0.0), shade(1.0)]).with_extremes(bad="#bbbbbb")


def signed_colours() -> Any:
    """Return the colour map of signed values: orange below zero, white, blue above."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("signed", [VERMILION, "#ffffff", shade(1.0)]).with_extremes(bad="#bbbbbb")


def legend_above(axes: Any, columns: int = 3, entries: Mapping[str, Any] | None = None) -> None:
    """Put the legend above the axes, where it can hide no data; without entries it is that of all labelled lines."""
    names = {} if entries is None else {"handles": list(entries.values()), "labels": list(entries)}
    axes.legend(
        **names,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=columns,
        frameon=False,
        fontsize="small",
        columnspacing=1.0,
        handlelength=1.6,
    )


def whole_numbers(axis: Any) -> None:
    """Let an axis have ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
