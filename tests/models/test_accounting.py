"""What static, routed and mixed plans save: against counts by hand, closed forms and models cut by hand."""

import json

import pytest
import torch
from families import FAMILIES, distinct, make, tokens
from materialise_plans import stream_plan as random_stream
from materialise_plans import twins, width_plan
from plans import kept_plan, layer_skip_plan, module_skip_plan, skipped_plan, stream_plan
from test_replaced import dense_plan
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from wide.config import WideConfig
from wide.errors import ConfigError, UnsupportedModelError
from wide.grouping import Grouping
from wide.materialisation.materialise import materialise
from wide.models.attach import attach, attachment, detach
from wide.models.cost import SkipCounter, half_weights, model_costs, static_sparsity
from wide.models.lora import add_lora
from wide.models.observe import force_routing, observe
from wide.plan import Dense, Kept, LayerPlan, Plan, Routed, Skipped, Stream
from wide.routing import LayerRouting

# llama of tests/models/families.py: D 32, 4 query and 2 KV heads of 8, F 64.
QO, KV, FFN = 2 * 32 * 32, 2 * 16 * 32, 3 * 64 * 32
LAYER = QO + KV + FFN


def sparsity_of(plan, tensors=None, **changes):
    model = make("llama", **changes)
    attach(model, plan, tensors=tensors)
    return static_sparsity(model)


def test_a_dense_plan_saves_nothing():
    found = sparsity_of(dense_plan())
    assert (found.mean, found.linear_flops, found.linear_flops_layers, found.parameters_removed) == (0, 0, 0, 0)
    assert found.kv_cache_kept == 1
    assert found.layers == ((None, None), (None, None))


def test_whole_layers_count_as_their_share_of_the_body():
    model = make("llama", num_hidden_layers=4)
    found = sparsity_of(skipped_plan(model, {(1, "attention"), (1, "ffn")}), num_hidden_layers=4)
    shares = found.attention, found.ffn, found.mean, found.linear_flops, found.linear_flops_layers
    assert shares == pytest.approx((0.25,) * 5)
    assert found.parameters_removed == pytest.approx(0.25)
    assert found.kv_cache_kept == 0.75
    assert found.layers == ((None, None), (1.0, 1.0), (None, None), (None, None))
    assert found.linear_flops_with_fixed == pytest.approx(LAYER / (4 * LAYER + 97 * 32))


def test_a_skipped_attention_saves_its_keys_and_values_too():
    found = sparsity_of(skipped_plan(make("llama"), {(0, "attention")}))
    assert found.linear_flops_layers == pytest.approx((QO + KV) / (2 * LAYER))
    assert found.linear_flops == pytest.approx(QO / (2 * (QO + FFN)))
    assert found.parameters_removed == pytest.approx((QO + KV + 32) / (2 * LAYER + 4 * 32))
    assert (found.attention, found.ffn, found.mean, found.kv_cache_kept) == (0.5, 0, 0.25, 0.5)


@pytest.mark.parametrize(("kept", "kv"), [((0, 1), 1), ((0, 2), 2), ((3,), 1), ((), 0), ((0, 1, 2, 3), 2)])
def test_pruned_heads_save_a_kv_head_only_when_none_of_its_queries_is_left(kept, kv):
    scale = torch.zeros(4)
    scale[list(kept)] = 0.7
    half = Kept(grouping=Grouping(32, 8), kept=len(kept))
    dense = LayerPlan(attention=Dense(), ffn=Dense())
    plan = Plan((dense, LayerPlan(attention=half, ffn=Dense())))
    found = sparsity_of(plan, {"layers.1.attention.scale": scale})
    saved = QO * (4 - len(kept)) / 4 + KV * (2 - kv) / 2
    assert found.linear_flops_layers == pytest.approx(saved / (2 * LAYER))
    # Without any head, the norm in front has no reader left.
    assert found.parameters_removed == pytest.approx((saved + 32 * (not kept)) / (2 * LAYER + 4 * 32))
    assert found.kv_cache_kept == pytest.approx((2 + kv) / 4)
    assert found.attention == pytest.approx((4 - len(kept)) / 8)


