"""Attaching: group sizes, refusals, modes, errors that name the cure."""

import pytest
import torch
from families import COMMON, make, tokens
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSpeechSeq2Seq,
)

from wide.config import WideConfig
from wide.errors import NotAttachedError, ShapeError, UnsupportedModelError
from wide.grouping import Grouping
from wide.models.attach import attach, attachment, detach, is_attached
from wide.models.observe import bypass, capture_routing, force_routing, observe
from wide.plan import Dense, LayerPlan, Plan, Routed


def test_default_attention_groups_are_the_gqa_groups():
    model = attach(make("llama"), WideConfig(ffn_group_size=16))
    layer = attachment(model).plan.layers[0]
    assert layer.attention.grouping.num_groups == 2
    assert layer.ffn.grouping.num_groups == 4


@pytest.mark.parametrize(("size", "groups"), [(8, 4), (16, 2), (32, 1)])
def test_attention_groups_may_be_divisors_and_multiples_in_whole_heads(size, groups):
    model = attach(make("llama"), WideConfig(ffn_group_size=64, attention_group_size=size))
    with torch.no_grad(), capture_routing(model) as routing:
        model(tokens())
    assert routing[1].attention.shape == (2, 12, groups)
    assert routing[1].attention.dtype == torch.bool
    assert routing[0].ffn.shape == (2, 12, 1)


def test_group_sizes_that_do_not_divide_are_refused_naming_those_that_do():
    model = make("llama")
    with pytest.raises(ShapeError, match=r"ffn_group_size 48 does not divide the FFN width 64.*\[8, 16, 32, 64\]"):
        attach(model, WideConfig(ffn_group_size=48))
    with pytest.raises(ShapeError, match=r"attention_group_size 24 .*\[8, 16, 32\]"):
        attach(model, WideConfig(ffn_group_size=16, attention_group_size=24))
    assert not is_attached(model)


def test_a_group_that_straddles_gqa_groups_is_refused():
    model = make("llama", num_attention_heads=12, num_key_value_heads=4, hidden_size=96)
    with pytest.raises(ShapeError, match=r"\[8, 24, 48, 96\]"):
        attach(model, WideConfig(ffn_group_size=16, attention_group_size=16))


def test_attach_twice_and_use_without_routers_are_clear_errors():
    model = make("llama")
    with pytest.raises(NotAttachedError, match=r"wide\.attach"):
        detach(model)
    with pytest.raises(NotAttachedError), capture_routing(model):
        pass
    attach(model, WideConfig(ffn_group_size=16))
    with pytest.raises(NotAttachedError, match="already has routers"):
        attach(model, WideConfig(ffn_group_size=16))


def test_attach_after_eval_leaves_no_noise_and_training_mode_samples():
    model, ids = attach(make("llama"), WideConfig(ffn_group_size=16)), tokens()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


def test_ties_execute_and_the_threshold_moves_the_rate():
    model, ids = attach(make("llama"), WideConfig(ffn_group_size=16)), tokens()
    for router in attachment(model).routers():
        torch.nn.init.zeros_(router.up)
    with torch.no_grad(), capture_routing(model) as routing:
        model(ids)
        assert all(layer.ffn.all() and layer.attention.all() for layer in routing)
        for router in attachment(model).routers():
            router.threshold = 0.1
        model(ids)
        assert not any(layer.ffn.any() or layer.attention.any() for layer in routing)


def test_router_parameters_are_float32_on_a_bfloat16_base():
    model = attach(make("llama").to(torch.bfloat16), WideConfig(ffn_group_size=16, router_bias=True))
    router = attachment(model).routers()[0]
    assert router.down.dtype == router.up.dtype == router.bias.dtype == torch.float32
    with torch.no_grad():
        assert model(tokens()).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "cohere2"])
def test_the_residual_router_input_is_the_stream_before_the_norm(family):
    model, ids = make(family), tokens()
    attach(model, WideConfig(ffn_group_size=16, router_input="residual"))
    seen = {}
    router = attachment(model).routers()[0]
    router.register_forward_pre_hook(lambda _m, args: seen.update(x=args[0]))
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(seen["x"], hidden[0])


def test_a_plan_may_route_some_halves_only():
    model, ids = make("llama"), tokens()
    full = attachment(attach(model, WideConfig(ffn_group_size=16))).plan
    detach(model)
    plan = Plan((full.layers[0], LayerPlan(attention=Dense(), ffn=full.layers[1].ffn)))
    attach(model, Plan.from_json(plan.to_json()))
    with torch.no_grad(), capture_routing(model) as routing:
        model(ids)
    assert routing[1].attention is None
    assert routing[1].ffn is not None
    assert len(attachment(model).routers()) == 3


