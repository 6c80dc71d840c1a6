"""Words in a figure can be read: none covers another, in the pictures of committed results and of a small run."""

from itertools import combinations

import pytest
from test_results import RESULTS, ROWS

from wide.report.bench_files import bench_file
from wide.report.comparison_figures import COMPARISON_FIGURES
from wide.report.comparison_merge import merge
from wide.report.comparison_page import read_comparison
from wide.report.depth_figures import DEPTH_FIGURES
from wide.report.evidence import EVIDENCE_FIGURES
from wide.report.evidence_page import read_evidence
from wide.report.figures import FIGURES
from wide.report.layer_lines import LAYERS_OF_RUNS
from wide.report.naive_figures import NAIVE_FIGURES
from wide.report.profiles import Profile
from wide.report.selection import MissingRecordsError
from wide.report.speed_figures import SPEED_FIGURES
from wide.report.sweep_figures import SWEEP_FIGURES

# Letters of two words may come this near to each other's boxes, in pixels.
SLACK = 1.5


def shown_words(figure):
    """Yield (words, box) of everything that is written in a figure of matplotlib, ticks within the axes only."""
    found = list(figure.texts)
    found += [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        if not axes.axison:
            continue
        found += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        found += [] if axes.get_legend() is None else axes.get_legend().get_texts()
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

    from wide.report.drawing import _new_figure, _style

    with _style():
        drawn = _new_figure(figure.size_of(source))
        FigureCanvasAgg(drawn)
        figure.draw(drawn, source)
        drawn.canvas.draw()
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


def depth():
    """Return a breakdown of naive depth as large as the bench's, with times of its order."""
    stages = {"dense": (), "gather-scatter": ("indices", "gather", "scatter"), "fused": ("sort",)}
    stages["grouped product"] = ("sort", "gather", "scatter")
    records = [
        {
            "rows": rows,
            "width_in": 4096,
            "width_out": width,
            "active": 0.5,
            "candidate": way,
            "error": 0.0,
            "median_us": rows * (1.0 + len(names)),
            "speedup": 1.0 / (1.0 + len(names)),
            "parts_us": {"GEMM": 0.9 * rows, **dict.fromkeys(names, float(rows))},
            "accounted_traffic_bytes": {},
        }
        for width in (4096, 28672)
        for rows in (64, 1024, 4096, 16384)
        for way, names in stages.items()
    ]
    return Profile([bench_file("depth.json", {"device": "GPU", "records": records})])


def page(name):
    """Return what a committed page is drawn from, with its figures."""
    folders = RESULTS[name]
    if (folders[0] / "compare.jsonl").is_file():
        rows = ROWS[name].split(",") if name in ROWS else ()
        found = {folder.name: read_comparison(folder / "compare.jsonl") for folder in folders}
        return [(merge(found, rows) if len(found) > 1 else found[folders[0].name], COMPARISON_FIGURES)]
    evidence = read_evidence(folders)
    drawn = [(evidence, (*EVIDENCE_FIGURES, LAYERS_OF_RUNS)), (evidence.profile, SPEED)]
    return [*drawn, *((run.records, FIGURES) for run in evidence.runs if len(folders) == 1)]


SPEED = (*SPEED_FIGURES, *SWEEP_FIGURES, *NAIVE_FIGURES, *DEPTH_FIGURES)


@pytest.mark.parametrize("name", RESULTS)
def test_no_words_of_a_committed_page_cover_others(name):
    drawn = 0
    for source, figures in page(name):
        for figure in figures:
            try:
                assert not covered(figure, source), figure.name
            except MissingRecordsError:
                continue
            drawn += 1
    assert drawn


def test_no_words_of_a_large_breakdown_cover_others():
    assert not covered(DEPTH_FIGURES[0], depth())
