"""Masked routing equals an explicit reference on every family, with LoRA, compiled, checkpointed and cached."""

from contextlib import contextmanager

import pytest
import torch
from families import ALTERNATING, FAMILIES, STRAIGHT, alternating, distinct, make, tokens

from wide.config import WideConfig
from wide.models.attach import attach, attachment, detach
from wide.models.gates import gate_groups, gate_heads
from wide.models.lora import add_lora
from wide.models.observe import bypass, capture_routing, force_routing
from wide.routing import LayerRouting
from wide.training.token_loss import OutputHead

CONFIG = WideConfig(ffn_group_size=16, router_rank=4)
# Float32 sums in another order; everything else is exact.
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


@contextmanager
def decisions_over(model):
    """Yield the masks of all forwards inside the block, one behind the other, as `force_routing` takes them."""
    found = [LayerRouting() for _ in attachment(model).specs]

    def join(*_):
        for every, latest in zip(found, routing, strict=True):
            for half in ("attention", "ffn"):
                earlier, mask = getattr(every, half), getattr(latest, half)
                setattr(every, half, mask if earlier is None else torch.cat([earlier, mask], dim=1))

    with capture_routing(model) as routing, model.register_forward_hook(join):
        yield found


def explicit_reference(model, ids, routing):
    """Mask the inputs of the output and down projections of the dense model by hand."""
    handles = []
    for spec, layer in zip(attachment(model).specs, routing, strict=True):

        def mask_heads(_module, args, spec=spec, layer=layer):
            heads = args[0].unflatten(-1, (spec.attention.num_query_heads, spec.attention.head_dim))
            return (gate_heads(heads, layer.attention).flatten(-2), *args[1:])

        def mask_channels(_module, args, layer=layer):
            return (gate_groups(args[0], layer.ffn), *args[1:])

        handles.append(spec.attention.output.register_forward_pre_hook(mask_heads))
        handles.append(spec.ffn.down.register_forward_pre_hook(mask_channels))
    with bypass(model), torch.no_grad():
        logits = model(ids).logits
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_routing_equals_the_explicit_reference_and_detach_leaves_no_trace(family):
    model, ids = make(family), tokens()
    names = list(model.state_dict())
    with torch.no_grad():
        dense = model(ids).logits
        attach(model, CONFIG)
        with bypass(model):
            assert torch.equal(model(ids).logits, dense)
        with capture_routing(model) as routing:
            logits = model(ids).logits
    rates = torch.cat([m.float().flatten() for layer in routing for m in (layer.attention, layer.ffn)])
    assert 0.1 < rates.mean() < 0.9
    assert not torch.allclose(logits, dense, atol=1e-4)
    torch.testing.assert_close(logits, explicit_reference(model, ids, routing), **CLOSE)
    for layer in routing:
        layer.attention, layer.ffn = torch.ones_like(layer.attention), torch.ones_like(layer.ffn)
    with torch.no_grad(), force_routing(model, routing):
        assert torch.equal(model(ids).logits, dense)
    detach(model)
    assert list(model.state_dict()) == names
    assert torch.equal(model(ids).logits, dense)


@pytest.mark.parametrize("family", distinct(FAMILIES))
def test_lora_merged_and_unmerged_give_the_same_logits(family):
    model, ids = attach(make(family), CONFIG), tokens()
    handle = add_lora(model, rank=2, alpha=4.0, dropout=0.1)
    for parameter in handle.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.eval()
    with torch.no_grad(), capture_routing(model) as routing:
        unmerged = model(ids).logits
    with torch.no_grad(), bypass(model):
        assert not torch.allclose(model(ids).logits, unmerged, atol=1e-4)
    handle.merge()
    with torch.no_grad(), force_routing(model, routing):
        torch.testing.assert_close(model(ids).logits, unmerged, atol=1e-4, rtol=1e-3)


# One of each shape of layers, attention and FFN; the rest takes two seconds each. `test_threads.py` traces Llama.
TRACED = ("gemma2", "phi3", "cohere2", "apertus")


@pytest.mark.parametrize("family", [f if f in TRACED else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_the_routed_forward_compiles_as_one_graph(family):
    # One layer of each kind, which Gemma alone shows in short: tracing takes seconds.
    kinds = 2 if family in ALTERNATING and family != "cohere2" else 1
    model, ids = attach(make(family, num_hidden_layers=kinds), CONFIG), tokens()
    with torch.no_grad():
        with capture_routing(model) as routing:
            eager = model(ids).logits
        torch._dynamo.reset()
        # Forced masks: a near tie may fall the other way when sums are reordered.
        with force_routing(model, routing):
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            torch.testing.assert_close(compiled(ids).logits, eager, **CLOSE)


@pytest.mark.parametrize("family", distinct(FAMILIES))
def test_gradient_checkpointing_gives_the_same_router_gradients(family):
    model, ids = attach(make(family), CONFIG), tokens()
    model.train()

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for router in attachment(model).routers() for p in router.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for expected, found in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    assert all(g.abs().sum() > 0 for g in plain)


@pytest.mark.parametrize("family", distinct(FAMILIES))
def test_the_loss_needs_no_full_logits(family):
    model, ids = make(family, **STRAIGHT.get(family, {})).requires_grad_(False), tokens()
    head = OutputHead(model)
    with torch.no_grad():
        logits = model(ids).logits
        states, apart = head.states(model, input_ids=ids)
    assert apart is head
    assert apart.width == logits.shape[-1]
    torch.testing.assert_close(apart(states), logits, **CLOSE)
    assert "forward" not in model.get_output_embeddings().__dict__


@pytest.mark.parametrize(("family", "cache"), alternating(FAMILIES, ["dynamic", "static"]))
def test_cached_generation_equals_the_full_forward_under_the_same_decisions(family, cache):
    model, ids = attach(make(family), CONFIG), tokens(batch=2, length=6)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with decisions_over(model) as routing:
        out = model.generate(ids, cache_implementation=cache, eos_token_id=None, **options)
    assert out.sequences.shape == (2, 12)
    with torch.no_grad(), force_routing(model, routing):
        full = model(out.sequences[:, :-1], use_cache=False).logits
    torch.testing.assert_close(full[:, 5:], torch.stack(out.logits, dim=1).float(), atol=1e-4, rtol=1e-3)
