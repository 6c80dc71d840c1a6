"""Layers that attend to the keys and values of an earlier layer (Gemma 4), and values that are keys."""

import pytest
import torch
from families import make, make_borrowing, tokens

from wide.errors import UnsupportedModelError
from wide.grouping import Grouping
from wide.materialisation.materialise import materialise
from wide.methods.block_gates import BlockGates
from wide.methods.layer_runner import LayerRunner
from wide.models.attach import attach
from wide.models.cost import costs
from wide.models.discovery import discover
from wide.plan import Dense, Kept, LayerPlan, Plan, Routed, Skipped

DENSE = LayerPlan(attention=Dense(), ffn=Dense())
GROUPING = Grouping(32, 8)


def plan_of(attention, layer):
    layers = [DENSE] * 4
    layers[layer] = LayerPlan(attention=attention, ffn=Dense())
    return Plan(tuple(layers))


def heads(kept, layer):
    scale = torch.tensor([1.0] * kept + [0.0] * (4 - kept))
    return {
        "config_or_plan": plan_of(Kept(grouping=GROUPING, kept=kept), layer),
        "tensors": {f"layers.{layer}.attention.scale": scale},
    }


@torch.no_grad()
def logits(model):
    return model(input_ids=tokens()).logits


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("kept", [1, 3])
def test_heads_are_masked_and_not_cut(layer, kept):
    model = attach(make_borrowing(), **heads(kept, layer))
    wanted = logits(model)
    with pytest.raises(UnsupportedModelError, match=r"layer 2 attends to .* earlier layer.*masked"):
        materialise(model)
    assert torch.equal(logits(model), wanted)
    torch.testing.assert_close(logits(materialise(model, "masked")), wanted)


def test_keys_that_others_borrow_are_not_evicted():
    routed = Routed(grouping=Grouping.whole(32), rank=4, evicts=True)
    with pytest.raises(UnsupportedModelError, match=r"earlier layer.*evicts"):
        attach(make_borrowing(), plan_of(routed, 0))


def test_layers_that_others_borrow_from_are_not_left_out_one_by_one():
    with pytest.raises(UnsupportedModelError, match="earlier layer"):
        BlockGates(make_borrowing(), tokens(), 2)


def test_every_micro_batch_borrows_its_own_keys():
    model, ids = make_borrowing(), tokens(5, 13)
    runner = LayerRunner(model, discover(model), ids, batch_size=2)
    for index in range(4):
        runner.advance(index)
    with torch.no_grad():
        wanted = model.model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(model.model.norm(torch.cat(runner.inputs)), wanted)


def test_what_is_borrowed_costs_nothing():
    model = make_borrowing()
    specs = discover(model)
    found = costs(specs, Plan((DENSE,) * 4), 97)
    assert [layer.key_value > 0 for layer in found.layers] == [True, True, False, False]
    assert [layer.kv_heads for layer in found.layers] == [2, 2, 0, 0]


def test_values_that_are_keys_cost_no_product_of_their_own():
    widths = [
        costs(discover(make_borrowing(num_kv_shared_layers=0, attention_k_eq_v=same)), Plan((DENSE,) * 4), 97)
        for same in (False, True)
    ]
    apart, same = ([layer.key_value for layer in found.layers] for found in widths)
    assert same == [apart[0], apart[1] / 2, apart[2], apart[3] / 2]


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_values_that_are_keys_are_cut_with_them(layer, kept):
    model = make_borrowing(num_kv_shared_layers=0, attention_k_eq_v=True)
    assert model.model.layers[1].self_attn.v_proj is None
    model = attach(model, **heads(kept, layer))
    wanted = logits(model)
    torch.testing.assert_close(logits(materialise(model)), wanted)


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_a_layer_that_reads_more_than_the_stream_cannot_be_skipped(family):
    more = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
    model = make(family, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, **more)
    with pytest.raises(UnsupportedModelError, match="reads more than one stream"):
        attach(model, plan_of(Skipped(), 0))
