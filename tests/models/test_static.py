"""Static plans: kept units, skipped halves, projected streams, FFNs that follow; on every family, masked and exact."""

import copy
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, distinct, make, tokens
from plans import kept_plan, layer_skip_plan, module_skip_plan, skipped_plan, stream_plan
from torch.nn import functional

from wide.errors import ShapeError, UnsupportedModelError
from wide.grouping import Grouping
from wide.models.attach import attach, attachment, detach, is_attached
from wide.models.discovery import discover
from wide.models.gates import PENDING_NAME, gate_groups, gate_heads
from wide.models.observe import bypass, capture_routing, force_routing
from wide.plan import Dense, Following, Kept, LayerPlan, Plan, Routed, Skipped, Stream

CLOSE = {"atol": 2e-5, "rtol": 1e-4}
# Families whose stream is not simply x + attention + FFN.
NO_PLAIN_STREAM = ("gemma2", "gemma3_text", "olmo2", "olmo3", "glm4", "exaone4", "granite", "cohere2")


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


@pytest.mark.parametrize("family", distinct(FAMILIES))
def test_a_layer_with_both_halves_skipped_is_no_layer_at_all(family):
    model, ids = make(family), tokens()
    names, dense = list(model.state_dict()), logits(model, ids)
    attach(model, skipped_plan(model, {(0, "attention"), (0, "ffn")}))
    skipped = logits(model, ids)
    with bypass(model):
        assert torch.equal(logits(model, ids), dense)
    layer = attachment(model).specs[0].layer
    detach(model)
    assert list(model.state_dict()) == names
    assert torch.equal(logits(model, ids), dense)
    layer.forward = lambda hidden_states, *_, **__: hidden_states
    assert torch.equal(skipped, logits(model, ids))
    assert not torch.equal(skipped, dense)


