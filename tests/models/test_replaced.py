"""Replaced base weights: in force, off under bypass, put back by detach, kept sparse by merging."""

import copy

import pytest
import torch
from families import make, tokens
from plans import kept_plan, module_skip_plan, skipped_plan, stream_plan

from wide.errors import NotAttachedError, ShapeError, UnsupportedModelError
from wide.inference.engine.decoder import Decoder
from wide.inference.optimize import optimize
from wide.models.attach import attach, attachment, detach, is_attached
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
    with bypass(model):
        dense = logits(model, ids)
    handle.merge()
    torch.testing.assert_close(logits(model, ids), unmerged, atol=1e-5, rtol=1e-5)
    if kind == "weights":
        # The originals have no LoRA, and the other weights do.
        with pytest.raises(NotAttachedError, match="compare_dense=False"), bypass(model):
            pass
        return
    with bypass(model):
        torch.testing.assert_close(logits(model, ids), dense, atol=1e-5, rtol=1e-5)


def test_operators_and_runtime_refuse_what_they_do_not_know():
    model = make("llama")
    attach(model, **_plans(model)["mlp"])
    with pytest.raises(UnsupportedModelError, match="masked"):
        optimize(model, backend="torch")
    assert attachment(model).engine is None
    with pytest.raises(UnsupportedModelError, match="masked"):
        Decoder(model, max_length=32)


def test_the_engine_refuses_routers_of_the_layer_input():
    model = make("llama")
    attach(model, module_skip_plan(model, router_input="layer_input"))
    with pytest.raises(UnsupportedModelError, match="layer's input"):
        Decoder(model, max_length=32)
