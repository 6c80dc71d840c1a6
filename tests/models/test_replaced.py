"""Replaced base weights: in force, off under bypass, put back by detach, kept sparse by merging."""

import copy

import pytest
import torch
from families import make, tokens
from plans import kept_plan, module_skip_plan, skipped_plan, stream_plan

from wide.errors import ShapeError, UnsupportedModelError
from wide.inference.engine.decoder import Decoder
from wide.inference.optimize import optimize
from wide.models.attach import attach, attachment, detach, is_attached
from wide.models.discovery import discover
from wide.models.lora import add_lora
from wide.models.observe import bypass
from wide.plan import Dense, LayerPlan, Plan

NAME = "model.layers.0.mlp.down_proj.weight"


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def dense_plan(layers=2):
    return Plan((LayerPlan(attention=Dense(), ffn=Dense()),) * layers)


def sparse_weights(model):
    """Return half-zero values for all projections of the decoder, other zeros in each."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: parameter.detach() * (torch.rand(parameter.shape, generator=generator) < 0.5)
        for name, parameter in model.named_parameters()
        if "_proj" in name
    }


def test_weights_are_in_force_off_under_bypass_and_put_back():
    model, ids = make("llama"), tokens()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dense = logits(model, ids)
    weights = sparse_weights(model)
    attach(model, dense_plan(), weights=weights)
    sparse = logits(model, ids)
    hand = make("llama")
    hand.load_state_dict(before | weights)
    assert torch.equal(sparse, logits(hand, ids))
    with bypass(model):
        with bypass(model):
            assert torch.equal(logits(model, ids), dense)
        assert torch.equal(logits(model, ids), dense)
    assert torch.equal(logits(model, ids), sparse)
    with pytest.raises(RuntimeError, match="stop"), bypass(model):
        raise RuntimeError("stop")
    assert torch.equal(logits(model, ids), sparse)
    with bypass(model):
        detach(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_was_given_is_copied_and_a_copied_model_has_its_own():
    model, ids = make("llama"), tokens()
    weights = {NAME: torch.zeros(32, 64)}
    attach(model, dense_plan(), weights=weights)
    found = logits(model, ids)
    weights[NAME].fill_(7.0)
    assert torch.equal(logits(model, ids), found)
    twin = copy.deepcopy(model)
    detach(twin)
    assert torch.equal(logits(model, ids), found)
    assert not torch.equal(logits(twin, ids), found)


def test_originals_follow_the_model_to_another_dtype():
    model, ids = make("llama"), tokens()
    wanted = logits(copy.deepcopy(model).double(), ids)
    attach(model, dense_plan(), weights={NAME: torch.zeros(32, 64, dtype=torch.bfloat16)})
    model.double()
    with bypass(model):
        assert torch.equal(logits(model, ids), wanted)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"model.layers.9.mlp.down_proj.weight": torch.zeros(32, 64)}, "no parameter of this model"),
        ({NAME: torch.zeros(64, 32)}, r"shape \(64, 32\), the model needs \(32, 64\)"),
        ({NAME: torch.full((32, 64), float("inf"))}, "not finite"),
        ({NAME: torch.zeros(32, 64, dtype=torch.int8)}, "floating-point"),
        ({"lm_head.weight": torch.zeros(97, 32)}, "tied to model.embed_tokens.weight"),
        ({"lm_head.weight": torch.zeros(97, 32), "model.embed_tokens.weight": torch.ones(97, 32)}, "same values"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, reason):
    model, ids = make("llama", tie_word_embeddings=True), tokens()
    dense = logits(model, ids)
    with pytest.raises(ShapeError, match=reason):
        attach(model, dense_plan(), weights=weights)
    assert not is_attached(model)
    assert torch.equal(logits(model, ids), dense)


def test_tied_weights_are_replaced_together():
    model, ids = make("llama", tie_word_embeddings=True), tokens()
    dense = logits(model, ids)
    values = torch.randn(97, 32)
    attach(model, dense_plan(), weights={"lm_head.weight": values, "model.embed_tokens.weight": values})
    assert not torch.equal(logits(model, ids), dense)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    detach(model)
    assert torch.equal(logits(model, ids), dense)


def test_lora_without_updates_changes_nothing_and_merging_keeps_zeros():
    model, ids = make("llama"), tokens()
    weights = sparse_weights(model)
    attach(model, dense_plan(), weights=weights)
    sparse = logits(model, ids)
    handle = add_lora(model, rank=2, alpha=4.0, dropout=0.0)
    assert torch.equal(logits(model, ids), sparse)
    for parameter in handle.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    updated = logits(model, ids)
    assert not torch.allclose(updated, sparse, atol=1e-3)
    handle.merge()
    torch.testing.assert_close(logits(model, ids), updated, atol=1e-5, rtol=1e-5)
    state = model.state_dict()
    for name, value in weights.items():
        assert torch.equal(state[name] == 0, value == 0), name
        assert not torch.equal(state[name], value)


def _random_lora(model, std=0.1):
    handle = add_lora(model, rank=2, alpha=4.0, dropout=0.0)
    torch.manual_seed(2)
    for parameter in handle.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return handle


def _layers_with_lora(model):
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_variant")}


def test_lora_updates_no_zero_in_forward_and_gradient():
    model = make("llama")
    attach(model, dense_plan(), weights=sparse_weights(model))
    _random_lora(model)
    for layer in _layers_with_lora(model).values():
        base = layer.get_base_layer()
        weight, places = base.weight, base.weight == 0
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        x = torch.randn(5, weight.shape[1], requires_grad=True)
        out = layer(x)
        wanted = weight + 2.0 * (b @ a) * ~places
        torch.testing.assert_close(out, x @ wanted.T, atol=1e-5, rtol=1e-5)
        # What each entry of an unmasked update would get as gradient, and what of it may reach A and B.
        back = torch.randn_like(out)
        of_a, of_b, of_x = torch.autograd.grad(out, (a, b, x), back)
        of_update = 2.0 * (back.T @ x.detach()) * ~places
        torch.testing.assert_close(of_a, b.T @ of_update, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(of_b, of_update @ a.T, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(of_x, back @ wanted, atol=1e-4, rtol=1e-4)


def test_dropout_of_lora_stays_on_its_input():
    model = make("llama")
    attach(model, dense_plan(), weights=sparse_weights(model))
    handle = add_lora(model, rank=2, alpha=4.0, dropout=0.5)
    for parameter in handle.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    layer = next(iter(_layers_with_lora(model).values())).train()
    weight, x = layer.get_base_layer().weight, torch.randn(5, layer.in_features)
    torch.manual_seed(7)
    found = layer(x)
    torch.manual_seed(7)
    kept = torch.nn.functional.dropout(x, 0.5)
    update = layer.get_delta_weight("default") * (weight != 0)
    torch.testing.assert_close(found, x @ weight.T + kept @ update.T, atol=1e-5, rtol=1e-5)


def test_lora_is_as_it_was_where_whole_units_are_pruned():
    model, ids = make("llama"), tokens()
    plan, scales = kept_plan(model)
    weights = {}
    for spec in discover(model):
        for half, linear in (("attention", spec.attention.output), ("ffn", spec.ffn.down)):
            scale = scales[f"layers.{spec.index}.{half}.scale"]
            kept = scale.repeat_interleave(linear.in_features // len(scale)) != 0
            name = "self_attn.o_proj" if half == "attention" else "mlp.down_proj"
            weights[f"model.layers.{spec.index}.{name}.weight"] = linear.weight.detach() * kept
    attach(model, plan, tensors=scales, weights=weights)
    _random_lora(model)
    assert not any(layer.lora_variant for layer in _layers_with_lora(model).values())
    unmerged = logits(model, ids)
    attachment(model).lora.merge()
    torch.testing.assert_close(logits(model, ids), unmerged, atol=1e-5, rtol=1e-5)
    # One zero more, that no scale explains, is a weight like any other: to the layer and to the merge.
    other = make("llama")
    column = int((scales["layers.0.ffn.scale"] != 0).nonzero()[0])
    weights[NAME][0, column] = 0.0
    attach(other, plan, tensors=scales, weights=weights)
    _random_lora(other)
    assert not any(layer.lora_variant for layer in _layers_with_lora(other).values())
    unmerged = logits(other, ids)
    attachment(other).lora.merge()
    torch.testing.assert_close(logits(other, ids), unmerged, atol=1e-5, rtol=1e-5)
    assert other.state_dict()[NAME][0, column] != 0
    assert not other.state_dict()[NAME][:, scales["layers.0.ffn.scale"] == 0].any()
    # Many are no chance: single weights of kept units are pruned, too.
    both = make("llama")
    weights[NAME][::2, column] = 0.0
    attach(both, plan, tensors=scales, weights=weights)
    _random_lora(both)
    masked = [name for name, layer in _layers_with_lora(both).items() if layer.lora_variant]
    assert masked == [NAME.removesuffix(".weight")]
    attachment(both).lora.merge()
    assert not both.state_dict()[NAME][::2, column].any()


def test_zeros_that_a_base_pruned_before_had_stay_zeros():
    model, ids = make("llama"), tokens()
    base = dict(model.named_parameters())
    with torch.no_grad():
        base[NAME][3, ::2] = 0.0
    attach(model, dense_plan(), weights={NAME: base[NAME].detach() * 2.0})
    _random_lora(model)
    masked = [name for name, layer in _layers_with_lora(model).items() if layer.lora_variant]
    assert masked == [NAME.removesuffix(".weight")]
    unmerged = logits(model, ids)
    attachment(model).lora.merge()
    torch.testing.assert_close(logits(model, ids), unmerged, atol=1e-5, rtol=1e-5)
    assert not model.state_dict()[NAME][3, ::2].any()


def test_masked_updates_are_part_of_one_compiled_graph():
    model, ids = make("llama"), tokens()
    attach(model, dense_plan(), weights=sparse_weights(model))
    _random_lora(model)
    wanted = logits(model, ids)
    with torch.no_grad():
        found = torch.compile(model, backend="eager", fullgraph=True)(ids).logits
    torch.testing.assert_close(found, wanted)


def _plans(model):
    kept, scales = kept_plan(model)
    stream, bases = stream_plan(model, 24)
    return {
        "kept": {"config_or_plan": kept, "tensors": scales},
        "skipped": {"config_or_plan": skipped_plan(model, {(0, "ffn")})},
        "stream": {"config_or_plan": stream, "tensors": bases},
        "weights": {"config_or_plan": dense_plan(), "weights": {NAME: torch.zeros(32, 64)}},
        "mlp": {"config_or_plan": module_skip_plan(model, form="mlp")},
    }


@pytest.mark.parametrize("kind", ["kept", "skipped", "stream", "weights", "mlp"])
def test_fresh_lora_changes_nothing_and_merged_lora_what_unmerged_did(kind):
    model, ids = make("llama"), tokens()
    attach(model, **_plans(model)[kind])
    pruned = logits(model, ids)
    handle = add_lora(model, rank=2, alpha=4.0, dropout=0.0)
    assert torch.equal(logits(model, ids), pruned)
    for parameter in handle.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    unmerged = logits(model, ids)
    handle.merge()
    torch.testing.assert_close(logits(model, ids), unmerged, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["kept", "skipped", "stream", "weights", "mlp"])
def test_operators_and_runtime_refuse_what_they_do_not_know(kind):
    model = make("llama")
    attach(model, **_plans(model)[kind])
    with pytest.raises(UnsupportedModelError, match=r"masked|materialise"):
        optimize(model, backend="torch")
    assert attachment(model).engine is None
    with pytest.raises(UnsupportedModelError, match=r"masked|materialise"):
        Decoder(model, max_length=32)


def test_the_engine_refuses_routers_of_the_layer_input():
    model = make("llama")
    attach(model, module_skip_plan(model, router_input="layer_input"))
    with pytest.raises(UnsupportedModelError, match="layer's input"):
        Decoder(model, max_length=32)
