"""What holds for every row of the benchmark, on a tied model with three query heads a KV head."""

import functools
import re

import pytest
import torch
from depth_toys import blocks_of, counted, decoded, logits, own_text, random_ids, toy_model
from recount import recount
from torch.nn import functional
from transformers import AutoModelForCausalLM

from wide.config import RecoverConfig, StageConfig
from wide.errors import UnsupportedModelError
from wide.evaluation.evaluate import evaluate
from wide.inference.optimize import optimize
from wide.materialisation.checkpoint import SlicedMixin, load_checkpoint
from wide.materialisation.materialise import materialise
from wide.methods.apply import apply, expected_time
from wide.methods.catalogue import (
    BlockPrunerConfig,
    CoopPrunerConfig,
    DDPConfig,
    DLLMConfig,
    DLLMOriginalConfig,
    ShortenedConfig,
    SkipGPTConfig,
    SkipGPTOriginalConfig,
    SliceGPTConfig,
    TyrConfig,
    WideMethodConfig,
    get,
    names,
)
from wide.methods.method import Target
from wide.models.adapter import load, save
from wide.models.attach import attachment
from wide.models.lora import add_lora, merge_lora
from wide.models.observe import capture_routing
from wide.training.stages import recover

LENGTH = 32
SHAPE = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
WINDOWS = {"num_windows": 8, "window_length": LENGTH, "batch_size": 8}
SETTINGS = {
    "shortened-ppl": ShortenedConfig(**WINDOWS),
    "shortened-taylor": ShortenedConfig(**WINDOWS),
    "cooppruner": CoopPrunerConfig(strata="spanning", num_masks=30, num_contribution_masks=64, epochs=4, **WINDOWS),
    "blockpruner": BlockPrunerConfig(**WINDOWS),
    "slicegpt": SliceGPTConfig(**WINDOWS),
    "tyr": TyrConfig(
        ffn_rounds=2,
        iterations=1,
        generations=1,
        offspring=4,
        stage_tokens=(64, 128),
        survivors=(2,),
        search_window_length=LENGTH,
        **WINDOWS,
    ),
    "ddp": DDPConfig(steps=12, batch_size=4, micro_batch_size=4, sequence_length=LENGTH),
    "skipgpt": SkipGPTConfig(router_rank=4),
    "skipgpt-original": SkipGPTOriginalConfig(router_rank=4),
    "dllm": DLLMConfig(router_rank=4),
    "dllm-original": DLLMOriginalConfig(router_rank=4, dense_layers=1, first_tokens=1),
    "wide": WideMethodConfig(ffn_group_size=16, router_rank=4),
}
ROWS = [name for name in names() if name != "dense"]
ROUTED = {name for name in ROWS if get(name).trains}
STAGE = StageConfig(steps=3, batch_size=4, sequence_length=LENGTH, learning_rate=1e-2, checkpoint_every=0)


def fresh():
    return toy_model(4, tie_word_embeddings=True, **SHAPE)


@functools.cache
def blocks():
    return blocks_of(own_text(fresh(), 48, LENGTH))


def pruned(name, sparsity=0.5, model=None, seed=17):
    model = fresh() if model is None else model
    report = apply(model, get(name), blocks(), Target(sparsity=sparsity), SETTINGS.get(name), stage=STAGE, seed=seed)
    return model, report


@functools.cache
def at_half(name):
    return pruned(name)


def ids(rows=2, length=10):
    return random_ids(rows, length, 61)


def decisions(routing):
    """Return the logged masks of routed halves by (layer, half)."""
    masks = {
        (index, half): getattr(layer, half) for index, layer in enumerate(routing) for half in ("attention", "ffn")
    }
    return {key: mask.clone() for key, mask in masks.items() if mask is not None}


def test_every_row_has_small_settings_here():
    assert set(SETTINGS) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_the_report_is_what_a_recount_finds(name):
    model, report = at_half(name)
    found = counted(model, blocks())
    assert (report["attention"], report["ffn"]) == pytest.approx((found.attention, found.ffn), abs=1e-6)
    assert report["linear_flops"] == pytest.approx(found.linear_flops_layers, abs=1e-6)
    assert report["kv_cache_kept"] == pytest.approx(found.kv_cache_kept, abs=1e-6)
    # By hand, too, with nothing of the counter.
    reported = (report["attention"], report["ffn"], report["linear_flops"], report["kv_cache_kept"])
    assert reported == pytest.approx(recount(model, blocks().in_order(16)), abs=1e-6)
    # Of four layers D-LLM's own form may skip three.
    wanted = 0.5 * 4 / 3 if name == "dllm-original" else 0.5
    assert report["nominal"] == pytest.approx(wanted, abs=0.06)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ROUTED])
def test_what_a_method_costs_is_known_before_it_starts(name):
    _, report = at_half(name)
    told = SETTINGS[name].num_tokens(4, 0.5)
    spent = report["tokens_forward"] + 3 * report["tokens_backward"]
    # Gradients are told as the forwards of the other row with these settings; equal candidates are run once.
    assert 0.5 <= spent / told <= 1.3
    words = expected_time(fresh(), get(name), blocks(), 0.5, SETTINGS[name], STAGE)
    assert re.fullmatch(r"about \d+ s", words)