def test_pruned_channels_save_rows_and_columns():
    plan, tensors = kept_plan(make("llama"), heads=4, channels=16)
    found = sparsity_of(plan, tensors)
    assert found.linear_flops_layers == pytest.approx(FFN * 0.75 / LAYER)
    assert found.linear_flops == pytest.approx(FFN * 0.75 / (QO + FFN))
    assert (found.attention, found.ffn, found.mean) == (0, 0.75, 0.375)


@pytest.mark.parametrize(("fraction", "body"), [(0.0, -0.154), (0.25, 0.161), (0.5, 0.457)])
def test_a_sliced_stream_has_the_known_shares_of_an_8b_model(fraction, body):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        dense = LayerPlan(attention=Dense(), ffn=Dense())
        plan = Plan((dense,) * 32, Stream(width=4096, kept=int(4096 * (1 - fraction))))
        attach(model, plan, tensors={name: torch.empty(shape) for name, shape in plan.tensor_shapes().items()})
    found = static_sparsity(model)
    assert found.linear_flops_layers == pytest.approx(body, abs=6e-4)
    assert found.parameters_removed == pytest.approx(body, abs=6e-4)
    assert found.mean == pytest.approx(fraction)
    assert found.kv_cache_kept == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_shares_lie_between_the_extremes_in_every_family(family):
    model = make(family)
    everything = {(layer, half) for layer in (0, 1) for half in ("attention", "ffn")}
    attach(model, skipped_plan(model, everything))
    found = static_sparsity(model)
    shares = found.linear_flops, found.linear_flops_layers, found.parameters_removed, found.mean
    assert shares == pytest.approx((1,) * 4)
    assert found.kv_cache_kept == 0
    detach(model)
    plan, tensors = kept_plan(model)
    attach(model, plan, tensors=tensors)
    found = static_sparsity(model)
    assert 0.2 < found.linear_flops_layers < found.mean + 0.1
    assert found.parameters_removed == pytest.approx(found.linear_flops_layers, abs=0.02)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "qwen3", "seed_oss"])
def test_parameters_removed_are_those_of_a_model_cut_by_hand(family):
    """Count what stays row by row; biases of rows that go are gone as well."""
    model = make(family)
    plan, tensors = kept_plan(model, heads=2)
    attach(model, plan, tensors=tensors)
    removed = total = 0
    for spec in attachment(model).specs:
        heads = (tensors[f"layers.{spec.index}.attention.scale"] != 0).view(2, 2)
        channels = int((tensors[f"layers.{spec.index}.ffn.scale"] == 0).sum())
        kv_rows = 2 * int((~heads.any(-1)).sum()) * spec.attention.head_dim
        rows = int((~heads).sum()) * spec.attention.head_dim
        bias = spec.attention.query.bias is not None
        removed += (rows + kv_rows) * (32 + bias) + rows * 32
        removed += channels * 32 * 3 + 2 * channels * (spec.ffn.up.bias is not None)
        total += sum(p.numel() for n, p in spec.layer.named_parameters() if "wide_" not in n)
    assert static_sparsity(model).parameters_removed == pytest.approx(removed / total)


def planned(kind, model):
    if kind == "stream":
        return stream_plan(model, 24)
    if kind == "kept":
        return kept_plan(model, heads=2)
    if kind == "none kept":
        plan, tensors = kept_plan(model)
        first = LayerPlan(attention=_emptied(plan.layers[0].attention), ffn=_emptied(plan.layers[0].ffn))
        for half in ("attention", "ffn"):
            tensors[f"layers.0.{half}.scale"] = torch.zeros_like(tensors[f"layers.0.{half}.scale"])
        return Plan((first, plan.layers[1])), tensors
    return skipped_plan(model, {(1, half) for half in kind.split(" and ")}), {}


def _emptied(half):
    return Kept(grouping=half.grouping, kept=0)


@pytest.mark.parametrize("kind", ["kept", "none kept", "attention", "ffn", "attention and ffn", "stream"])
@pytest.mark.parametrize("family", distinct(FAMILIES))
def test_parameters_removed_are_those_that_materialising_removes(family, kind):
    model = make(family)
    plan, tensors = planned(kind, model)
    before = _layer_parameters(model)
    try:
        attach(model, plan, tensors=tensors)
    except UnsupportedModelError:
        assert kind == "stream"
        return
    found = static_sparsity(model)
    assert 1 - _layer_parameters(materialise(model)) / before == pytest.approx(found.parameters_removed, abs=1e-9)


