"""D-LLM with eviction: what skipping tokens leave in a layer is seen by no one, in one forward or step by step."""

import pytest
import torch
from depth_toys import counted, kept_weights, logits, random_ids, train
from depth_toys import cyclic_text as blocks_of_text
from recount import layer_weights
from tiny import dense_model, stage
from torch.nn import functional
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from wide.config import ObjectiveConfig
from wide.errors import ConfigError, ShapeError, UnsupportedModelError
from wide.grouping import Grouping
from wide.inference.optimize import optimize
from wide.methods.catalogue import DLLMOriginalConfig
from wide.methods.dllm import route_original
from wide.methods.method import Target
from wide.models.adapter import load
from wide.models.attach import attach, attachment, detach, is_attached
from wide.models.discovery import discover
from wide.models.lora import add_lora
from wide.models.observe import capture_routing, force_routing
from wide.plan import Dense, Following, LayerPlan, Plan, Routed
from wide.routing import LayerRouting
from wide.training.modes import training_mode
from wide.training.objective import Objective

LENGTH = 12
SETTINGS = DLLMOriginalConfig(router_rank=8, dense_layers=1)
DENSE = LayerPlan(attention=Dense(), ffn=Dense())


def ids(rows=2, length=LENGTH):
    return random_ids(rows, length)


def plan(evicts=True, layers=2, first_tokens=0, **changes):
    attention = {"grouping": Grouping.whole(32), "rank": 8, "router_input": "layer_input", "form": "dllm"}
    routed = Routed(**(attention | {"evicts": evicts, "first_tokens": first_tokens} | changes))
    return Plan((LayerPlan(attention=routed, ffn=Following()),) * layers)


def routed_model(evicts=True, first_tokens=0, **changes):
    """A model whose routers skip about a third of the tokens of each layer."""
    model = attach(dense_model(**changes), plan(evicts, first_tokens=first_tokens))
    torch.manual_seed(5)
    for router in attachment(model).routers():
        torch.nn.init.normal_(router.up, std=2.0)
        router.bias.data.zero_()
        router.threshold = -1.0
    return model


def masks(rows=2, length=LENGTH, layers=2):
    """Two tokens in three execute; the first always does."""
    drawn = torch.rand(layers, rows, length, 1, generator=torch.Generator().manual_seed(1)) < 2 / 3
    drawn[:, :, 0] = True
    return [LayerRouting(attention=layer) for layer in drawn]


