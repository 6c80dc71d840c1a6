"""SkipGPT: dense and empty limits, keys and values that stay, counting, a toy that meets its target, sampling."""

import dataclasses

import pytest
import torch
from depth_toys import counted, decoded, kept_weights, logits, train
from depth_toys import cyclic_text as blocks
from depth_toys import random_ids as ids
from tiny import dense_model, stage

from wide.config import ObjectiveConfig
from wide.errors import ConfigError
from wide.methods.catalogue import SkipGPTConfig, SkipGPTOriginalConfig
from wide.methods.method import Target, sublayer_plan
from wide.methods.routed import Routing
from wide.methods.skipgpt import route, route_original
from wide.models.attach import attach, attachment, is_attached
from wide.models.cost import SkipCounter
from wide.models.discovery import discover
from wide.models.observe import capture_routing, force_routing
from wide.models.router import Router
from wide.plan import Dense, Routed
from wide.routing import LayerRouting

FORMS = [("bottleneck", "residual"), ("mlp", "layer_input")]
TARGET = Target(sparsity=0.4)


def routed_model(form="bottleneck", router_input="residual", **sizes):
    model = dense_model(**sizes)
    plan = sublayer_plan(discover(model), rank=8, bias=True, router_input=router_input, form=form)
    return attach(model, plan)


def masks(model, value, *, rows=2, length=9):
    full = torch.full((rows, length, 1), value, dtype=torch.bool)
    return [LayerRouting(attention=full.clone(), ffn=full.clone()) for _ in attachment(model).specs]


@pytest.mark.parametrize(("form", "router_input"), FORMS)
def test_executing_all_is_dense_and_skipping_all_is_the_head_on_the_embedding(form, router_input):
    model, tokens = routed_model(form, router_input), ids()
    with force_routing(model, masks(model, True)):
        assert torch.equal(logits(model, tokens), logits(dense_model(), tokens))
    with force_routing(model, masks(model, False)):
        empty = model.lm_head(model.model.norm(model.model.embed_tokens(tokens)))
        assert torch.equal(logits(model, tokens), empty)


def test_a_token_that_skips_attention_stays_visible_to_the_others():
    model, tokens, outputs = routed_model(), ids(), []
    model.model.layers[0].self_attn.register_forward_hook(lambda _m, _a, output: outputs.append(output[0]))
    wanted = masks(model, True)
    with force_routing(model, wanted):
        logits(model, tokens)
    wanted[0].attention[:, 3] = False
    with force_routing(model, wanted):
        logits(model, tokens)
    others = torch.arange(9) != 3
    assert torch.equal(outputs[1][:, others], outputs[0][:, others])
    assert not outputs[1][:, 3].any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_sparsity_is_counted_without_padding_and_padding_changes_nothing(side):
    model, tokens, padding = routed_model("mlp", "layer_input"), ids(), 4
    empty = torch.zeros(2, padding, dtype=torch.int64)
    order = (empty, tokens) if side == "left" else (tokens, empty)
    valid = torch.cat([torch.ones_like(part) if part is tokens else part for part in order], 1).bool()
    found = []
    for inputs, mask in ((tokens, None), (torch.cat(order, 1), valid)):
        counter = SkipCounter(model)
        with capture_routing(model) as routing:
            out = logits(model, inputs, attention_mask=None if mask is None else mask.long())
        counter.add(routing, mask)
        found.append((counter.result().mean, out if mask is None else out[valid].view_as(found[0][1])))
    by_hand = [(~routing[i].attention[valid]).float().mean() + (~routing[i].ffn[valid]).float().mean() for i in (0, 1)]
    assert found[1][0] == pytest.approx(float(sum(by_hand)) / 4)
    assert found[0][0] == pytest.approx(found[1][0])
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-4, rtol=1e-4)


def test_sampling_and_argmax_coincide_where_the_routers_are_sure():
    model, tokens = routed_model(), ids(4, 16)
    with torch.no_grad():
        for router in attachment(model).routers():
            router.up.mul_(1e5)
    with capture_routing(model) as routing:
        logits(model, tokens)
        by_margin = [(layer.attention.clone(), layer.ffn.clone()) for layer in routing]
        for router in attachment(model).routers():
            router.train()
        logits(model, tokens)
    for (attention, ffn), layer in zip(by_margin, routing, strict=True):
        assert torch.equal(attention, layer.attention)
        assert torch.equal(ffn, layer.ffn)
    assert 0 < sum(float(a.float().mean()) for a, _ in by_margin) < 2


