"""The figures of a run say no more than was measured, and can be read in grey."""

import json

import pytest
from test_report import complete_records, record

from wide.report.drawing import draw_svg
from wide.report.figures import FIGURES, LAYERS, TRAINING
from wide.report.selection import Selection

pytest.importorskip("matplotlib")
MATRICES = next(figure for figure in FIGURES if figure.name == "group-correlation")
CORRELATION = next(figure for figure in FIGURES if figure.name == "correlation")


def drawn(figure, run):
    from matplotlib.figure import Figure

    canvas = Figure(figsize=figure.size)
    return canvas, figure.draw(canvas, run)


def course(stage, target, **shares):
    for step in range(0, 40, 10):
        yield record(stage, "training.lm_loss", 4.0, step=step)
        yield record(stage, "training.sparsity.target", target, step=step)
        for name, share in shares.items():
            yield record(stage, f"training.sparsity.{name}", share, step=step)


def curves(run):
    """Return (label, heights) of the lines over the steps in the panel of skipped groups."""
    canvas, words = drawn(TRAINING, run)
    lines = [line for line in canvas.axes[1].get_lines() if len(line.get_xdata()) > 2]
    return [(line.get_label(), set(line.get_ydata())) for line in lines], words


def test_a_target_stands_beside_what_it_counts():
    shares = {"attention": 0.25, "ffn": 0.5625, "mean": 0.5}
    found, words = curves(Selection([*course("stage 1", 0.5, **shares), *course("stage 1+2", 0.5, **shares)]))
    assert found[:4] == [("attention", {25.0}), ("FFN", {56.25}), ("both together", {50.0}), ("target of both", {50.0})]
    assert len(found) == 8
    assert "The target is one of both halves together" in words
    assert "sparsity.mean" in TRAINING.sheet(Selection([*course("stage 1", 0.5, **shares)])).header


def test_lora_on_a_static_plan_has_no_target():
    shares = {"attention": 0.5, "ffn": 0.5, "mean": 0.5}
    found, words = curves(Selection([*course("pruned + LoRA", 0.0, **shares)]))
    assert [label for label, _ in found] == ["attention", "FFN"]
    assert "target" not in words


def test_a_target_without_what_it_counts_is_not_drawn():
    found, _ = curves(Selection([*course("stage 1", 0.5, attention=0.25, ffn=0.5625)]))
    assert [label for label, _ in found] == ["attention", "FFN"]


def test_no_layer_has_the_target_of_the_whole_model():
    canvas, _ = drawn(LAYERS, Selection(list(complete_records())))
    assert not list(canvas.axes[0].get_lines())
    assert [text.get_text() for text in canvas.axes[0].get_legend().get_texts()] == ["attention", "FFN"]


def matrix(values):
    phi = {"groups": list(range(len(values))), "phi": values}
    return Selection([record("stage 1", "routing.ffn.group_matrix", json.dumps(phi), "json", layer=0)])


def test_negative_correlations_and_missing_ones_are_hatched():
    canvas, words = drawn(MATRICES, matrix([[1.0, -0.4, None], [-0.04, 1.0, 0.4], [None, None, None]]))
    axes, bar = canvas.axes
    hatched = {(cell.get_x() + 0.5, cell.get_y() + 0.5): cell.get_hatch() for cell in axes.patches}
    assert hatched == {(1, 0): "////", (2, 0): "xx", (0, 2): "xx", (1, 2): "xx", (2, 2): "xx"}
    assert [patch.get_hatch() for patch in bar.patches] == ["////"]
    assert "Negative ones are hatched" in words


def test_correlations_that_round_to_zero_have_no_sign():
    run = matrix([[1.0, -0.0], [-0.04, 1.0]])
    canvas, _ = drawn(MATRICES, run)
    assert [text.get_text() for text in canvas.axes[0].texts] == ["1.0", "0.0", "0.0", "1.0"]
    assert "-0.0\n" not in MATRICES.sheet(run).to_csv()
    series = Selection([record("stage 1", "routing.ffn.token_correlation", "[-0.001, 0.2]", "json")])
    assert "1 tokens apart: 0.00" in draw_svg(CORRELATION, series)[1]
