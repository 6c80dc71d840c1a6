"""Sliced models in use: caches, padding, generation, other attention functions, checkpoints, compilation."""

import copy
import itertools
import json
from dataclasses import asdict

import pytest
import torch
from families import FAMILIES, alternating, distinct, make, tokens
from materialise_plans import depth_plan, number_of_parameters, stream_plan, twins, width_plan
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from wide.errors import AdapterError, UnsupportedModelError
from wide.materialisation.checkpoint import load_checkpoint, save_checkpoint
from wide.materialisation.materialise import materialise
from wide.materialisation.shape import LayerShape, ModelShape
from wide.models.attach import attach
from wide.models.files import SUMS
from wide.plan import LayerPlan, Plan, Skipped
from wide.schema import typed

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}


def logits(model, ids=None, **options):
    with torch.no_grad():
        return model(tokens() if ids is None else ids, **options).logits


def mixed(family="llama", **changes):
    """Return (masked, sliced): four layers, the first without attention, the second with uneven KV heads."""
    model = make(family, **({"num_hidden_layers": 4} | NO_ROPE.get(family, {}) | changes))
    plan, tensors = width_plan(model, [None, [0, 2, 3], [1], []], [17, 30, None, 1])
    layers = list(plan.layers)
    layers[0] = LayerPlan(attention=Skipped(), ffn=layers[0].ffn)
    layers[2] = LayerPlan(attention=layers[2].attention, ffn=Skipped())
    masked, physical = twins(model, Plan(tuple(layers)), tensors)
    return masked, materialise(physical)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "stream"), *itertools.product(["llama", "gemma3_text", "cohere2"], ["depth", "width"])],
)
def test_other_models_of_the_same_configuration_keep_it(family, kind):
    model = make(family, num_hidden_layers=4)
    other = type(model)(model.config)
    before = other.config.to_dict()
    plans = {
        "depth": lambda: (depth_plan([(True, True), (False, False), (False, False), (False, True)]), {}),
        "width": lambda: width_plan(model, [None, [0, 1], None, None], [17, None, None, None]),
        "stream": lambda: stream_plan(model, 16),
    }
    plan, tensors = plans[kind]()
    sliced = materialise(attach(model, plan, tensors=tensors))
    assert sliced.config is not other.config
    assert other.config.to_dict() == before
    assert type(other.config) is type(make(family).config)
    configs = {id(module.config) for module in sliced.modules() if "config" in vars(module)}
    assert configs == {id(sliced.config)}


NO_ROPE = {"smollm3": {"no_rope_layers": [1, 0, 1, 0]}}


@pytest.mark.parametrize(("family", "cache"), alternating(FAMILIES, ["static", "dynamic"]))
def test_generation_equals_the_masked_model_and_the_full_forward(family, cache):
    masked, physical = mixed(family)
    ids = tokens(batch=2, length=6)
    out = physical.generate(ids, cache_implementation=cache, output_logits=True, return_dict_in_generate=True, **GREEDY)
    full = logits(physical, out.sequences[:, :-1], use_cache=False)
    torch.testing.assert_close(full[:, 5:], torch.stack(out.logits, dim=1).float(), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(full, logits(masked, out.sequences[:, :-1], use_cache=False), **CLOSE)


@pytest.mark.parametrize("family", ["gemma2", "exaone4", "mistral"])
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_any_layer_may_lose_its_attention_where_kinds_of_attention_alternate(family, first):
    kinds = {} if family == "mistral" else {"layer_types": ["sliding_attention", "full_attention"] * 2}
    model = make(family, num_hidden_layers=4, sliding_window=4, **kinds)
    plan = depth_plan([(index == first or index == first + 1, False) for index in range(4)])
    masked, physical = twins(model, plan)
    materialise(physical)
    ids = tokens(batch=2, length=7)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    for cache in ("dynamic", "static"):
        options = {"attention_mask": mask, "cache_implementation": cache, "output_logits": True} | GREEDY
        found, wanted = (m.generate(ids, return_dict_in_generate=True, **options) for m in (physical, masked))
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), **CLOSE)
    # Tokens that were guessed wrong are taken back from all layers.
    found, wanted = (m.generate(ids[1:], prompt_lookup_num_tokens=2, **GREEDY) for m in (physical, masked))
    assert torch.equal(found, wanted)