@torch.no_grad()
def decoded(model, tokens, split, cache=None):
    """The logits of a prefill and of one step for each further token."""
    first = model(input_ids=tokens[:, :split], use_cache=True, past_key_values=cache)
    steps, cache = [first.logits], first.past_key_values
    for position in range(split, tokens.shape[1]):
        out = model(input_ids=tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
        steps.append(out.logits)
    return torch.cat(steps, 1)


@torch.no_grad()
def expected_attention(model, hidden, executes):
    """Softmax over the executing keys alone, in plain torch, for the first layer's attention without RoPE's help."""
    attention = model.model.layers[0].self_attn
    rows, length, _ = hidden.shape
    cos, sin = model.model.rotary_emb(hidden, torch.arange(length)[None])

    def rotated(x):
        half = x.shape[-1] // 2
        return x * cos[:, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[:, None]

    def heads(projection):
        return projection(hidden).view(rows, length, -1, attention.head_dim).transpose(1, 2)

    query, key = rotated(heads(attention.q_proj)), rotated(heads(attention.k_proj)).repeat_interleave(2, 1)
    visible = torch.ones(length, length).tril().bool() & executes[:, None, None, :, 0]
    scores = (query @ key.transpose(-1, -2) * attention.scaling).masked_fill(~visible, float("-inf"))
    seen = scores.softmax(-1) @ heads(attention.v_proj).repeat_interleave(2, 1)
    return attention.o_proj.forward(seen.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_token_sees_the_executing_tokens_alone(implementation):
    model = routed_model()
    model.set_attn_implementation(implementation)
    routing, found = masks(), []
    model.model.layers[0].self_attn.register_forward_hook(
        lambda _m, args, kwargs, output: found.append((kwargs["hidden_states"], output[0])), with_kwargs=True
    )
    with force_routing(model, routing):
        logits(model, ids())
    hidden, output = found[0]
    executes = routing[0].attention
    wanted = expected_attention(model, hidden, executes)
    torch.testing.assert_close(output[executes[..., 0]], wanted[executes[..., 0]], atol=1e-5, rtol=1e-4)
    assert not output[~executes[..., 0]].any()


def test_eviction_changes_what_later_tokens_see_and_only_that():
    tokens, routing = ids(), masks()
    with force_routing(model := routed_model(), routing):
        evicting = logits(model, tokens)
    with force_routing(model := routed_model(evicts=False), routing):
        keeping = logits(model, tokens)
    skips = torch.stack([~layer.attention[..., 0] for layer in routing]).any(0)
    for row in range(len(tokens)):
        first = int(skips[row].int().argmax())
        torch.testing.assert_close(evicting[row, :first], keeping[row, :first])
        assert not torch.allclose(evicting[row, first + 1 :], keeping[row, first + 1 :], atol=1e-3)


def test_where_nobody_skips_it_is_the_dense_model():
    model = routed_model()
    everywhere = [LayerRouting(attention=torch.ones(2, LENGTH, 1, dtype=torch.bool)) for _ in range(2)]
    with force_routing(model, everywhere):
        torch.testing.assert_close(logits(model, ids()), logits(dense_model(), ids()), atol=2e-5, rtol=1e-4)


def test_a_skipping_token_can_be_anything_without_the_others_of_its_layer_noticing():
    model, routing, tokens = routed_model(), masks(), ids()
    routing[1].attention[:] = True
    routing[0].attention[:, 4] = False
    outputs = []
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda _m, _a, output: outputs.append(output))
    layer.register_forward_pre_hook(lambda _m, args: (args[0] + shift,))
    for strength in (0.0, 7.0):
        shift = torch.zeros(1, LENGTH, 1)
        shift[:, 4] = strength
        with force_routing(model, routing):
            logits(model, tokens)
    others = torch.arange(LENGTH) != 4
    torch.testing.assert_close(outputs[0][:, others], outputs[1][:, others])


@pytest.mark.parametrize("split", [1, 5])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("heads", [{}, {"num_attention_heads": 4, "num_key_value_heads": 1}])
def test_cached_decoding_is_the_full_forward(split, kind, heads):
    from transformers import StaticCache

    model, tokens = routed_model(first_tokens=2, **heads), ids()
    with capture_routing(model) as routing:
        whole = logits(model, tokens)
    assert any(bool((~layer.attention).any()) for layer in routing)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 4) if kind == "static" else None
    torch.testing.assert_close(decoded(model, tokens, split, cache), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_token_whose_values_are_zero_is_not_evicted(kind):
    from transformers import StaticCache

    model, tokens = routed_model(), ids()
    with torch.no_grad():
        # What an embedding of zeros, as of padding_idx, gives in the first layer; all tokens execute there.
        model.model.embed_tokens.weight[tokens[0, 2]] = 0
    attachment(model).routers()[0].threshold = float("-inf")
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 4) if kind == "static" else None
    torch.testing.assert_close(decoded(model, tokens, 5, cache), logits(model, tokens), atol=1e-5, rtol=1e-4)


def test_beams_take_their_evicted_tokens_along():
    model, tokens = routed_model(first_tokens=2), ids()
    settings = {"do_sample": False, "num_beams": 3, "max_new_tokens": 6, "attention_mask": torch.ones_like(tokens)}
    found = model.generate(tokens, pad_token_id=0, **settings)
    assert torch.equal(found, model.generate(tokens, pad_token_id=0, use_cache=False, **settings))


def test_lora_cannot_fill_evicted_values():
    model, tokens = routed_model(), ids()
    add_lora(model, rank=2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    torch.testing.assert_close(decoded(model.eval(), tokens, 5), logits(model, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("first_tokens", [0, 2])
def test_left_padding_changes_nothing(first_tokens):
    model, tokens = routed_model(first_tokens=first_tokens), ids()
    padded = functional.pad(tokens, (3, 0), value=9)
    valid = functional.pad(torch.ones_like(tokens), (3, 0))
    positions = (valid.cumsum(-1) - 1).clamp(min=0)
    found = logits(model, padded, attention_mask=valid, position_ids=positions)[:, 3:]
    torch.testing.assert_close(found, logits(model, tokens), atol=1e-4, rtol=1e-4)
    settings = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    wanted = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    for kind in (None, "static"):
        found = model.generate(padded, attention_mask=valid, cache_implementation=kind, **settings)
        assert torch.equal(found[:, 3:], wanted)


def test_the_first_tokens_execute_whatever_the_router_says():
    model = routed_model(first_tokens=2)
    for router in attachment(model).routers():
        router.threshold = float("inf")
    with capture_routing(model) as routing:
        decoded(model, ids(), 1)
        logits(model, ids())
    for layer in routing:
        assert layer.attention[:, :2].all()
        assert not layer.attention[:, 2:].any()


@pytest.mark.batches_on_cpu
def test_the_first_tokens_of_each_request_execute_in_a_batch():
    model = routed_model(evicts=False, first_tokens=2)
    prompts = [ids(1, length)[0].tolist() for length in (5, 9, 3)]
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    found = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=pages, progress_bar=False
    )
    for prompt, answer in zip(prompts, found.values(), strict=True):
        tokens = torch.tensor([prompt])
        alone = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
        assert list(answer.generated_tokens) == alone[0, len(prompt) :].tolist()


def test_the_gradient_reaches_the_router_through_the_keys_that_others_see():
    model = routed_model()
    with torch.no_grad():
        # Only what others see is left: neither half of a skipping token's own layer has anything to lose.
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
    tokens = ids()
    with training_mode(model, routers=True, gradient_checkpointing=False):
        torch.manual_seed(0)
        out = model(input_ids=tokens).logits[:, -1]
        (out * torch.randn_like(out)).sum().backward()
    router = attachment(model).routers()[0]
    assert float(router.up.grad.abs().sum()) > 0
    assert torch.isfinite(router.up.grad).all()


def test_training_and_inference_evict_alike():
    model, tokens, routing = routed_model(), ids(), masks()
    with force_routing(model, routing):
        wanted = logits(model, tokens)
    with force_routing(model, routing), training_mode(model, routers=True, gradient_checkpointing=False):
        found = model(input_ids=tokens).logits.detach()
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=2e-6)


def test_skipping_saves_keys_values_and_cache():
    model, text = routed_model(), blocks_of_text(8)
    found, work = counted(model, text, 4), layer_weights(discover(model)[0])
    assert 0.05 < found.mean < 0.95
    assert work.key_value > 0
    assert found.kv_cache_kept == pytest.approx(1 - found.attention)
    assert found.linear_flops_layers == pytest.approx(found.mean)


@pytest.mark.usefixtures("every_point")
def test_training_meets_the_target_over_all_layers(tmp_path):
    model, text = dense_model(num_hidden_layers=3), blocks_of_text()
    run = {"stage": stage(steps=20, batch_size=16), "objective": ObjectiveConfig(), "output": tmp_path}
    with kept_weights(model):
        _, deviations = train(model, route_original, text, Target(sparsity=0.4), SETTINGS, **run)
    first, *others = attachment(model).plan.layers
    assert first == LayerPlan(attention=Dense(), ffn=Dense())
    assert all(layer.attention.evicts and layer.attention.first_tokens == 2 for layer in others)
    assert counted(model, text).mean * 2 / 3 == pytest.approx(0.4, abs=0.02)
    for words in ("2 of 3 layers", "LoRA has the recipe of all rows, its temperatures included"):
        assert any(words in sentence for sentence in deviations)
    again = load(dense_model(num_hidden_layers=3), tmp_path / "adapter")
    assert torch.equal(logits(again, ids()), logits(model, ids()))
    tokens = ids()
    assert torch.equal(logits(detach(again), tokens), logits(dense_model(num_hidden_layers=3), tokens))


def test_routers_begin_by_executing_most_tokens():
    model = attach(dense_model(hidden_size=32), plan())
    torch.manual_seed(0)
    with training_mode(model, routers=True, gradient_checkpointing=False), capture_routing(model) as routing:
        logits(model, ids(64))
    rate = torch.stack([layer.attention for layer in routing]).float().mean()
    assert float(rate) == pytest.approx(0.87, abs=0.08)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="one group"):
        plan(grouping=Grouping(32, 16))
    with pytest.raises(ConfigError, match=r"first_tokens must lie in \[0, "):
        plan(first_tokens=-1)
    with pytest.raises(ConfigError, match="dense_layers"):
        DLLMOriginalConfig(dense_layers=-1)
    with pytest.raises(ConfigError, match="temperature"):
        DLLMOriginalConfig(temperature=0.0)
    ffn = Routed(grouping=Grouping.whole(64), rank=8, evicts=True)
    with pytest.raises(ShapeError, match="only an attention evicts"):
        attach(dense_model(), Plan((LayerPlan(attention=Dense(), ffn=ffn),) * 2))
    with pytest.raises(UnsupportedModelError, match="evicts"):
        optimize(routed_model())
    run = {"stage": stage(), "objective": ObjectiveConfig()}
    for settings, words in ((DLLMOriginalConfig(), "none of 2"), (SETTINGS, "stay below 0.5")):
        model = dense_model()
        with pytest.raises(ConfigError, match=words):
            train(model, route_original, blocks_of_text(), Target(sparsity=0.6), settings, **run)
        assert not is_attached(model)


def test_distillation_and_the_objective_run_with_eviction():
    model = routed_model()
    with training_mode(model, routers=True, gradient_checkpointing=True):
        loss, _ = Objective(model, ObjectiveConfig(distillation=1.0))(blocks_of_text().batch([0, 1]))
        loss.backward()
    assert all(torch.isfinite(router.up.grad).all() for router in attachment(model).routers())
