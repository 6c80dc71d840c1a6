"""Plans as data: round trips, the tensors that belong to them, and refusals."""

import json

import pytest

from wide.errors import AdapterError, ConfigError
from wide.grouping import Grouping
from wide.plan import Dense, Following, Kept, LayerPlan, Plan, Routed, Skipped, Stream

HEADS, CHANNELS = Grouping(32, 8), Grouping(48, 1)
ROUTED = Routed(grouping=Grouping.whole(32), rank=4, form="dllm", router_input="layer_input", bias=True)
LAYERS = (
    LayerPlan(attention=ROUTED, ffn=Following()),
    LayerPlan(attention=Kept(grouping=HEADS, kept=3), ffn=Skipped()),
    LayerPlan(attention=Dense(), ffn=Kept(grouping=CHANNELS, kept=0)),
)


@pytest.mark.parametrize("stream", [None, Stream(width=24, kept=7)])
def test_plans_survive_json(stream):
    plan = Plan(LAYERS, stream)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_names_its_tensors():
    assert Plan(LAYERS).tensor_shapes() == {"layers.1.attention.scale": (4,), "layers.2.ffn.scale": (48,)}
    stream = Plan((LayerPlan(attention=Dense(), ffn=Dense()),) * 2, Stream(width=24, kept=7))
    assert stream.tensor_shapes() == dict.fromkeys(
        ["stream.embedding", "layers.0.attention.basis", "layers.0.ffn.basis", "layers.1.attention.basis"], (24, 7)
    )


@pytest.mark.parametrize(
    ("plan", "is_routed", "is_static"),
    [
        (Plan(LAYERS), True, True),
        (Plan(LAYERS[:1]), True, False),
        (Plan(LAYERS[1:]), False, True),
        (Plan((LayerPlan(attention=Dense(), ffn=Dense()),)), False, False),
        (Plan((LayerPlan(attention=Dense(), ffn=Dense()),), Stream(width=8, kept=8)), False, True),
    ],
)
def test_a_plan_says_what_is_in_it(plan, is_routed, is_static):
    assert (plan.is_routed, plan.is_static) == (is_routed, is_static)


@pytest.mark.parametrize("options", [{"form": "deep"}, {"router_input": "embedding"}])
def test_words_that_no_router_knows_are_refused(options):
    with pytest.raises(ConfigError, match=r"must be .* or .*, got"):
        Routed(grouping=CHANNELS, rank=2, **options)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("stream"),
        lambda data: data.update(width=3),
        lambda data: data.update(stream=[1]),
        lambda data: data.update(stream={"width": 24}),
        lambda data: data["layers"][0].pop("ffn"),
        lambda data: data["layers"][1]["attention"].pop("kept"),
        lambda data: data["layers"][1]["attention"]["grouping"].update(group_size=5),
        lambda data: data["layers"][1]["ffn"].update(kind="gone"),
        lambda data: data["layers"][0]["attention"].update(form="deep"),
    ],
)
def test_damaged_plans_are_refused(damage):
    data = Plan(LAYERS, Stream(width=24, kept=7)).to_json()
    damage(data)
    with pytest.raises(AdapterError):
        Plan.from_json(data)