def test_the_cache_holds_only_the_kv_heads_that_are_left():
    _, physical = mixed()
    cache = DynamicCache(config=physical.config)
    with torch.no_grad():
        physical(tokens(2, 9), past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 9
    shapes = [None if layer.keys is None else tuple(layer.keys.shape) for layer in cache.layers]
    # The first layer, without attention, counts the tokens; the last one, without heads, is asked for nothing.
    assert shapes == [(2, 1, 9, 1), (2, 2, 9, 8), (2, 1, 9, 8), None]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_the_valid_tokens(side):
    _, physical = mixed()
    ids, pad = tokens(1, 6), torch.zeros(1, 3, dtype=torch.long)
    ones, zeros = torch.ones(1, 6, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)
    pieces = [(pad, zeros), (ids, ones)] if side == "left" else [(ids, ones), (pad, zeros)]
    padded, valid = (torch.cat(list(values), dim=1) for values in zip(*pieces, strict=True))
    positions = (valid.cumsum(-1) - 1).clamp(min=0)
    found = logits(physical, padded, attention_mask=valid, position_ids=positions)
    torch.testing.assert_close(found[valid.bool()], logits(physical, ids)[0], atol=1e-5, rtol=1e-4)


def test_a_left_padded_batch_generates_what_its_rows_generate_alone():
    _, physical = mixed()
    ids = tokens(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    valid = torch.cat([torch.zeros(1, 3), torch.ones(1, 6)], dim=1).long()
    batch = torch.cat([padded, tokens(1, 9, seed=5)])
    mask = torch.cat([valid, torch.ones(1, 9, dtype=torch.long)])
    together = physical.generate(batch, attention_mask=mask, **GREEDY)
    alone = physical.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert together[0, 9:].tolist() == alone[0, 6:].tolist()
    beams = physical.generate(batch, attention_mask=mask, num_beams=3, **GREEDY)
    assert beams.shape == together.shape


@pytest.mark.parametrize("family", distinct(FAMILIES))
def test_save_and_load_give_the_same_bits(family, tmp_path):
    _, physical = mixed(family)
    physical.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=physical.config._attn_implementation, dtype=torch.float32
    ).eval()
    assert type(again) is type(physical)
    assert torch.equal(logits(again), logits(physical))
    assert number_of_parameters(again) == number_of_parameters(physical)
    assert torch.equal(again.generate(tokens(), **GREEDY), physical.generate(tokens(), **GREEDY))


def test_a_sliced_model_saves_copies_and_loads_again_and_again(tmp_path):
    _, physical = mixed("phi3")
    twin = copy.deepcopy(physical)
    twin.save_pretrained(tmp_path / "one")
    again = load_checkpoint(tmp_path / "one", dtype=torch.float32)
    again.save_pretrained(tmp_path / "two")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_damaged_checkpoints_are_refused(tmp_path):
    _, physical = mixed()
    physical.save_pretrained(tmp_path)
    file, config_file = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, config = load_file(file), json.loads(config_file.read_text())
    save_file({k: v for k, v in tensors.items() if "kv_index" not in k}, file, metadata={"format": "pt"})
    (tmp_path / SUMS).unlink()
    with pytest.raises(AdapterError, match="missing model"):
        load_checkpoint(tmp_path)
    save_file(tensors, file, metadata={"format": "pt"})
    for damage, words in (
        ({"wide_shape": None}, "needs wide_shape"),
        ({"wide_shape": {"layers": config["wide_shape"]["layers"][:2], "stream": None}}, "has 2 layers"),
        ({"wide_shape": {"layers": [{"query_heads": [9], "channels": 1}] * 4, "stream": None}}, "query heads"),
    ):
        config_file.write_text(json.dumps(config | damage))
        with pytest.raises(AdapterError, match=words):
            load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"layers": []},
        {"layers": {}, "stream": None},
        {"layers": [], "stream": -1},
        {"layers": [{"query_heads": [1, 0], "channels": 1}], "stream": None},
        {"layers": [{"query_heads": "all", "channels": 1}], "stream": None},
        {"layers": [{"query_heads": None, "channels": True}], "stream": None},
        {"layers": [{"query_heads": None}], "stream": None},
    ],
)
def test_malformed_shapes_are_refused(data):
    with pytest.raises(AdapterError):
        typed(ModelShape, data, "wide_shape")


