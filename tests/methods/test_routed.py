"""What rows with routers share: the measure of the target, the text consumed, and the row 'wide'."""

import dataclasses

import depth_toys
import pytest
import torch
from depth_toys import cyclic_text as blocks
from recount import layer_weights
from tiny import dense_model, stage

from wide.config import ObjectiveConfig
from wide.errors import ConfigError, NotAttachedError
from wide.grouping import Grouping
from wide.methods.catalogue import WideMethodConfig
from wide.methods.method import Target, dense_plan
from wide.methods.routed import objective_for, route_wide
from wide.models.adapter import load
from wide.models.attach import attach, attachment, is_attached, plan_for
from wide.models.cost import SkipCounter
from wide.models.discovery import discover
from wide.models.observe import observe
from wide.plan import Dense, Following, LayerPlan, Plan, Routed

OBJECTIVE = ObjectiveConfig()
SETTINGS = WideMethodConfig(ffn_group_size=16, router_rank=4)


def train(model, *args, **run):
    return depth_toys.train(model, route_wide, *args, **run)


def skipped_share(model, text):
    """Return the skipped share of all matrix products of the decoder layers, counted from masks."""
    counter = SkipCounter(model)
    with torch.no_grad(), observe(model) as routing:
        for batch in text.in_order(8):
            model(input_ids=batch.input_ids)
            counter.add(routing, batch.valid)
    total = saved = 0.0
    for spec, (attention, ffn) in zip(discover(model), counter.result().layers, strict=True):
        work = layer_weights(spec)
        total += work.total
        saved += (attention or 0.0) * work.query_output + (ffn or 0.0) * work.ffn
    return saved / total


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("sparsity", [0.25, 0.5])
def test_measures_of_a_target(sparsity, uniform):
    model = dense_model()
    specs = discover(model)
    plan = plan_for(SETTINGS, specs)
    nominal = objective_for(specs, plan, Target(sparsity=sparsity), OBJECTIVE, uniform=uniform)
    assert (nominal.sparsity, nominal.target) == (sparsity, "uniform" if uniform else "mean")
    flops = objective_for(specs, plan, Target(sparsity=sparsity, match="linear_flops"), OBJECTIVE, uniform=uniform)
    work = layer_weights(specs[0])
    assert flops.sparsity == pytest.approx(sparsity * work.total / (work.total - work.key_value))
    assert flops.target == ("uniform" if uniform else "linear_flops")
    assert dataclasses.replace(flops, sparsity=0.5, target="mean") == OBJECTIVE


def test_a_followed_ffn_counts_as_routed_and_a_dense_one_does_not():
    specs = discover(dense_model())
    attention = Routed(grouping=Grouping.whole(32), rank=4)
    target, work = Target(sparsity=0.2, match="linear_flops"), layer_weights(specs[0])
    for ffn, prunable in ((Following(), work.query_output + work.ffn), (Dense(), work.query_output)):
        plan = Plan((LayerPlan(attention=attention, ffn=ffn),) * 2)
        assert objective_for(specs, plan, target, OBJECTIVE).sparsity == pytest.approx(0.2 * work.total / prunable)
    with pytest.raises(ConfigError, match=r"stay below 0\.2"):
        objective_for(specs, plan, Target(sparsity=0.4, match="linear_flops"), OBJECTIVE)


