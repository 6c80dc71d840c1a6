"""Fused execution gives the masked model's outputs on every family, in prefill, decoding and generate()."""

import pytest
import torch
from families import FAMILIES, make, tokens
from tables import fixed

from wide.config import WideConfig
from wide.errors import ConfigError, NotAttachedError, UnsupportedModelError
from wide.inference.operators.table import DENSE_TABLE
from wide.inference.optimize import deoptimize, optimize
from wide.models.attach import attach, attachment, detach
from wide.models.gates import gate_of
from wide.models.lora import add_lora
from wide.models.observe import bypass, capture_routing, force_routing

CONFIG = WideConfig(ffn_group_size=16)
# Small enough that twelve tokens take the gathered operators and six the dense product.
SMALL = fixed("torch", query=16, attention=4, output=16, gate_up=16, down=16)
WITHOUT_KERNEL = {"apertus"}


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in WITHOUT_KERNEL])
def test_fused_layers_give_the_masked_outputs(family):
    model, ids = attach(make(family), CONFIG), tokens(2, 12)
    with torch.no_grad(), capture_routing(model) as routing:
        masked = model(ids).logits
    with torch.no_grad(), bypass(model):
        dense = model(ids).logits
    with capture_routing(model, history=True) as steps:
        generated = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    optimize(model, table=SMALL)
    with torch.no_grad(), force_routing(model, routing):
        torch.testing.assert_close(model(ids).logits, masked, atol=1e-5, rtol=1e-4)
    with torch.no_grad(), bypass(model):
        # LayerNorms are the library's, which rounds elsewhere.
        allowed = {"atol": 1e-6, "rtol": 0.0} if family == "cohere2" else {"atol": 0.0, "rtol": 0.0}
        torch.testing.assert_close(model(ids).logits, dense, **allowed)
    for cache in ("dynamic", "static"):
        with force_routing(model, steps):
            found = model.generate(
                ids, max_new_tokens=4, do_sample=False, eos_token_id=None, cache_implementation=cache
            )
        assert torch.equal(found, generated)
    deoptimize(model)
    with torch.no_grad(), force_routing(model, routing):
        assert torch.equal(model(ids).logits, masked)
    detach(model)


def test_left_padding_and_chunked_prefill():
    model, ids = attach(make("llama"), CONFIG), tokens(1, 12)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids[:, :8]], dim=1)
    valid = torch.cat([torch.zeros(1, 4), torch.ones(1, 8)], dim=1).long()
    positions = (valid.cumsum(-1) - 1).clamp(min=0)
    inputs = {
        "input_ids": torch.cat([ids, padded]),
        "attention_mask": torch.cat([torch.ones(1, 12, dtype=torch.long), valid]),
        "position_ids": torch.cat([torch.arange(12)[None], positions]),
    }
    with torch.no_grad(), capture_routing(model) as routing:
        masked = model(**inputs).logits
    optimize(model, table=SMALL)
    with torch.no_grad(), force_routing(model, routing):
        fused = model(**inputs).logits
    torch.testing.assert_close(fused[0], masked[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fused[1, 4:], masked[1, 4:], atol=1e-5, rtol=1e-4)
    with torch.no_grad(), force_routing(model, routing):
        first = model(ids.expand(2, -1)[:, :5], use_cache=True)
        second = model(ids.expand(2, -1)[:, 5:], past_key_values=first.past_key_values)
    whole = torch.cat([first.logits, second.logits], dim=1)
    torch.testing.assert_close(whole[0], masked[0], atol=1e-5, rtol=1e-4)


def test_the_fused_forward_compiles_as_one_graph():
    model, ids = attach(make("llama"), CONFIG), tokens(2, 12)
    with torch.no_grad(), capture_routing(model) as routing:
        masked = model(ids).logits
    optimize(model, table=SMALL)
    torch._dynamo.reset()
    with torch.no_grad(), force_routing(model, routing):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids).logits, masked, atol=1e-5, rtol=1e-4)


def test_what_cannot_run_fused_is_refused_and_left_as_it_was():
    model = attach(make("apertus"), CONFIG)
    with pytest.raises(UnsupportedModelError, match="has no fused kernel"):
        optimize(model, table=SMALL)
    assert not attachment(model).fused

    model = attach(make("llama"), CONFIG)
    with pytest.raises(NotAttachedError, match="not optimised"):
        deoptimize(model)
    model.train()
    with pytest.raises(NotAttachedError, match=r"model\.eval"):
        optimize(model, table=SMALL)
    add_lora(model.eval(), rank=2)
    with pytest.raises(NotAttachedError, match="merge LoRA"):
        optimize(model, table=SMALL)

    model = attach(make("llama"), CONFIG)
    model.model.layers[1].mlp.forward = lambda x: (
        2 * type(model.model.layers[1].mlp).forward(model.model.layers[1].mlp, x)
    )
    with pytest.raises(UnsupportedModelError, match="does not compute down"):
        optimize(model, table=SMALL)


def test_an_optimised_model_must_be_restored_before_detaching():
    model = optimize(attach(make("llama"), CONFIG), table=SMALL)
    with pytest.raises(NotAttachedError, match="deoptimize"):
        detach(model)
    with pytest.raises(NotAttachedError, match="optimised already"):
        optimize(model, table=SMALL)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_auto_where_nothing_is_measured_runs_dense_and_gives_the_masked_outputs(family):
    model, ids = attach(make(family), CONFIG), tokens(2, 12)
    with torch.no_grad(), capture_routing(model) as routing:
        masked = model(ids).logits
    optimize(model)
    assert model_table(model) == DENSE_TABLE
    with torch.no_grad(), force_routing(model, routing):
        torch.testing.assert_close(model(ids).logits, masked, atol=1e-5, rtol=1e-4)
    with pytest.raises(ConfigError, match="unknown backend 'cuda'"):
        optimize(deoptimize(model), backend="cuda")


def model_table(model):
    return gate_of(attachment(model).specs[0].attention.module).executor.table


def test_gate_and_up_lie_together_while_optimised_and_apart_afterwards():
    model = attach(make("llama"), CONFIG)
    mlp = model.model.layers[0].mlp
    before = mlp.gate_proj.weight.clone(), mlp.up_proj.weight.clone()
    optimize(model, table=SMALL)
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert up.data_ptr() == gate.data_ptr() + gate.nbytes
    deoptimize(model)
    storages = {w.untyped_storage().data_ptr() for w in (mlp.gate_proj.weight, mlp.up_proj.weight)}
    assert len(storages) == 2
    assert torch.equal(mlp.gate_proj.weight, before[0])
    assert torch.equal(mlp.up_proj.weight, before[1])


def test_a_forward_of_the_callers_own_comes_back():
    model = attach(make("llama"), CONFIG)
    mlp = model.model.layers[0].mlp
    mine = mlp.forward = lambda x: type(mlp).forward(mlp, x)
    deoptimize(optimize(model, table=SMALL))
    assert mlp.forward is mine
    assert "forward" not in vars(model.model.layers[1].mlp)
