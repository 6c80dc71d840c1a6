"""Words in a figure can be read: none covers another, in pictures of the studies' records."""

from itertools import combinations
from pathlib import Path

import pytest
from report_words import draw

from wide.report.comparison import read_comparison
from wide.report.comparison_figures import COMPARISON_FIGURES
from wide.report.reading import read_folder, read_profile
from wide.report.run_figures import FIGURES
from wide.report.speed import SPEED_FIGURES

RESULTS = Path(__file__).parents[2] / "docs/results"
# Letters of two words may come this near to each other's boxes, in pixels.
SLACK = 1.5


def shown_words(figure):
    """Yield (words, box) of what stands beside the data: titles, labels, legends, ticks within the axes only."""
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        if not axes.axison:
            continue
        found += [axes._left_title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    for text in found:
        if text is not None and text.get_visible() and text.get_text().strip() and not text.get_rotation() % 90:
            yield text.get_text(), text.get_window_extent()


def covered(figure, source):
    """Return the pairs of words that cover each other, and those that the edge of the picture cuts."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn = draw(figure, source)
    FigureCanvasAgg(drawn)
    drawn.draw_without_rendering()
    words = list(shown_words(drawn))
    whole = drawn.bbox
    assert words
    cut = [(one, "edge") for one, a in words if not (whole.x0 <= a.x0 + SLACK and a.x1 <= whole.x1 + SLACK)]
    cut += [(one, "edge") for one, a in words if not (whole.y0 <= a.y0 + SLACK and a.y1 <= whole.y1 + SLACK)]
    return cut + [(one, other) for (one, a), (other, b) in combinations(words, 2) if overlap(a, b)]


def overlap(a, b):
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return width > SLACK and height > SLACK


def test_no_words_of_the_study_of_methods_cover_others():
    study = RESULTS / "lab-88m"
    run, grids = (
        read_folder(study / "fitted-50").records,
        {name: read_comparison(study / name) for name in ("f50", "n50")},
    )
    cases = [(figure, run) for figure in FIGURES]
    cases += [(each, grids["f50" if each.name == "quality-speed" else "n50"]) for each in COMPARISON_FIGURES]
    assert {figure.name: found for figure, source in cases if (found := covered(figure, source))} == {}


def test_no_words_of_the_study_of_speed_cover_others():
    profile = read_profile(RESULTS / "h200")
    assert {figure.name: words for figure in SPEED_FIGURES if (words := covered(figure, profile))} == {}
