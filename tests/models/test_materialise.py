"""Materialised models compute what the masked executor computes, on every family, and are really smaller."""

import pytest
import torch
from families import FAMILIES, alternating, distinct, make, tokens
from materialise_plans import depth_plan, number_of_parameters, stream_plan, twins, width_plan
from transformers import LlamaForCausalLM

import wide
from wide.errors import ConfigError, NotAttachedError, UnsupportedModelError
from wide.grouping import Grouping
from wide.materialisation.checkpoint import SlicedMixin
from wide.materialisation.materialise import materialise
from wide.models.attach import attach, is_attached
from wide.models.lora import add_lora
from wide.plan import Dense, Kept, LayerPlan, Plan, Routed

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
EXACT = {"atol": 1e-10, "rtol": 1e-10}
# Query heads 0 and 1 read KV head 0, 2 and 3 KV head 1: uneven, then one KV head gone.
HEADS, CHANNELS = [[0, 2, 3], [2, 3]], [37, 1]


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


def assert_same_function(masked, physical, close=CLOSE):
    ids = tokens()
    torch.testing.assert_close(logits(physical, ids), logits(masked, ids), **close)


@pytest.mark.parametrize(("family", "how"), alternating(FAMILIES, ["sliced", "masked"]))
def test_kept_heads_and_channels_equal_the_masked_executor(family, how):
    model = make(family)
    dense = logits(model, tokens())
    masked, physical = twins(model, *width_plan(model, HEADS, CHANNELS))
    assert materialise(physical, how) is physical
    assert not is_attached(physical)
    assert isinstance(physical, SlicedMixin) == (how == "sliced")
    assert_same_function(masked, physical)
    assert not torch.allclose(logits(physical, tokens()), dense, atol=1e-3)
    if how == "sliced":
        assert number_of_parameters(physical) < number_of_parameters(model)


@pytest.mark.parametrize(("family", "how"), alternating(FAMILIES, ["masked", "sliced"]))
def test_skipped_halves_equal_the_masked_executor(family, how):
    model = make(family)
    for skipped in ([(True, False), (False, True)], [(False, True), (True, False)]):
        masked, physical = twins(model, depth_plan(skipped))
        materialise(physical, how)
        assert_same_function(masked, physical)


@pytest.mark.parametrize("family", distinct(FAMILIES))
def test_a_layer_without_both_halves_is_deleted_and_the_model_is_an_ordinary_one(family, tmp_path):
    model = make(family, **LONGER.get(family, {"num_hidden_layers": 4}))
    masked, physical = twins(model, depth_plan([(False, False), (True, True), (True, True), (False, False)]))
    materialise(physical)
    assert type(physical) is type(model)
    assert physical.config.num_hidden_layers == 2
    assert_same_function(masked, physical)
    physical.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation).eval()
    assert torch.equal(logits(again, tokens()), logits(physical, tokens()))
    out = physical.generate(tokens(), max_new_tokens=3, do_sample=False, eos_token_id=None)
    torch.testing.assert_close(
        out, masked.generate(tokens(), max_new_tokens=3, do_sample=False, eos_token_id=None), atol=0, rtol=0
    )


LONGER = {"smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}}


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (8, 2), (8, 8), (5, 1)])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_way_of_sharing_kv_heads_is_exact_in_float64(num_heads, num_kv_heads, implementation):
    sizes = {"hidden_size": 8 * num_heads, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    model = make("llama", **sizes).double()
    model.set_attn_implementation(implementation)
    last = num_heads - 1
    for heads in ([[0, last], [1, 2, last]], [[last], list(range(1, num_heads))], [[0, 1, 2, 3], None]):
        masked, physical = twins(model, *width_plan(model, heads, [63, 2]))
        materialise(physical)
        assert_same_function(masked, physical, EXACT)


def test_only_kv_heads_that_a_kept_query_head_reads_are_left():
    model = make("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    _, physical = twins(model, *width_plan(model, [[4, 5, 7], [0, 3, 7]], [10, None]))
    materialise(physical)
    first, second = (layer.self_attn for layer in physical.model.layers)
    assert (first.q_proj.out_features, first.k_proj.out_features, first.v_proj.out_features) == (12, 4, 4)
    assert first.o_proj.in_features == 12
    assert not hasattr(first, "wide_gather")
    assert second.k_proj.out_features == 8
    assert second.wide_gather.kv_index.tolist() == [0, 0, 1]
    assert physical.model.layers[0].mlp.down_proj.in_features == 10


@pytest.mark.parametrize("how", ["sliced", "masked"])
@pytest.mark.parametrize("family", ["llama", "arcee", "qwen2", "phi3"])
def test_a_half_without_units_leaves_its_bias_and_a_skipped_one_nothing(family, how):
    model = make(family, attention_bias=True, mlp_bias=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    masked, physical = twins(model, *width_plan(model, [[], [1]], [5, 0]))
    assert_same_function(masked, materialise(physical, how))
    masked, physical = twins(model, depth_plan([(True, False), (False, True)]))
    assert_same_function(masked, materialise(physical, how))


def test_units_of_several_heads_and_channels_are_cut_whole():
    model = make("llama")
    layer = LayerPlan(attention=Kept(grouping=Grouping(32, 16), kept=1), ffn=Kept(grouping=Grouping(64, 16), kept=3))
    tensors = {f"layers.{i}.attention.scale": torch.tensor([0.0, 2.0]) for i in range(2)}
    tensors |= {f"layers.{i}.ffn.scale": torch.tensor([1.0, 0.0, 0.5, 1.0]) for i in range(2)}
    masked, physical = twins(model, Plan((layer, layer)), tensors)
    assert_same_function(masked, materialise(physical))
    assert physical.model.layers[1].self_attn.q_proj.out_features == 16
    assert physical.model.layers[1].mlp.up_proj.out_features == 48


def test_scales_without_a_zero_leave_an_ordinary_model_of_the_same_size():
    model = make("llama")
    masked, physical = twins(model, *width_plan(model, [[0, 1, 2, 3], None], [64, None]))
    assert_same_function(masked, materialise(physical))
    assert type(physical) is LlamaForCausalLM
    assert number_of_parameters(physical) == number_of_parameters(model)


def test_scales_of_one_change_no_bit_of_what_is_left():
    model = make("llama").to(torch.bfloat16)
    _, physical = twins(model, *width_plan(model, [[1], [0, 3]], [9, 11], folded=False))
    materialise(physical)
    rows = physical.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(rows, model.model.layers[0].self_attn.q_proj.weight[8:16])
    assert rows.dtype == torch.bfloat16


def test_replaced_weights_stay_and_the_model_is_an_ordinary_one(tmp_path):
    model = make("llama")
    plan = Plan(tuple(LayerPlan(attention=Dense(), ffn=Dense()) for _ in range(2)))
    name = "model.layers.1.mlp.down_proj.weight"
    pruned = model.state_dict()[name].clone()
    pruned[:, ::2] = 0
    masked, physical = twins(model, plan, {}, weights={name: pruned})
    assert_same_function(masked, materialise(physical))
    assert torch.equal(physical.state_dict()[name], pruned)
    physical.save_pretrained(tmp_path)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path), tokens()), logits(physical, tokens()))


