"""Fused execution gives the masked model's outputs on every family, in prefill, decoding and generate()."""

import pytest
import torch
from families import FAMILIES, make, tokens

from wide.config import WideConfig
from wide.errors import NotAttachedError, UnsupportedModelError
from wide.models.attach import attach, attachment, detach
from wide.models.fused import Execution
from wide.models.lora import add_lora
from wide.models.observe import bypass, capture_routing, force_routing
from wide.models.optimize import deoptimize, optimize

CONFIG = WideConfig(ffn_group_size=16)
# Small enough that twelve tokens take the gathered operators and six the dense product.
SMALL = Execution(backend="torch", min_rows=16, min_queries=4)
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
    optimize(model, execution=SMALL)
    with torch.no_grad(), force_routing(model, routing):
        torch.testing.assert_close(model(ids).logits, masked, atol=1e-5, rtol=1e-4)
    with torch.no_grad(), bypass(model):
        assert torch.equal(model(ids).logits, dense)
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
    optimize(model, execution=SMALL)
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
    optimize(model, execution=SMALL)
    torch._dynamo.reset()
    with torch.no_grad(), force_routing(model, routing):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids).logits, masked, atol=1e-5, rtol=1e-4)


def test_what_cannot_run_fused_is_refused_and_left_as_it_was():
    model = attach(make("apertus"), CONFIG)
    with pytest.raises(UnsupportedModelError, match="has no fused kernel"):
        optimize(model, execution=SMALL)
    assert not attachment(model).fused

    model = attach(make("llama"), CONFIG)
    with pytest.raises(NotAttachedError, match="not optimised"):
        deoptimize(model)
    model.train()
    with pytest.raises(NotAttachedError, match=r"model\.eval"):
        optimize(model, execution=SMALL)
    add_lora(model.eval(), rank=2)
    with pytest.raises(NotAttachedError, match="merge LoRA"):
        optimize(model, execution=SMALL)

    model = attach(make("llama"), CONFIG)
    model.model.layers[1].mlp.forward = lambda x: (
        2 * type(model.model.layers[1].mlp).forward(model.model.layers[1].mlp, x)
    )
    with pytest.raises(UnsupportedModelError, match="does not compute down"):
        optimize(model, execution=SMALL)


def test_an_optimised_model_must_be_restored_before_detaching():
    model = optimize(attach(make("llama"), CONFIG), execution=SMALL)
    with pytest.raises(NotAttachedError, match="deoptimize"):
        detach(model)
    with pytest.raises(NotAttachedError, match="optimised already"):
        optimize(model, execution=SMALL)