def test_shapes_survive_json():
    layers = (LayerShape(), LayerShape(query_heads=(0, 3), channels=5), LayerShape(query_heads=(), channels=None))
    shape = ModelShape(layers=layers, stream=7)
    assert typed(ModelShape, json.loads(json.dumps(asdict(shape))), "wide_shape") == shape
    assert not shape.is_ordinary
    assert ModelShape(layers=(LayerShape(),)).is_ordinary


def test_an_attention_function_registered_later_cannot_miss_the_gather():
    _, physical = mixed()
    AttentionInterface.register("late", sdpa_attention_forward)
    physical.set_attn_implementation("late")

    def forgiving(module, query, key, value, *_args, **_kwargs):
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register("late", forgiving)
    with pytest.raises(UnsupportedModelError, match="were not gathered"):
        logits(physical)
    physical.set_attn_implementation("eager")
    logits(physical)


def test_continuous_batching_is_refused():
    _, physical = mixed()
    with pytest.raises(UnsupportedModelError, match="continuous batching"):
        physical.generate_batch(inputs=[[3, 4]], progress_bar=False)


@pytest.mark.parametrize("family", ["phi3"])
def test_the_sliced_forward_compiles_as_one_graph(family):
    _, physical = mixed(family)
    torch._dynamo.reset()
    compiled = torch.compile(physical, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled), logits(physical), **CLOSE)


def test_training_a_sliced_model_reaches_what_is_left():
    _, physical = mixed()
    physical.train()
    physical.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    physical(tokens(), labels=tokens(), use_cache=False).loss.backward()
    missing = [n for n, p in physical.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert missing == []


def test_shortened_models_generate_with_cache_positions_of_their_own():
    model = make("llama", num_hidden_layers=4)
    plan = depth_plan([(True, True), (False, False), (True, True), (False, False)])
    masked, physical = attach(copy.deepcopy(model), plan), materialise(attach(model, plan))
    assert [layer.self_attn.layer_idx for layer in physical.model.layers] == [0, 1]
    assert torch.equal(physical.generate(tokens(), **GREEDY), masked.generate(tokens(), **GREEDY))


@pytest.mark.parametrize("how", ["sliced", "masked"])
def test_full_checkpoints_of_static_plans_become_ordinary_or_sliced_ones(tmp_path, how):
    model = make("llama", num_hidden_layers=3)
    for number, plan in enumerate(
        (
            (depth_plan([(True, True), (False, False), (False, False)]), {}),
            width_plan(model, [[0, 1], None, [3]], [5, 6, None]),
        )
    ):
        masked, _ = twins(model, *plan)
        save_checkpoint(masked, tmp_path / "full")
        physical = materialise(load_checkpoint(tmp_path / "full", dtype=torch.float32), how)
        torch.testing.assert_close(logits(physical), logits(masked), **CLOSE)
        sliced = how == "sliced" and number == 1
        assert type(physical).__name__ == ("SlicedLlamaForCausalLM" if sliced else "LlamaForCausalLM")
        physical.save_pretrained(tmp_path / "physical")
        again = (
            load_checkpoint(tmp_path / "physical") if sliced else type(physical).from_pretrained(tmp_path / "physical")
        )
        assert torch.equal(logits(again), logits(physical))
        assert not hasattr(again.config, "wide")


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
    with pytest.raises(UnsupportedModelError, match="a Quantised with a Parameter weight"):
        materialise(physical, how)
    assert all(torch.equal(p, before[name]) for name, p in physical.named_parameters())