def test_a_plan_that_protects_first_tokens_unalike_is_refused_before_anything_changes():
    model, ids = make("llama"), tokens()
    protecting = [Routed(grouping=Grouping(32, 16), rank=2, first_tokens=count) for count in (2, 4)]
    plan = Plan(tuple(LayerPlan(attention=half, ffn=Dense()) for half in protecting))
    with torch.no_grad():
        before = model(ids).logits
        with pytest.raises(ShapeError, match=r"as many first tokens or none, this one says \[2, 4\]"):
            attach(model, plan)
        # Of other arguments, too.
        alike = Plan((plan.layers[0],) * 2)
        for wrong in ({"weights": {"x": torch.zeros(1)}}, {"orders": {"x": torch.zeros(1)}}):
            with pytest.raises(ShapeError, match="name 'x'"):
                attach(model, alike, **wrong)
        assert torch.equal(model(ids).logits, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_forced_masks_of_a_wrong_shape_are_refused():
    model, ids = attach(make("llama"), WideConfig(ffn_group_size=16)), tokens()
    with torch.no_grad(), capture_routing(model) as routing:
        model(ids)
    with pytest.raises(ShapeError, match="masks for 1 layers"), force_routing(model, routing[:1]):
        pass
    with pytest.raises(ShapeError, match="this forward needs"), force_routing(model, routing):
        model(tokens(batch=3))


def test_an_attention_implementation_that_bypasses_the_gate_is_noticed():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    model = attach(make("llama"), WideConfig(ffn_group_size=16))
    AttentionInterface.register("late_arrival", sdpa_attention_forward)
    AttentionMaskInterface.register("late_arrival", sdpa_mask)
    model.set_attn_implementation("late_arrival")
    with pytest.raises(UnsupportedModelError, match="late_arrival"):
        model(tokens())
    model.set_attn_implementation("eager")
    with bypass(model), torch.no_grad():
        expected = model(tokens()).logits
    assert torch.isfinite(expected).all()


@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 97}, "decoder layers"),
        (
            "deepseek_v3",
            {
                "vocab_size": 97,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "first_k_dense_replace": 2,
                "q_lora_rank": 8,
                "kv_lora_rank": 8,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
            },
            "latent attention",
        ),
        (
            "bitnet",
            {
                "vocab_size": 97,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            "sub_norm",
        ),
    ],
)
def test_unsupported_structures_are_refused_with_the_reason(family, sizes, reason):
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes))
    with pytest.raises(UnsupportedModelError, match=reason):
        attach(model)


SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
OPT = {"word_embed_proj_dim": 32, "ffn_dim": 64, "dropout": 0.0}
WHISPER = {"d_model": 32, "num_mel_bins": 8, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
LAYERS = {"encoder_layers": 4, "decoder_layers": 2, "decoder_start_token_id": 1}


@pytest.mark.parametrize(
    ("build", "family", "sizes", "reason"),
    [
        (AutoModelForCausalLM, "opt", OPT, "OPTAttention.*says num_key_value_heads.*your own BlockSpecs"),
        (AutoModelForSpeechSeq2Seq, "whisper", WHISPER | LAYERS, "has an encoder and a decoder"),
        (AutoModel, "siglip_vision_model", {"image_size": 28, "patch_size": 14}, "an encoder's"),
    ],
)
def test_encoders_and_names_of_their_own_are_refused_in_words(build, family, sizes, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        attach(build.from_config(CONFIG_MAPPING[family](**SIZES, **sizes)))


def test_beside_an_encoder_of_as_many_layers_the_decoder_is_routed():
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
    config = CONFIG_MAPPING["llava"](vision_config=vision, text_config={"model_type": "llama", **COMMON})
    model = attach(AutoModelForImageTextToText.from_config(config), WideConfig(ffn_group_size=16))
    layers = [spec.layer for spec in attachment(model).specs]
    assert all(a is b for a, b in zip(layers, model.model.language_model.layers, strict=True))


def test_mixture_of_experts_gets_attention_routing_only():
    model = make("mixtral", num_local_experts=2, num_experts_per_tok=1)
    attach(model, WideConfig())
    with torch.no_grad(), capture_routing(model) as routing:
        model(tokens())
    assert routing[0].ffn is None
    assert routing[0].attention is not None
    assert "mixture of experts" in attachment(model).specs[0].ffn_reason


def test_a_copied_model_routes_by_its_own_routers():
    import copy

    model, ids = attach(make("llama"), WideConfig(ffn_group_size=16)), tokens()
    twin = copy.deepcopy(model)
    for router in attachment(twin).routers():
        router.threshold = float("-inf")
    with torch.no_grad(), bypass(twin):
        dense = twin(ids).logits
    with torch.no_grad():
        assert torch.equal(twin(ids).logits, dense)
        assert not torch.equal(model(ids).logits, dense)


def test_observe_gives_masks_with_gradient_and_margins():
    model, ids = attach(make("llama"), WideConfig(ffn_group_size=16)), tokens()
    model.train()
    with observe(model) as routing:
        model(ids)
    assert routing[0].ffn.requires_grad
    assert set(routing[0].ffn.unique().tolist()) <= {0.0, 1.0}
    assert routing[0].ffn_margin.shape == routing[0].ffn.shape
