"""The figures of a run say no more than was measured, and can be read in grey."""

import pytest
from report_words import draw, draw_svg
from test_report import complete_records, record

from wide.report.figure import to_csv
from wide.report.run_figures import FIGURES
from wide.report.selection import Selection

pytest.importorskip("matplotlib")
BY_NAME = {figure.name: figure for figure in FIGURES}
LAYERS, TRAINING = BY_NAME["layers"], BY_NAME["training"]
MATRICES, CORRELATION = BY_NAME["group-correlation"], BY_NAME["correlation"]


def course(stage, target, **shares):
    for step in range(0, 40, 10):
        yield record(stage, "training.lm_loss", 4.0, step=step)
        yield record(stage, "training.sparsity.target", target, step=step)
        for name, share in shares.items():
            yield record(stage, f"training.sparsity.{name}", share, step=step)


def curves(run):
    """Return the lines over the steps in the panel of skipped groups: name -> heights."""
    rows = [row for row in TRAINING.table(run) if row["panel"] == "skipped groups, %"]
    return {name: {row["value"] for row in rows if row["metric"] == name} for name in {row["metric"] for row in rows}}


def test_a_target_stands_beside_what_it_counts():
    shares = {"attention": 0.25, "ffn": 0.5625, "mean": 0.5}
    run = Selection([*course("stage 1", 0.5, **shares), *course("stage 1+2", 0.5, **shares)])
    assert curves(run) == {"attention": {25.0}, "FFN": {56.25}, "as the target counts": {50.0}, "target": {50.0}}
    # The second stage goes on where the first one ended.
    assert sorted({row["step"] for row in TRAINING.table(run)}) == [0, 10, 20, 30, 31, 41, 51, 61]


def test_lora_on_a_static_plan_has_no_target():
    shares = {"attention": 0.5, "ffn": 0.5, "mean": 0.5}
    assert set(curves(Selection([*course("pruned + LoRA", 0.0, **shares)]))) == {"attention", "FFN"}


def test_a_target_without_what_it_counts_is_not_drawn():
    assert set(curves(Selection([*course("stage 1", 0.5, attention=0.25, ffn=0.5625)]))) == {"attention", "FFN"}


def test_sublayers_are_told_apart_in_the_legend():
    drawn = draw(LAYERS, Selection(list(complete_records())))
    assert not list(drawn.axes[0].get_lines())
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["attention", "FFN"]
    assert len({patch.get_hatch() for patch in drawn.axes[0].patches}) == 2


def matrix(values):
    phi = {"groups": list(range(len(values))), "phi": values}
    return Selection([record("stage 1", "routing.ffn.group_matrix", phi, layer=0)])


def test_negative_correlations_and_missing_ones_are_hatched():
    drawn = draw(MATRICES, matrix([[1.0, -0.4, None], [-0.04, 1.0, 0.4], [None, None, None]]))
    hatched = {(cell.get_x() + 0.5, cell.get_y() + 0.5): cell.get_hatch() for cell in drawn.axes[0].patches}
    assert hatched == {(1, 0): "////", (2, 0): "xx", (0, 2): "xx", (1, 2): "xx", (2, 2): "xx"}


def test_correlations_that_round_to_zero_have_no_sign():
    run = matrix([[1.0, -0.0], [-0.04, 1.0]])
    assert "-0.0\n" not in to_csv(MATRICES.table(run))
    series = Selection([record("stage 1", "routing.ffn.token_correlation", [-0.001, 0.2])])
    assert "FFN: 0.00 at 1" in draw_svg(CORRELATION, series)[1].replace("-0.00", "0.00")
