"""One set of routers, many budgets: thresholds that give the sparsity asked for."""

import math
from dataclasses import replace

import pytest
import torch
from families import make, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from wide.config import WideConfig
from wide.data.batches import TokenBatch
from wide.errors import ConfigError, NotAttachedError
from wide.materialisation.checkpoint import load_checkpoint, save_checkpoint
from wide.models.attach import attach, attachment, plan_for
from wide.models.cost import SkipCounter, half_weights
from wide.models.discovery import discover
from wide.models.observe import bypass, observe
from wide.models.thresholds import (
    DEFAULT_POINTS,
    MarginHistogram,
    _bins,
    _edge,
    balanced_thresholds,
    calibrate_thresholds,
    measure_sparsity,
    set_sparsity,
)
from wide.plan import LayerPlan, Plan


def batches(count, *, seed, padding=0):
    for i in range(count):
        ids = tokens(8, 24, seed=seed + i)
        valid = torch.ones_like(ids, dtype=torch.bool)
        valid[:, 24 - padding :] = False
        yield TokenBatch(input_ids=ids, labels=ids, valid=valid)


@pytest.fixture(scope="module")
def model():
    return attach(make("llama", initializer_range=0.1), WideConfig(ffn_group_size=8, router_rank=8))


def counted(model, data):
    counter = SkipCounter(model)
    with torch.no_grad(), observe(model) as routing:
        for batch in data:
            model(input_ids=batch.input_ids)
            counter.add(routing, batch.valid)
    return counter.result()


@pytest.mark.parametrize("measure", ["mean", "linear_flops"])
def test_every_sparsity_is_met_within_a_point_on_other_text(model, measure):
    points = calibrate_thresholds(model, batches(10, seed=0), measure=measure)
    assert points == sorted(points)
    assert len({threshold for _, threshold in points}) == len(points)
    for wanted in (0.15, 0.25, 0.5, 0.72, 0.85):
        set_sparsity(model, wanted)
        assert getattr(counted(model, batches(10, seed=100)), measure) == pytest.approx(wanted, abs=0.01)
    set_sparsity(model, threshold=0.0)


def test_tokens_that_always_execute_are_not_taken_for_skipped_ones():
    model = make("llama", initializer_range=0.1)
    plan = plan_for(WideConfig(ffn_group_size=8, router_rank=8), discover(model))
    halves = [{name: replace(half, first_tokens=2) for name, half in layer.halves()} for layer in plan.layers]
    attach(model, Plan(tuple(LayerPlan(**each) for each in halves)))
    calibrate_thresholds(model, batches(10, seed=0))
    # With 2 of 24 tokens, at most 92 % can be skipped.
    for wanted in (0.15, 0.5, 0.85):
        set_sparsity(model, wanted)
        assert counted(model, batches(10, seed=0)).mean == pytest.approx(wanted, abs=0.01)


def test_thresholds_calibrated_for_a_wish_meet_it_even_where_sparsity_bends_between_points():
    unsteady = attach(make("llama", initializer_range=0.3), WideConfig(ffn_group_size=8, router_rank=8))
    calibrate_thresholds(unsteady, batches(10, seed=0), sparsities=(*DEFAULT_POINTS, 0.72))
    set_sparsity(unsteady, 0.72)
    assert counted(unsteady, batches(10, seed=100)).mean == pytest.approx(0.72, abs=0.01)


def test_attention_and_ffn_skip_the_same_share_by_a_threshold_each(model):
    before = [router.threshold for router in attachment(model).routers()]
    thresholds = balanced_thresholds(model, batches(10, seed=0), 0.4, tolerance=0.005)
    kinds = [router.half_layer for router in attachment(model).routers()]
    assert len(set(zip(kinds, thresholds, strict=True))) == len(set(thresholds)) == 2
    for measure in ("attention", "ffn", "mean"):
        found = measure_sparsity(model, batches(10, seed=100), thresholds, measure=measure)
        assert found == pytest.approx(0.4, abs=0.01)
    assert [router.threshold for router in attachment(model).routers()] == before


def test_kinds_that_are_met_stay_at_argmax(model):
    argmax = measure_sparsity(model, batches(4, seed=0), 0.0)
    assert set(balanced_thresholds(model, batches(4, seed=0), argmax, tolerance=1.0)) == {0.0}


def test_padding_does_not_count(model):
    clean = [
        TokenBatch(input_ids=b.input_ids[:, :20], labels=b.labels[:, :20], valid=b.valid[:, :20])
        for b in batches(2, seed=0)
    ]
    with_padding = list(batches(2, seed=0, padding=4))
    assert measure_sparsity(model, with_padding, 0.1) == pytest.approx(measure_sparsity(model, clean, 0.1), abs=1e-9)


def test_what_padding_on_the_left_holds_does_not_matter(model):
    (batch,) = batches(1, seed=0)
    valid = torch.arange(24).expand(8, -1) >= 6
    ids = [batch.input_ids.masked_fill(~valid, filler) for filler in (0, 7)]
    found = [measure_sparsity(model, [TokenBatch(input_ids=i, labels=i, valid=valid)], 0.1) for i in ids]
    assert found[0] == found[1]


def test_zero_is_dense(model):
    calibrate_thresholds(model, batches(1, seed=0), sparsities=(0.5,))
    assert set_sparsity(model, 0.0) == -math.inf
    ids = tokens()
    routed = model(input_ids=ids).logits
    with bypass(model):
        torch.testing.assert_close(routed, model(input_ids=ids).logits)
    set_sparsity(model, threshold=0.0)