@pytest.mark.parametrize("name", ROWS)
def test_the_same_seed_decides_the_same_and_files_keep_it(name, tmp_path):
    model, _ = at_half(name)
    again, _ = pruned(name)
    assert attachment(again).plan == attachment(model).plan
    assert torch.equal(logits(again, ids()), logits(model, ids()))
    save(model, tmp_path / "adapter")
    loaded = load(fresh(), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded, ids()), logits(model, ids()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", ["sliced", "masked", "optimised"])
@pytest.mark.parametrize("name", sorted(set(ROWS) - ROUTED))
def test_what_is_cut_out_computes_what_the_masks_do(name, how, tmp_path):
    decided, _ = at_half(name)
    wanted = logits(decided, ids())
    save(decided, tmp_path / "adapter")
    model = load(fresh(), tmp_path / "adapter")
    if (name, how) == ("slicegpt", "masked"):
        with pytest.raises(UnsupportedModelError, match="sliced"):
            materialise(model, how)
        return
    if how == "optimised":
        found = logits(optimize(model.eval(), backend="torch"), ids())
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-3)
        return
    materialise(model, how).save_pretrained(tmp_path / "checkpoint")
    sliced = isinstance(model, SlicedMixin)
    assert not sliced or (how == "sliced" and (get(name).kind != "depth" or name == "blockpruner"))
    again = (load_checkpoint if sliced else AutoModelForCausalLM.from_pretrained)(tmp_path / "checkpoint")
    for physical in (model, again):
        torch.testing.assert_close(logits(physical.eval(), ids()), wanted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ROWS)
def test_cached_decoding_is_the_full_forward(name):
    model, tokens = at_half(name)[0], ids()
    torch.testing.assert_close(decoded(model, tokens, 4), logits(model, tokens), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_neither_logits_nor_decisions(name, side):
    model, tokens = at_half(name)[0], ids()
    pad = (3, 0) if side == "left" else (0, 3)
    real = slice(3, None) if side == "left" else slice(None, -3)
    valid = functional.pad(torch.ones_like(tokens), pad)
    positions = (valid.cumsum(-1) - 1).clamp(min=0)
    with capture_routing(model) as routing:
        wanted = logits(model, tokens)
    plain = decisions(routing)
    assert bool(plain) == (name in ROUTED)
    with capture_routing(model) as routing:
        found = logits(model, functional.pad(tokens, pad, value=7), attention_mask=valid, position_ids=positions)
    torch.testing.assert_close(found[:, real], wanted, atol=1e-3, rtol=1e-3)
    padded = decisions(routing)
    assert padded.keys() == plain.keys()
    assert all(torch.equal(padded[key][:, real], before) for key, before in plain.items())


@pytest.mark.parametrize("name", ROWS)
def test_lora_begins_as_nothing_and_leaves_the_sparsity(name, tmp_path):
    decided, report = at_half(name)
    save(decided, tmp_path / "adapter")
    model = load(fresh(), tmp_path / "adapter")
    before = logits(model, ids())
    add_lora(model, rank=4, alpha=8.0)
    assert torch.equal(logits(model.eval(), ids()), before)
    stage = RecoverConfig(
        steps=2,
        batch_size=4,
        sequence_length=LENGTH,
        learning_rate=1e-3,
        lora_rank=4,
        lora_alpha=8.0,
        checkpoint_every=0,
        train_routers=False,
    )
    routers = [value.clone() for router in attachment(model).routers() for value in router.parameters()]
    with capture_routing(model) as routing:
        logits(model, ids())
    earlier = decisions(routing)
    recover(model, blocks(), stage=stage)
    now = [value for router in attachment(model).routers() for value in router.parameters()]
    assert all(torch.equal(value, old) for value, old in zip(now, routers, strict=True))
    found = recount(model, blocks().in_order(16))
    # Routers see other streams after LoRA; what is pruned for all tokens stays to the last unit.
    share = 0.02 if name in ROUTED else 1e-6
    assert (found[0] + found[1]) / 2 == pytest.approx(report["nominal"], abs=share)
    with capture_routing(model) as routing:
        trained = logits(model, ids())
    assert not torch.equal(trained, before)
    unmerged = decisions(routing)
    # No LoRA comes before the first router.
    assert not unmerged or torch.equal(unmerged[min(unmerged)], earlier[min(earlier)])
    merge_lora(model)
    with capture_routing(model) as routing:
        merged = logits(model, ids())
    torch.testing.assert_close(merged, trained, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(mask, unmerged[key]) for key, mask in decisions(routing).items())
    assert recount(model, blocks().in_order(16)) == pytest.approx(found, abs=1e-3)


def perplexity(model):
    return evaluate(model, blocks(), compare_dense=False, batch_size=16).model.perplexity.perplexity


@functools.cache
def dense_perplexity():
    return perplexity(pruned("dense", 0.0)[0])


@pytest.mark.parametrize("name", ROWS)
def test_pruning_more_costs_more(name):
    assert dense_perplexity() < perplexity(pruned(name, 0.25)[0]) < perplexity(at_half(name)[0])


def test_every_row_is_tested_here():
    assert sorted(SETTINGS) == sorted(ROWS)
