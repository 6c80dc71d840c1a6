"""What a plan is said to remove is what materialising removes."""

import pytest
import torch
from families import FAMILIES, make, tokens
from materialise_plans import depth_plan, number_of_parameters, stream_plan, twins, width_plan
from torch import nn
from transformers import DynamicCache

from wide.errors import UnsupportedModelError
from wide.materialisation.materialise import materialise
from wide.models.cost import static_sparsity
from wide.plan import LayerPlan, Plan, Skipped

NO_ROPE = {"smollm3": {"no_rope_layers": [1, 0, 1, 0]}}


def in_layers(model):
    return number_of_parameters(model.model.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_keys_and_values_equal_the_accounting(family):
    options = {"attention_bias": True} if family in ("llama", "qwen3", "seed_oss") else {}
    model = make(family, num_hidden_layers=4, **NO_ROPE.get(family, {}), **options)
    plan, tensors = width_plan(model, [None, [0, 2, 3], [1], [3]], [17, 30, None, 1])
    layers = list(plan.layers)
    layers[0] = LayerPlan(attention=Skipped(), ffn=layers[0].ffn)
    layers[2] = LayerPlan(attention=layers[2].attention, ffn=Skipped())
    masked, physical = twins(model, Plan(tuple(layers)), tensors)
    said = static_sparsity(masked)
    materialise(physical)
    removed = said.parameters_removed * in_layers(model)
    assert in_layers(model) - in_layers(physical) == pytest.approx(removed, abs=0.5)
    cache = DynamicCache(config=physical.config)
    with torch.no_grad():
        physical(tokens(1, 5), past_key_values=cache, use_cache=True)
    heads = [0 if layer.keys is None or layer.keys.shape[-1] == 1 else layer.keys.shape[1] for layer in cache.layers]
    assert sum(heads) / (4 * 2) == pytest.approx(said.kv_cache_kept)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
def test_deleted_layers_equal_the_accounting(family):
    model = make(family, num_hidden_layers=4)
    masked, physical = twins(model, depth_plan([(True, True), (False, False), (True, True), (False, False)]))
    materialise(physical)
    assert in_layers(physical) / in_layers(model) == pytest.approx(1 - static_sparsity(masked).parameters_removed)


@pytest.mark.parametrize("kept", [32, 24, 9])
def test_a_cut_stream_equals_the_accounting_also_where_it_grows(kept):
    model = make("qwen2")
    masked, physical = twins(model, *stream_plan(model, kept))
    materialise(physical)
    removed = static_sparsity(masked).parameters_removed
    assert in_layers(physical) / in_layers(model) == pytest.approx(1 - removed)
    assert (removed < 0) == (kept == 32)


@pytest.mark.parametrize("how", ["sliced", "masked"])
def test_quantised_projections_are_refused_before_anything_is_changed(how):
    class Quantised(nn.Linear):
        """As quantised layers do, it keeps its weight packed."""

    model = make("llama")
    for name in ("o_proj", "up_proj"):
        layer = model.model.layers[1]
        old = layer.get_submodule(f"self_attn.{name}" if name == "o_proj" else f"mlp.{name}")
        packed = Quantised(old.in_features, old.out_features, bias=False)
        packed.weight = nn.Parameter(old.weight.detach().reshape(-1, 1), requires_grad=False)
        layer.set_submodule(f"self_attn.{name}" if name == "o_proj" else f"mlp.{name}", packed)
    _, physical = twins(model, *width_plan(model, [[0], [1]], [3, 4]))
    before = {name: p.clone() for name, p in physical.named_parameters()}
    with pytest.raises(UnsupportedModelError, match="Quantised, whose weight cannot be cut"):
        materialise(physical, how)
    assert all(torch.equal(p, before[name]) for name, p in physical.named_parameters())