@pytest.mark.parametrize("how", ["sliced", "masked"])
def test_lora_is_merged_first(how):
    pytest.importorskip("peft")
    model = make("llama")
    masked, physical = twins(model, *width_plan(model, HEADS, CHANNELS))
    for copy in (masked, physical):
        torch.manual_seed(3)
        for parameter in add_lora(copy, rank=2, alpha=4.0, dropout=0.0).parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        copy.eval()
    assert_same_function(masked, materialise(physical, how))
    assert not [name for name, _ in physical.named_parameters() if "lora" in name]
    if how == "sliced":
        assert physical.model.layers[1].self_attn.q_proj.out_features == 16


def test_what_cannot_be_made_physical_is_refused_and_the_model_left_as_it_was():
    routed = LayerPlan(attention=Routed(grouping=Grouping.whole(32), rank=2), ffn=Dense())
    model = attach(make("llama"), Plan((routed, routed)))
    with pytest.raises(ConfigError, match="layer 0 of the plan is Routed"):
        materialise(model)
    assert is_attached(model)
    with pytest.raises(ConfigError, match="skips every layer"):
        materialise(attach(make("llama"), depth_plan([(True, True)] * 2)))
    with pytest.raises(ConfigError, match="how must be one of"):
        materialise(attach(make("llama"), depth_plan([(True, False)] * 2)), "thin")
    with pytest.raises(NotAttachedError):
        materialise(make("llama"))
    _, thin = twins(make("llama"), *width_plan(make("llama"), [None, None], [8, 8]))
    materialise(thin)
    with pytest.raises(UnsupportedModelError, match="sliced already; materialise its base"):
        materialise(thin)


@pytest.mark.parametrize("kind", ["heads", "channels", "sublayers", "stream"])
def test_a_sliced_model_takes_no_routers_and_says_why(kind):
    # A full checkpoint of both could not be loaded, and nothing else holds them once LoRA is merged.
    model = make("llama")
    if kind == "stream":
        plan, tensors = stream_plan(model, 20)
    elif kind == "sublayers":
        plan, tensors = depth_plan([(True, False), (False, True)]), {}
    else:
        plan, tensors = width_plan(model, [[0], None] if kind == "heads" else [None, None], [8, 8])
    sliced = materialise(attach(model, plan, tensors=tensors))
    words = "this SlicedLlamaForCausalLM is sliced already, .* load the base"
    with pytest.raises(UnsupportedModelError, match=words):
        attach(sliced)
    with pytest.raises(UnsupportedModelError, match=words):
        wide.prune(sliced, ["A text."], sparsity=0.5)


def test_parameters_of_unknown_heads_are_refused_before_anything_is_cut():
    model = make("llama")
    model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    attach(model, *width_plan(model, HEADS, CHANNELS)[:1], tensors=width_plan(model, HEADS, CHANNELS)[1])
    before = logits(model, tokens())
    with pytest.raises(UnsupportedModelError, match=r"layer 1.*sinks"):
        materialise(model)
    assert torch.equal(logits(model, tokens()), before)


class EveryOtherLayerScaled(LlamaForCausalLM):
    """Its layers depend on their number, and no configuration says so."""

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn.scaling = 0.1 * (1 + index % 2)


def test_layers_that_depend_on_their_number_are_not_deleted():
    model = EveryOtherLayerScaled(make("llama", num_hidden_layers=3).config).eval()
    attach(model, depth_plan([(False, False), (True, True), (False, False)]))
    before = logits(model, tokens())
    # Layer 2 as layer 1 would get the other scaling.
    with pytest.raises(UnsupportedModelError, match=r"layer 2: self_attn.scaling is 0.1"):
        materialise(model)
    assert torch.equal(logits(model, tokens()), before)