@pytest.mark.parametrize(("match", "uniform"), [("nominal", False), ("linear_flops", False), ("linear_flops", True)])
@pytest.mark.usefixtures("every_point")
def test_wide_meets_its_target_in_either_measure(match, uniform, tmp_path):
    model, text = dense_model(), blocks()
    settings = dataclasses.replace(SETTINGS, uniform=uniform)
    target = Target(sparsity=0.4, match=match)
    effort, _ = train(
        model, text, target, settings, stage=stage(steps=20, batch_size=16), objective=OBJECTIVE, output=tmp_path
    )
    record = attachment(model).provenance["prune"]
    assert record["inference"]["sparsity"] == pytest.approx(record["objective"]["sparsity"], abs=0.01)
    if match == "linear_flops" and not uniform:
        assert skipped_share(model, text) == pytest.approx(0.4, abs=0.02)
    assert effort.tokens_backward == 20 * 16 * 64
    # Every calibrated threshold and the threshold's check read the calibration text once.
    assert effort.tokens_forward % record["inference"]["tokens"] == 0
    # Thresholds of attention and FFN each take up to three more.
    assert 5 <= effort.tokens_forward // record["inference"]["tokens"] <= 13 + 3 * uniform
    again = load(dense_model(), tmp_path / "adapter")
    ids = text.batch([0]).input_ids
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_the_dense_teacher_counts_as_forward():
    text, target = blocks(), Target(sparsity=0.4)
    plain, taught = (
        train(dense_model(), text, target, SETTINGS, stage=stage(steps=3, batch_size=16), objective=objective)[0]
        for objective in (OBJECTIVE, ObjectiveConfig(distillation=0.5))
    )
    assert taught.tokens_backward == plain.tokens_backward == 3 * 16 * 64
    assert taught.tokens_forward >= plain.tokens_backward
    assert plain.tokens_forward % 16 == taught.tokens_forward % 16 == 0


def test_text_that_the_start_reads_counts_as_effort_of_the_run_and_of_its_continuation(tmp_path):
    settings = dataclasses.replace(
        SETTINGS, ffn_grouping="clustered", router_start="fitted", router_bias=True, start_tokens=512
    )
    run = {"stage": stage(steps=2, batch_size=16), "objective": OBJECTIVE, "output": tmp_path}
    model = dense_model()
    effort, _ = train(model, blocks(), Target(sparsity=0.4), settings, **run)
    record = attachment(model).provenance["prune"]
    assert effort.tokens_backward == 2 * 16 * 64 + 512
    assert effort.tokens_forward == record["start"]["tokens_forward"] + record["inference"]["tokens_forward"]
    assert effort.seconds_before == 0
    again, _ = train(dense_model(), blocks(), Target(sparsity=0.4), settings, **run, resume=True)
    assert (again.tokens_forward, again.tokens_backward) == (effort.tokens_forward, effort.tokens_backward)
    # The checkpoint was written a moment before the training was over.
    assert record["start"]["seconds"] < again.seconds_before < record["start"]["seconds"] + record["seconds"]


def test_a_run_of_another_target_is_not_continued(tmp_path):
    run = {"stage": stage(steps=2, batch_size=16), "objective": OBJECTIVE, "output": tmp_path}
    train(dense_model(), blocks(), Target(sparsity=0.4), SETTINGS, **run)
    with pytest.raises(ConfigError, match="resume"):
        train(dense_model(), blocks(), Target(sparsity=0.4), SETTINGS, **run)
    again, _ = train(dense_model(), blocks(), Target(sparsity=0.4), SETTINGS, **run, resume=True)
    assert again.tokens_backward == 2 * 16 * 64
    with pytest.raises(ConfigError):
        train(dense_model(), blocks(), Target(sparsity=0.3), SETTINGS, **run, resume=True)


def test_what_argmax_misses_is_said():
    model = dense_model()
    settings = dataclasses.replace(SETTINGS, calibrate_threshold=False)
    _, deviations = train(
        model, blocks(), Target(sparsity=0.9), settings, stage=stage(steps=1, batch_size=16), objective=OBJECTIVE
    )
    assert any("90.0% was wanted" in sentence for sentence in deviations)
    assert {router.threshold for router in attachment(model).routers()} == {0.0}
    _, deviations = train(
        dense_model(),
        blocks(),
        Target(sparsity=0.7),
        SETTINGS,
        stage=stage(steps=1, batch_size=16),
        objective=OBJECTIVE,
    )
    assert any("instead of argmax" in sentence for sentence in deviations)


def test_refusals_leave_the_model_alone():
    model, run = dense_model(), {"stage": stage(), "objective": OBJECTIVE}
    with pytest.raises(ConfigError, match="stay below"):
        train(model, blocks(), Target(sparsity=0.95, match="linear_flops"), SETTINGS, **run)
    assert not is_attached(model)
    attach(model, dense_plan(len(discover(model))))
    with pytest.raises((ConfigError, NotAttachedError)):
        train(model, blocks(), Target(sparsity=0.4), SETTINGS, **run)