def test_calibration_leaves_thresholds_and_modes_alone(model):
    set_sparsity(model, threshold=0.25)
    model.train()
    model.lm_head.eval()
    calibrate_thresholds(model, batches(1, seed=0), sparsities=(0.4, 0.6))
    assert {router.threshold for router in attachment(model).routers()} == {0.25}
    assert model.training
    assert not model.lm_head.training
    model.eval()
    set_sparsity(model, threshold=0.0)


def test_the_argmax_routing_is_a_point_of_the_table(model):
    points = calibrate_thresholds(model, batches(1, seed=0), sparsities=(0.3,))
    assert [sparsity for sparsity, threshold in points if threshold == 0.0] == [
        pytest.approx(counted(model, batches(1, seed=0)).mean)
    ]


def test_bad_wishes_are_refused(model):
    calibrate_thresholds(model, batches(1, seed=0), sparsities=(0.4, 0.6))
    with pytest.raises(ConfigError, match="outside what this adapter is calibrated for"):
        set_sparsity(model, 0.9)
    with pytest.raises(ConfigError, match=r"\[0, 1\)"):
        set_sparsity(model, 1.0)
    with pytest.raises(ConfigError, match="either a sparsity or a threshold"):
        set_sparsity(model)
    with pytest.raises(ConfigError, match="number"):
        set_sparsity(model, threshold=math.nan)
    with pytest.raises(ConfigError, match="calibration batches"):
        calibrate_thresholds(model, [])
    attachment(model).thresholds_by_sparsity = []
    with pytest.raises(ConfigError, match="no calibrated thresholds"):
        set_sparsity(model, 0.5)
    set_sparsity(model, threshold=0.0)
    with pytest.raises(NotAttachedError):
        set_sparsity(make("llama"), 0.5)


@pytest.mark.parametrize("measure", ["mean", "linear_flops"])
def test_a_model_that_skips_everything_skips_no_more_than_all(measure):
    five = attach(make("llama", num_hidden_layers=5), WideConfig(ffn_group_size=8, router_rank=8))
    found = [measure_sparsity(five, batches(2, seed=0, padding=n), math.inf, measure=measure) for n in range(4)]
    assert all(1 - 1e-9 < sparsity <= 1 for sparsity in found)


def test_weights_of_half_layers_sum_to_what_can_be_skipped(model):
    assert sum(half_weights(model)) == pytest.approx(1.0)
    assert sum(half_weights(model, "linear_flops")) == pytest.approx(1.0)


@settings(max_examples=200)
@given(st.floats(-(2.0**99), 2.0**99, width=32), st.floats(-(2.0**99), 2.0**99, width=32))
def test_bins_are_ordered_as_numbers_are_and_hold_them(a, b):
    low, high = sorted((a, b))
    first, second = _bins(torch.tensor([low, high])).tolist()
    assert first <= second or low == high == 0.0
    assert _edge(first) <= low
    # Minus zero lies in the bin below zero.
    assert low < _edge(first + 1) or low == 0.0


def test_thresholds_are_part_of_the_state_of_a_model():
    config = WideConfig(ffn_group_size=8, router_rank=8)
    model, other = (attach(make("llama"), config) for _ in range(2))
    for index, router in enumerate(attachment(model).routers()):
        router.threshold = 0.1 * index
    state = model.bfloat16().state_dict()
    other.load_state_dict(state)
    assert [router.threshold for router in attachment(other).routers()] == [0.1 * i for i in range(4)]
    # States of earlier versions have no thresholds; those in force stay.
    earlier = {name: tensor for name, tensor in state.items() if not name.endswith(".threshold")}
    assert len(state) - len(earlier) == 4
    other.load_state_dict(earlier)
    assert [router.threshold for router in attachment(other).routers()] == [0.1 * i for i in range(4)]


def test_files_of_checkpoints_hold_thresholds_in_their_configuration_alone(tmp_path):
    model = attach(make("llama"), WideConfig(ffn_group_size=8, router_rank=8))
    set_sparsity(model, threshold=0.25)
    loaded = load_checkpoint(save_checkpoint(model, tmp_path / "first"))
    again = load_checkpoint(save_checkpoint(loaded, tmp_path / "second"))
    for folder in ("first", "second"):
        with safe_open(str(tmp_path / folder / "model.safetensors"), "pt") as file:
            assert not [name for name in file.keys() if "threshold" in name]  # noqa: SIM118
    for one in (loaded, again):
        assert {router.threshold for router in attachment(one).routers()} == {0.25}
        assert len([name for name in one.state_dict() if name.endswith(".threshold")]) == 4


def test_margins_are_counted_without_waiting_for_the_device(model):
    waits = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            # Values that the host asks for, and shapes that depend on values.
            is_index = function is torch.ops.aten.index.Tensor and args[1][0].dtype == torch.bool
            is_read = function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.bincount.default)
            waits.extend([function] * (is_index or is_read))
            return function(*args, **(kwargs or {}))

    (batch,) = batches(1, seed=0, padding=3)
    histogram = MarginHistogram(model, "mean")
    with torch.no_grad(), observe(model) as routing:
        model(input_ids=batch.input_ids)
        with Watching():
            histogram.add(routing, batch.valid)
    histogram.agree(model)
    assert not waits
    assert histogram.sparsity == pytest.approx(counted(model, [batch]).mean)