def _layer_parameters(model):
    return sum(parameter.numel() for name, parameter in model.named_parameters() if ".layers." in name)


@pytest.mark.parametrize("family", distinct(FAMILIES))
def test_parameters_and_keys_and_values_equal_the_accounting(family):
    options = {"attention_bias": True} if family in ("llama", "qwen3", "seed_oss") else {}
    model = make(
        family, num_hidden_layers=4, **({"no_rope_layers": [1, 0, 1, 0]} if family == "smollm3" else {}), **options
    )
    plan, tensors = width_plan(model, [None, [0, 2, 3], [1], [3]], [17, 30, None, 1])
    layers = list(plan.layers)
    layers[0] = LayerPlan(attention=Skipped(), ffn=layers[0].ffn)
    layers[2] = LayerPlan(attention=layers[2].attention, ffn=Skipped())
    masked, physical = twins(model, Plan(tuple(layers)), tensors)
    said = static_sparsity(masked)
    materialise(physical)
    removed = said.parameters_removed * _layer_parameters(model)
    assert _layer_parameters(model) - _layer_parameters(physical) == pytest.approx(removed, abs=0.5)
    cache = DynamicCache(config=physical.config)
    with torch.no_grad():
        physical(tokens(1, 5), past_key_values=cache, use_cache=True)
    heads = [0 if layer.keys is None or layer.keys.shape[-1] == 1 else layer.keys.shape[1] for layer in cache.layers]
    assert sum(heads) / (4 * 2) == pytest.approx(said.kv_cache_kept)


@pytest.mark.parametrize("kept", [32, 24, 9])
def test_a_cut_stream_equals_the_accounting_also_where_it_grows(kept):
    model = make("qwen2")
    masked, physical = twins(model, *random_stream(model, kept))
    materialise(physical)
    removed = static_sparsity(masked).parameters_removed
    assert _layer_parameters(physical) / _layer_parameters(model) == pytest.approx(1 - removed)
    assert (removed < 0) == (kept == 32)


def test_a_norm_over_the_whole_width_keeps_queries_keys_and_values():
    model = make("olmo2")
    plan, tensors = kept_plan(model, heads=1, channels=64)
    attach(model, plan, tensors=tensors)
    found = static_sparsity(model)
    assert found.linear_flops_layers == pytest.approx(QO / 2 * 0.75 / LAYER)
    assert found.kv_cache_kept == 1


def test_static_and_routed_halves_are_counted_together():
    routed = Routed(grouping=Grouping(64, 16), rank=2)
    half = Kept(grouping=Grouping(32, 8), kept=2)
    plan = Plan((LayerPlan(attention=half, ffn=routed), LayerPlan(attention=Skipped(), ffn=Dense())))
    model, ids = make("llama"), tokens()
    attach(model, plan, tensors={"layers.0.attention.scale": torch.tensor([1.0, 1, 0, 0])})
    with pytest.raises(ConfigError, match="depends on the text"):
        static_sparsity(model)
    counter = SkipCounter(model)
    with torch.no_grad(), observe(model) as routing:
        model(ids)
    counter.add(routing)
    rate = 1 - float(routing[0].ffn.float().mean())
    found = counter.result()
    assert found.tokens == 24
    assert found.layers[0] == (0.5, pytest.approx(rate))
    assert found.layers[1] == (1.0, None)
    assert (found.attention, found.ffn) == (0.75, pytest.approx(rate / 2))
    saved = QO / 2 + KV / 2 + QO + KV + rate * FFN
    assert found.linear_flops_layers == pytest.approx(saved / (2 * LAYER))
    cost = model_costs(model).layers[0]
    assert cost.total == 2 * LAYER
    assert (cost.removed, cost.removed_kv) == (QO, KV)


def test_an_ffn_that_follows_counts_with_its_router():
    model, ids = make("llama"), tokens()
    attach(model, layer_skip_plan(model))
    assert half_weights(model, "mean") == [0.5, 0.5]
    assert half_weights(model, "linear_flops") == [0.5, 0.5]
    assert half_weights(model, "ffn") == half_weights(model, "attention") == [0.5, 0.5]
    counter = SkipCounter(model)
    with torch.no_grad(), observe(model) as routing:
        model(ids)
    counter.add(routing)
    found = counter.result()
    skipped = 1 - torch.cat([layer.attention for layer in routing]).float().mean()
    assert found.mean == found.linear_flops == pytest.approx(float(skipped))
    assert found.attention == found.ffn
    assert found.linear_flops_layers == pytest.approx(float(skipped) * (QO + FFN) / LAYER)
    assert (found.parameters_removed, found.kv_cache_kept) == (0, 1)


