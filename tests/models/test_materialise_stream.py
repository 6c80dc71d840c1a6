"""A rotated and cut residual stream computes what the projected one computes."""

import pytest
import torch
from families import make, tokens
from materialise_plans import depth_plan, number_of_parameters, scales, stream_plan, twins
from transformers import AutoModelForCausalLM

from wide.errors import UnsupportedModelError
from wide.grouping import Grouping
from wide.materialisation.checkpoint import SlicedMixin
from wide.materialisation.cut import check_cuttable
from wide.materialisation.materialise import materialise
from wide.materialisation.stream import norm_scales
from wide.models.attach import is_attached
from wide.models.discovery import discover
from wide.plan import Dense, Kept, LayerPlan, Skipped

PLAIN = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "seed_oss", "arcee", "apertus", "ernie4_5", "helium")
AFTER_NORMS = ("gemma2", "gemma3_text", "olmo2", "olmo3", "glm4", "exaone4", "cohere2")


def logits(model, ids=None, **options):
    with torch.no_grad():
        return model(tokens() if ids is None else ids, **options).logits


def shaken(family, **changes):
    """Return a tiny model whose norm weights and biases are not those of a fresh one."""
    model = make(family, **changes)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.rand(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("kept", [32, 13])
@pytest.mark.parametrize("family", PLAIN)
def test_a_cut_stream_equals_the_projected_one(family, kept):
    model = shaken(family)
    dense = logits(model)
    masked, physical = twins(model, *stream_plan(model, kept))
    materialise(physical)
    assert isinstance(physical, SlicedMixin)
    assert not is_attached(physical)
    torch.testing.assert_close(logits(physical), logits(masked), atol=1e-4, rtol=1e-3)
    close = torch.allclose(logits(physical), dense, atol=1e-4, rtol=1e-3)
    assert close == (kept == 32)


@pytest.mark.parametrize("tied", [False, True])
def test_float64_agrees_further_and_the_head_is_untied(tied):
    model = shaken("llama", tie_word_embeddings=tied).double()
    plan, tensors = stream_plan(model, 13)
    # The bases themselves are float32; only what is computed with them is more exact.
    masked, physical = twins(model, plan, tensors)
    materialise(physical)
    torch.testing.assert_close(logits(physical), logits(masked), atol=2e-6, rtol=1e-5)
    assert physical.lm_head.weight.shape == (97, 32)
    assert physical.model.embed_tokens.weight.shape == (97, 13)
    assert not physical.config.tie_word_embeddings


def test_parameters_are_those_of_the_closed_form():
    model = make("llama")
    _, physical = twins(model, *stream_plan(model, 24))
    materialise(physical)
    width, kept, query, kv, ffn, vocabulary = 32, 24, 32, 16, 64, 97
    layer = kept * (2 * query + 2 * kv + 3 * ffn) + 2 * kept * kept
    last = layer + (width - kept) * (ffn + kept)
    assert number_of_parameters(physical) == layer + last + vocabulary * (kept + width) + width


def test_kept_and_skipped_halves_combine_with_a_cut_stream():
    model = shaken("qwen2", num_hidden_layers=3)
    attention = Kept(grouping=Grouping(32, 8), kept=3)
    ffn = Kept(grouping=Grouping(64, 1), kept=20)
    layers = (
        LayerPlan(attention=attention, ffn=Skipped()),
        LayerPlan(attention=Skipped(), ffn=Skipped()),
        LayerPlan(attention=Dense(), ffn=ffn),
    )
    plan, tensors = stream_plan(model, 20, layers)
    tensors["layers.0.attention.scale"] = scales(4, 3, seed=0)
    tensors["layers.2.ffn.scale"] = scales(64, 20, seed=1)
    masked, physical = twins(model, plan, tensors)
    materialise(physical)
    assert len(physical.model.layers) == 3
    torch.testing.assert_close(logits(physical), logits(masked), atol=1e-4, rtol=1e-3)


def test_a_last_ffn_that_is_skipped_still_gives_the_head_all_dimensions():
    model = shaken("llama")
    layers = (LayerPlan(attention=Dense(), ffn=Dense()), LayerPlan(attention=Dense(), ffn=Skipped()))
    masked, physical = twins(model, *stream_plan(model, 20, layers))
    torch.testing.assert_close(logits(materialise(physical)), logits(masked), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", PLAIN)
def test_save_and_load_generation_and_hidden_states(family, tmp_path):
    model = shaken(family, tie_word_embeddings=True)
    masked, physical = twins(model, *stream_plan(model, 20))
    materialise(physical).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(again) is type(physical)
    assert torch.equal(logits(again), logits(physical))
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    for cache in ("dynamic", "static"):
        assert torch.equal(
            again.generate(tokens(), cache_implementation=cache, **options), masked.generate(tokens(), **options)
        )
    with torch.no_grad():
        hidden = again(tokens(), output_hidden_states=True).hidden_states
    assert [h.shape[-1] for h in hidden] == [20, 20, 32]


def test_bfloat16_weights_stay_bfloat16_and_gradients_flow():
    model = shaken("llama").to(torch.bfloat16)
    _, physical = twins(model, *stream_plan(model, 20))
    materialise(physical)
    assert {p.dtype for p in physical.parameters()} == {torch.bfloat16}
    physical.train()
    physical.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    physical(tokens(), labels=tokens(), use_cache=False).loss.backward()
    assert physical.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    assert physical.model.layers[0].attention_shortcut.weight.grad is None


@pytest.mark.parametrize("family", AFTER_NORMS)
def test_families_whose_stream_cannot_be_rotated_are_refused(family):
    model = make(family)
    with pytest.raises(UnsupportedModelError):
        materialise(twins(model, *stream_plan(model, 20))[1])


def test_a_stream_has_no_masked_form():
    model = make("llama")
    _, physical = twins(model, *stream_plan(model, 20))
    with pytest.raises(UnsupportedModelError, match="how='sliced'"):
        materialise(physical, "masked")
    assert is_attached(physical)


def test_a_norm_that_is_no_rms_norm_is_refused():
    model = make("llama")
    model.model.layers[1].input_layernorm = torch.nn.LayerNorm(32, bias=False)
    with pytest.raises(UnsupportedModelError, match="layer 1: LayerNorm is not an RMS norm"):
        norm_scales(discover(model)[1])
    check_cuttable(discover(model)[1], "ffn")


def test_random_dropping_from_the_stream_is_refused():
    model = make("phi3", resid_pdrop=0.1)
    with pytest.raises(UnsupportedModelError, match="resid_attn_dropout"):
        materialise(twins(model, *stream_plan(model, 20))[1])


def test_a_plan_without_a_stream_leaves_the_tie_of_head_and_embedding():
    model = make("llama", tie_word_embeddings=True)
    _, physical = twins(model, depth_plan([(True, False), (False, True)]))
    materialise(physical)
    assert physical.lm_head.weight is physical.model.embed_tokens.weight