@pytest.mark.parametrize("half", ["attention", "ffn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_skipped_half_adds_nothing_to_the_stream(family, half):
    model, ids = make(family), tokens()
    attach(model, skipped_plan(model, {(1, half)}))
    skipped = logits(model, ids)
    module = getattr(attachment(model).specs[1], half).module
    detach(model)
    zeros = torch.zeros(2, 12, 32)
    module.forward = lambda *_, **__: (zeros, None) if half == "attention" else zeros
    assert torch.equal(skipped, logits(model, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_units_equal_masking_by_hand_and_detach_leaves_no_trace(family):
    model, ids = make(family), tokens()
    names, dense = list(model.state_dict()), logits(model, ids)
    plan, tensors = kept_plan(model)
    attach(model, plan, tensors=tensors)
    found = logits(model, ids)
    with bypass(model):
        assert torch.equal(logits(model, ids), dense)
    specs = attachment(model).specs
    detach(model)
    assert list(model.state_dict()) == names
    assert torch.equal(logits(model, ids), dense)
    for spec in specs:

        def mask_heads(_module, args, spec=spec):
            heads = args[0].unflatten(-1, (spec.attention.num_query_heads, -1))
            return (gate_heads(heads, tensors[f"layers.{spec.index}.attention.scale"]).flatten(-2),)

        def mask_channels(_module, args, spec=spec):
            return (gate_groups(args[0], tensors[f"layers.{spec.index}.ffn.scale"]),)

        spec.attention.output.register_forward_pre_hook(mask_heads)
        spec.ffn.down.register_forward_pre_hook(mask_channels)
    torch.testing.assert_close(found, logits(model, ids), **CLOSE)
    assert not torch.allclose(found, dense, atol=1e-4)


def test_scales_of_one_leave_the_model_as_it_is():
    model, ids = make("llama"), tokens()
    dense = logits(model, ids)
    plan, tensors = kept_plan(model, heads=4, channels=64)
    attach(model, plan, tensors={name: torch.ones_like(value) for name, value in tensors.items()})
    assert torch.equal(logits(model, ids), dense)


def test_units_may_be_several_heads_or_channels_and_a_half_may_keep_none():
    model, ids = make("llama"), tokens()
    layers = (
        LayerPlan(attention=Kept(grouping=Grouping(32, 16), kept=1), ffn=Kept(grouping=Grouping(64, 16), kept=0)),
        LayerPlan(attention=Dense(), ffn=Dense()),
    )
    tensors = {"layers.0.attention.scale": torch.tensor([0.0, 2.0]), "layers.0.ffn.scale": torch.zeros(4)}
    attach(model, Plan(layers), tensors=tensors)
    found = logits(model, ids)
    detach(model)
    spec = discover(model)[0]
    scale = torch.tensor([0.0, 0, 2, 2]).repeat_interleave(8)
    spec.attention.output.register_forward_pre_hook(lambda _m, args: (args[0] * scale,))
    spec.ffn.module.register_forward_hook(lambda _m, _a, out: torch.zeros_like(out))
    torch.testing.assert_close(found, logits(model, ids), **CLOSE)


def explicit_stream(model, ids, tensors):
    """Run a Llama-like model by hand with its stream projected."""
    inner = model.model

    def project(x, name):
        return (x @ tensors[name]) @ tensors[name].T

    x = project(inner.embed_tokens(ids), "stream.embedding")
    positions = torch.arange(ids.shape[1])[None]
    angles = inner.rotary_emb(x, positions)
    last = len(inner.layers) - 1
    for i, layer in enumerate(inner.layers):
        attended = layer.self_attn(layer.input_layernorm(x), position_embeddings=angles, attention_mask=None)[0]
        x = project(x + attended, f"layers.{i}.attention.basis")
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        x = x if i == last else project(x, f"layers.{i}.ffn.basis")
    return model.lm_head(inner.norm(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_projected_stream_equals_the_forward_by_hand(family, dtype):
    model, ids = make(family).to(dtype), tokens()
    dense = logits(model, ids)
    plan, tensors = stream_plan(model, 24)
    attach(model, plan, tensors=tensors)
    found = logits(model, ids)
    with bypass(model):
        assert torch.equal(logits(model, ids), dense)
    detach(model)
    assert torch.equal(logits(model, ids), dense)
    with torch.no_grad():
        wanted = explicit_stream(model, ids, {name: value.to(dtype) for name, value in tensors.items()})
    torch.testing.assert_close(found, wanted, atol=1e-11 if dtype == torch.float64 else 2e-5, rtol=1e-4)
    assert not torch.allclose(found, dense, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_of_full_width_is_the_dense_model_or_is_refused(family):
    model, ids = make(family), tokens()
    dense = logits(model, ids)
    plan, tensors = stream_plan(model, 32)
    if family in NO_PLAIN_STREAM:
        with pytest.raises(UnsupportedModelError, match="stream cannot be projected"):
            attach(model, plan, tensors=tensors)
        assert not is_attached(model)
        assert torch.equal(logits(model, ids), dense)
        return
    attach(model, plan, tensors=tensors)
    torch.testing.assert_close(logits(model, ids), dense, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_routing_skips_whole_tokens_and_the_ffn_follows(family):
    model, ids = make(family), tokens()
    dense = logits(model, ids)
    attach(model, layer_skip_plan(model))
    with capture_routing(model) as routing:
        found = logits(model, ids)
    masks = [layer.attention for layer in routing]
    assert all(torch.equal(layer.attention, layer.ffn) for layer in routing)
    assert 0 < torch.cat(masks).float().mean() < 1
    for skip in (True, False):
        for layer in routing:
            layer.attention = torch.full_like(layer.attention, not skip)
        with force_routing(model, routing):
            forced = logits(model, ids)
        if skip:
            all_skipped = forced
        else:
            assert torch.equal(forced, dense)
    handles = []
    for spec, mask in zip(attachment(model).specs, masks, strict=True):

        def drop(_module, args, mask=mask):
            return (args[0] * mask,)

        handles += [part.register_forward_pre_hook(drop) for part in (spec.attention.output, spec.ffn.down)]
    with bypass(model):
        torch.testing.assert_close(found, logits(model, ids), **CLOSE)
    for handle in handles:
        handle.remove()
    detach(model)
    for spec in discover(model):
        spec.layer.forward = lambda hidden_states, *_, **__: hidden_states
    torch.testing.assert_close(all_skipped, logits(model, ids), **CLOSE)


@pytest.mark.parametrize("form", ["bottleneck", "mlp", "dllm"])
@pytest.mark.parametrize("router_input", ["normed", "residual", "layer_input"])
def test_module_routing_with_every_form_and_input(form, router_input):
    model, ids = make("llama"), tokens()
    attach(model, module_skip_plan(model, form=form, router_input=router_input))
    with capture_routing(model) as routing:
        found = logits(model, ids)
        assert torch.equal(found, logits(model, ids))
    assert routing[0].attention.shape == routing[1].ffn.shape == (2, 12, 1)
    model.train()
    model(ids, labels=ids).loss.backward()
    gradients = [p.grad for router in attachment(model).routers() for p in router.parameters()]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("family", distinct(FAMILIES))
def test_the_layer_input_is_the_stream_before_the_layer_for_both_halves(family):
    model, ids = make(family), tokens()
    attach(model, module_skip_plan(model, router_input="layer_input"))
    seen = []
    for router in attachment(model).routers()[2:]:
        router.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    entered = []
    attachment(model).specs[1].layer.register_forward_pre_hook(
        lambda _m, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    logits(model, ids)
    assert len(seen) == 2
    assert all(torch.equal(value, entered[0]) for value in seen)


def test_router_forms_are_what_they_say():
    torch.manual_seed(3)
    model = attach(make("llama"), module_skip_plan(make("llama"), form="dllm"))
    router = attachment(model).routers()[0]
    assert router.bias.tolist() == pytest.approx([2.0, 0.1])
    x = torch.randn(5, 32)
    inner = x @ router.down.T + router.down_bias
    inner = functional.silu(inner / (inner.square().mean(-1, keepdim=True) + 1e-6).sqrt() * router.norm)
    torch.testing.assert_close(router.logits(x)[:, 0], inner @ router.up.T + router.bias)
    rate = torch.softmax(router.logits(torch.zeros(1, 32))[0, 0], -1)[0]
    assert 0.6 < rate < 0.97
    router = attachment(attach(make("llama"), module_skip_plan(make("llama"), form="mlp"))).routers()[0]
    inner = torch.relu(x @ router.down.T + router.down_bias)
    torch.testing.assert_close(router.logits(x)[:, 0], inner @ router.up.T + router.bias)


def test_kinds_may_be_mixed_in_one_plan():
    model, ids = make("llama"), tokens()
    kept = Kept(grouping=Grouping(64, 1), kept=2)
    routed = Routed(grouping=Grouping(32, 16), rank=4)
    plan = Plan((LayerPlan(attention=routed, ffn=kept), LayerPlan(attention=Skipped(), ffn=Dense())))
    scale = torch.zeros(64)
    scale[[3, 9]] = 1.5
    attach(model, Plan.from_json(plan.to_json()), tensors={"layers.0.ffn.scale": scale})
    with capture_routing(model) as routing:
        logits(model, ids)
    assert [layer.ffn for layer in routing] == [None, None]
    assert routing[0].attention is not None
    assert len(attachment(model).routers()) == 1
    twin = copy.deepcopy(model)
    torch.nn.init.zeros_(attachment(twin).static_gates()[0].scale)
    assert not torch.equal(logits(model, ids), logits(twin, ids))


@pytest.mark.parametrize("kind", ["kept", "skipped", "stream", "following"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "olmo2"])
def test_cached_generation_equals_the_full_forward(family, kind):
    if kind == "stream" and family in NO_PLAIN_STREAM:
        pytest.skip("no plain stream")
    model, ids = make(family), tokens(length=6)
    _attach(model, kind)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids, eos_token_id=None, **options)
    assert out.sequences.shape == (2, 12)
    full = logits(model, out.sequences[:, :-1], use_cache=False)
    torch.testing.assert_close(full[:, 5:], torch.stack(out.logits, dim=1).float(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["kept", "skipped", "stream", "following"])
def test_padding_changes_no_token(kind, side):
    model, ids = make("llama"), tokens(batch=1, length=7)
    _attach(model, kind)
    padding = torch.zeros(1, 4, dtype=ids.dtype)
    padded = torch.cat([padding, ids] if side == "left" else [ids, padding], dim=1)
    valid = (padded != 0).long()
    found = logits(model, padded, attention_mask=valid, position_ids=(valid.cumsum(-1) - 1).clamp(min=0))
    place = slice(4, None) if side == "left" else slice(0, 7)
    torch.testing.assert_close(found[:, place], logits(model, ids), **CLOSE)


@pytest.mark.parametrize("heads", [(12, 4), (12, 3), (4, 4), (3, 1)])
@pytest.mark.parametrize("tied", [True, False])
def test_gqa_and_tied_embeddings(heads, tied):
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "tie_word_embeddings": tied}
    model, ids = make("llama", hidden_size=48, intermediate_size=72, num_hidden_layers=3, **sizes), tokens()
    plan, tensors = kept_plan(model, heads=max(1, heads[0] // 3), channels=5)
    attach(model, plan, tensors=tensors)
    logits(model, ids)
    detach(model)
    plan, tensors = stream_plan(model, 40)
    attach(model, plan, tensors=tensors)
    found = logits(model, ids)
    detach(model)
    with torch.no_grad():
        torch.testing.assert_close(found, explicit_stream(model, ids, tensors), **CLOSE)


def test_every_kind_compiles_as_one_graph():
    # Two models for all kinds: tracing takes seconds.
    model = make("llama")
    (kept, _), (following, _) = kept_plan(model)[0].layers, layer_skip_plan(model, router_input="layer_input").layers
    stream, bases = stream_plan(model, 24)
    scales = kept_plan(model)[1]
    for plan, tensors in (
        (Plan((replace(kept, ffn=Skipped()), following)), ["layers.0.attention.scale"]),
        (replace(stream, layers=(replace(kept, attention=Skipped()), stream.layers[1])), ["layers.0.ffn.scale"]),
    ):
        model, ids = make("llama"), tokens()
        names = [*tensors, *(bases if plan.stream else ())]
        attach(model, plan, tensors={name: (scales | bases)[name] for name in names})
        eager = logits(model, ids)
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            torch.testing.assert_close(compiled(ids).logits, eager, **CLOSE)


def test_bfloat16_models_keep_float32_scales_and_bases():
    for kind in ("kept", "stream"):
        model = make("llama").to(torch.bfloat16)
        _attach(model, kind)
        assert all(p.dtype == torch.float32 for p in attachment(model).static_parameters().values())
        assert logits(model, tokens()).dtype == torch.bfloat16


def test_scales_can_be_trained_through_a_transform():
    model, ids = make("llama"), tokens()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    plan, tensors = kept_plan(model, heads=4, channels=64)
    attach(model, plan, tensors=tensors)
    gates = attachment(model).static_gates()
    assert not any(gate.scale.requires_grad for gate in gates)
    for gate in gates:
        gate.scale.requires_grad_(True)
        gate.transform = lambda scale: torch.relu(scale) * 2
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert all(gate.scale.grad.abs().sum() > 0 for gate in gates)
    gate, step = gates[1], 1e-2
    place = int(gate.scale.grad.abs().argmax())
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            gate.scale[place] += sign * step
            values.append(model(ids, labels=ids).loss.double())
            gate.scale[place] -= sign * step
    assert float(values[0] - values[1]) / (2 * step) == pytest.approx(float(gate.scale.grad[place]), rel=0.05)
    plain = [gate.scale.grad.clone() for gate in gates]
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    for gate, wanted in zip(gates, plain, strict=True):
        torch.testing.assert_close(gate.scale.grad, wanted, **CLOSE)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_of_a_followed_router_comes_through_both_halves(checkpointing):
    def gradient(cut):
        torch.manual_seed(0)
        model, ids = make("llama"), tokens()
        attach(model, layer_skip_plan(model))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        router = attachment(model).routers()[1]
        if cut is not None:
            # Without the gradient of one sublayer's gate only the other sublayer steers the router.
            pending = getattr(getattr(attachment(model).specs[1], cut).module, PENDING_NAME).mask
            taken = pending.take
            pending.take = lambda: None if (mask := taken()) is None else mask.detach()
        torch.manual_seed(1)
        model(ids, labels=ids, use_cache=False).loss.backward()
        return router.up.grad

    whole, ffn, attention = gradient(None), gradient("attention"), gradient("ffn")
    assert ffn.abs().sum() > 0
    assert attention.abs().sum() > 0
    torch.testing.assert_close(whole, ffn + attention, **CLOSE)


def test_an_attention_implementation_that_bypasses_static_gates_is_noticed():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    model = make("llama")
    _attach(model, "kept")
    AttentionInterface.register("latecomer", sdpa_attention_forward)
    AttentionMaskInterface.register("latecomer", sdpa_mask)
    model.set_attn_implementation("latecomer")
    with pytest.raises(UnsupportedModelError, match="latecomer"):
        model(tokens())


def _attach(model, kind):
    if kind == "kept":
        plan, tensors = kept_plan(model)
        attach(model, plan, tensors=tensors)
    elif kind == "skipped":
        attach(model, skipped_plan(model, {(0, "attention"), (1, "ffn")}))
    elif kind == "stream":
        plan, tensors = stream_plan(model, 24)
        attach(model, plan, tensors=tensors)
    else:
        attach(model, layer_skip_plan(model, router_input="layer_input"))


def llama_plan(attention=None, ffn=None, stream=None):
    dense = LayerPlan(attention=Dense(), ffn=Dense())
    return Plan((LayerPlan(attention=attention or Dense(), ffn=ffn or Dense()), dense), stream)


HEADS, CHANNELS = Grouping(32, 8), Grouping(64, 1)


@pytest.mark.parametrize(
    ("plan", "tensors", "reason"),
    [
        (llama_plan(Kept(grouping=HEADS, kept=2)), {}, r"1 missing \['layers.0.attention.scale'\]"),
        (llama_plan(), {"layers.0.ffn.scale": torch.ones(64)}, "1 surplus"),
        (llama_plan(Kept(grouping=HEADS, kept=2)), {"layers.0.attention.scale": torch.ones(4)}, "keeps 2 .* has 4"),
        (llama_plan(Kept(grouping=HEADS, kept=3)), {"layers.0.attention.scale": torch.ones(3)}, r"\(3,\).*\(4,\)"),
        (
            llama_plan(Kept(grouping=Grouping(32, 4), kept=8)),
            {"layers.0.attention.scale": torch.ones(8)},
            "whole query",
        ),
        (
            llama_plan(Kept(grouping=Grouping(64, 8), kept=8)),
            {"layers.0.attention.scale": torch.ones(8)},
            "32 channels",
        ),
        (llama_plan(None, Kept(grouping=HEADS, kept=4)), {"layers.0.ffn.scale": torch.ones(4)}, "64 channels wide"),
        (
            llama_plan(None, Kept(grouping=Grouping(64, 32), kept=2)),
            {"layers.0.ffn.scale": torch.tensor([1.0, float("nan")])},
            "not finite",
        ),
        (llama_plan(None, Following()), {}, "no router"),
        (llama_plan(Following()), {}, "only an FFN can"),
        (llama_plan(Routed(grouping=Grouping(32, 16), rank=2), Following()), {}, "2 groups; it needs one"),
        (llama_plan(stream=Stream(width=16, kept=4)), None, "the model has 32"),
        (llama_plan(stream=Stream(width=32, kept=0)), None, "at least 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(plan, tensors, reason):
    model, ids = make("llama"), tokens()
    dense, names = logits(model, ids), list(model.state_dict())
    if tensors is None:
        tensors = {name: torch.eye(*shape) for name, shape in plan.tensor_shapes().items()}
    with pytest.raises(ShapeError, match=reason):
        attach(model, plan, tensors=tensors)
    assert not is_attached(model)
    assert list(model.state_dict()) == names
    assert torch.equal(logits(model, ids), dense)


def test_bases_must_be_orthonormal():
    model = make("llama")
    plan, tensors = stream_plan(model, 8)
    tensors["layers.0.ffn.basis"] = tensors["layers.0.ffn.basis"] * 1.01
    with pytest.raises(ShapeError, match=r"layers\.0\.ffn\.basis are not orthonormal"):
        attach(model, plan, tensors=tensors)
    assert "layers.1.ffn.basis" not in tensors


def test_a_mixture_of_experts_cannot_lose_its_ffn():
    model = make("mixtral", num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        attach(model, llama_plan(None, Skipped()))