@pytest.mark.parametrize(("form", "router_input"), FORMS)
def test_cached_decoding_is_the_full_forward(form, router_input):
    model, tokens = routed_model(form, router_input), ids()
    torch.testing.assert_close(decoded(model, tokens, 5), logits(model, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("row", "settings", "form", "router_input", "rank"),
    [
        pytest.param(route, SkipGPTConfig(router_rank=8), "bottleneck", "residual", 8, marks=pytest.mark.slow),
        (route, SkipGPTConfig(router_rank=8, uniform=True), "bottleneck", "residual", 8),
        (route_original, SkipGPTOriginalConfig(), "mlp", "layer_input", 8),
    ],
)
@pytest.mark.usefixtures("every_point")
def test_training_meets_the_target_with_the_routers_alone(row, settings, form, router_input, rank):
    model, text, steps = dense_model(), blocks(), 40
    run = {"stage": stage(steps=steps, batch_size=16), "objective": ObjectiveConfig(weight=10.0)}
    with kept_weights(model):
        effort, deviations = train(model, row, text, TARGET, settings, **run)
    state = attachment(model)
    for layer in state.plan.layers:
        for half in (layer.attention, layer.ffn):
            assert isinstance(half, Routed)
            assert (half.grouping.num_groups, half.rank, half.form, half.router_input) == (1, rank, form, router_input)
    record = state.provenance["prune"]
    assert counted(model, text).mean == pytest.approx(TARGET.sparsity, abs=0.02)
    original = row is route_original
    assert record["stage"]["temperature_end"] == (1.0 if original else 0.5)
    assert record["objective"]["weight"] == (20.0 if original else 10.0)
    assert record["objective"]["target"] == ("uniform" if getattr(settings, "uniform", False) else "mean")
    assert effort.tokens_backward == steps * 16 * 64
    assert any("samples" in sentence for sentence in deviations)
    assert original == any("LoRA, the same for all rows" in sentence for sentence in deviations)
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "wide_router" not in name)


@pytest.mark.parametrize(("form", "router_input"), FORMS)
def test_which_stream_the_ffn_router_reads(form, router_input):
    model, seen = routed_model(form, router_input), {}
    for router in attachment(model).routers():
        router.register_forward_pre_hook(
            lambda router, args: seen.__setitem__((router.layer_index, router.half_layer), args[0])
        )
    with force_routing(model, masks(model, True)):
        logits(model, ids())
    for layer in (0, 1):
        is_same = torch.equal(seen[layer, "attention"], seen[layer, "ffn"])
        assert is_same == (router_input == "layer_input")
    assert torch.equal(seen[0, "attention"], model.model.embed_tokens(ids()))


def test_linear_flops_target_counts_keys_and_values():
    model = dense_model()
    train(
        model,
        route,
        blocks(),
        Target(sparsity=0.3, match="linear_flops"),
        SkipGPTConfig(router_rank=4),
        stage=stage(steps=2, batch_size=16),
        objective=ObjectiveConfig(),
    )
    objective = attachment(model).provenance["prune"]["objective"]
    # Q and O 2 x 32 x 32, K and V 2 x 16 x 32, the FFN 3 x 64 x 32 weights.
    assert objective["sparsity"] == pytest.approx(0.3 * (2048 + 1024 + 6144) / (2048 + 6144))
    assert objective["target"] == "linear_flops"


def test_errors_come_before_anything_is_attached():
    model, run = dense_model(), {"stage": stage(), "objective": ObjectiveConfig()}
    with pytest.raises(ConfigError, match="stay below"):
        train(model, route, blocks(), Target(sparsity=0.95, match="linear_flops"), SkipGPTConfig(), **run)
    assert not is_attached(model)
    for wrong in ({"router_rank": 0}, {"temperature_end": 0.0}, {"weight": -1.0}):
        with pytest.raises(ConfigError):
            SkipGPTOriginalConfig(**wrong)


def test_layers_without_a_routable_ffn_keep_it():
    spec = discover(dense_model())[0]
    plan = sublayer_plan(
        [dataclasses.replace(spec, ffn=None)], rank=4, bias=True, router_input="residual", form="bottleneck"
    )
    assert isinstance(plan.layers[0].ffn, Dense)


@pytest.mark.parametrize(("changes", "spread"), [({}, 1.17), ({"router_init": "uniform"}, 0.27)])
def test_routers_begin_as_the_authors_do(changes, spread):
    """Inputs of variance 1 give W1 x a variance of 2, ReLU of it 1 - 1/pi around its mean, and a margin twice that."""
    width = 512
    model = dense_model(hidden_size=width, num_attention_heads=4, head_dim=8)
    settings = SkipGPTOriginalConfig(**changes)
    asked = Routing(target=TARGET, stage=stage(), objective=ObjectiveConfig())
    wanted = route_original(discover(model), settings, asked)
    routers = attachment(attach(model, wanted.config)).routers()
    inputs = torch.randn(2000, width, generator=torch.Generator().manual_seed(0))
    for router in routers:
        if wanted.initialise is not None:
            wanted.initialise(router)
        assert bool(router.bias.any() or router.down_bias.any()) == ("router_init" in changes)
    margins = [router.logits(inputs).diff(dim=-1).std().item() for router in routers]
    assert sum(margins) / len(margins) == pytest.approx(spread, rel=0.15)


def test_the_initial_routers_that_are_asked_for_are_those_that_are_trained(monkeypatch):
    seen = []
    draw = Router.reset_parameters

    def note(router, like_linear=False):
        seen.extend([router] if like_linear else [])
        draw(router, like_linear=like_linear)

    monkeypatch.setattr(Router, "reset_parameters", note)
    settings = SkipGPTOriginalConfig(router_init="uniform")
    model = dense_model()
    run = {"stage": stage(steps=1, batch_size=16), "objective": ObjectiveConfig()}
    train(model, route_original, blocks(), TARGET, settings, **run)
    assert seen == list(attachment(model).routers())