def test_rates_of_routers_alone_leave_dense_halves_out():
    model, ids = make("llama"), tokens()
    full = module_skip_plan(model)
    plan = Plan((full.layers[0], LayerPlan(attention=Dense(), ffn=Dense())))
    attach(model, plan)
    counter = SkipCounter(model)
    with torch.no_grad(), observe(model) as routing:
        model(ids)
    counter.add(routing)
    found = counter.result()
    assert found.attention == pytest.approx(1 - float(routing[0].attention.float().mean()))
    assert found.layers[1] == (None, None)


# Matrices of one expert, and of an FFN without a gate.
EXPERT, PLAIN = 3 * 64 * 32, 2 * 64 * 32


@pytest.mark.parametrize(
    ("family", "changes", "weights"),
    [
        ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}, 5 * 32 + 2 * EXPERT),
        (
            "qwen2_moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 32,
            },
            4 * 32 + EXPERT + 3 * 32 * 32 + 32,
        ),
        ("starcoder2", {}, PLAIN),
        ("phi", {"num_key_value_heads": 4}, PLAIN),
        ("llama", {}, 0),
    ],
)
def test_an_ffn_that_cannot_be_routed_counts_as_work_of_which_nothing_is_saved(family, changes, weights):
    model = attach(make(family, **changes), WideConfig(ffn_group_size=64, attention_group_size=32))
    if family == "mixtral":
        with pytest.raises(UnsupportedModelError, match="PEFT puts no LoRA on MixtralForCausalLM"):
            add_lora(model, rank=2)
    else:
        add_lora(model, rank=2)
    work = model_costs(model).layers[0]
    assert work.other == 2 * weights
    counter, nothing = SkipCounter(model), LayerRouting(attention=torch.zeros(1, 4, 1), ffn=torch.zeros(1, 4, 1))
    with torch.no_grad(), force_routing(model, [nothing] * 2), observe(model) as routing:
        model(tokens(batch=1, length=4))
    counter.add(routing, torch.ones(1, 4, dtype=torch.bool))
    kv = work.key_value / 2
    assert counter.result().linear_flops_layers == pytest.approx(1 - (kv + weights) / (work.total / 2))
    assert work.total == 2 * (QO + kv + (weights or FFN))


def test_counting_stands_for_json_and_ignores_lora():
    model = make("llama")
    plan, tensors = stream_plan(model, 24)
    attach(model, plan, tensors=tensors)
    before = static_sparsity(model)
    add_lora(model, rank=2)
    assert static_sparsity(model) == before
    assert json.loads(json.dumps(before.to_json()))["layers"] == [[0.25, 0.25], [0.25, 0.25]]


def test_all_masks_of_a_forward_are_counted_at_once():
    model = attach(make("llama"), WideConfig(ffn_group_size=16, router_rank=4))
    routers = attachment(model).routers()
    generator = torch.Generator().manual_seed(0)
    counts = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts[-1] += 1
            return function(*args, **(kwargs or {}))

    counter, skipped, tokens = SkipCounter(model), [0.0] * len(routers), 0
    for length in (7, 12):
        valid = torch.rand(2, length, generator=generator) < 0.8
        routing, tokens = [LayerRouting() for _ in model.model.layers], tokens + int(valid.sum())
        for place, router in enumerate(routers):
            mask = torch.rand(2, length, router.num_groups, generator=generator) < 0.3
            setattr(routing[router.layer_index], router.half_layer, mask)
            skipped[place] += float((~mask & valid.unsqueeze(-1)).sum()) / router.num_groups
        counts.append(0)
        with Watching():
            counter.add(routing, valid)
    found = [rate for pair in counter.result().layers for rate in pair]
    assert found == pytest.approx([count / tokens for count in skipped], abs=1e-12)
    assert counter.result().tokens == tokens
    # However many layers there are: a view of each mask apart.
    assert max(counts) <= 10 + len(routers)
