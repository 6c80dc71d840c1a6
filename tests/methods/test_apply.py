"""Any method runs through one door: it is timed, measured and recorded, and what fails leaves the model as it was."""

import json
import time
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

import wide
from wide.config import RecoverConfig, StageConfig
from wide.data.batches import blocks_of_texts
from wide.errors import ConfigError, NotAttachedError
from wide.grouping import Grouping
from wide.methods.apply import PROVENANCE, apply
from wide.methods.catalogue import Method, get
from wide.methods.method import Decision, Effort, Target
from wide.models.attach import attachment, is_attached
from wide.plan import Dense, Kept, LayerPlan, Plan, Skipped


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeConfig:
    """Settings of a fake method."""

    num_windows: int = 8
    batch_size: int = 4
    seed: int = 3


def skip_last_layer(model, blocks, target, settings):
    time.sleep(0.02)
    dense, gone = LayerPlan(attention=Dense(), ffn=Dense()), LayerPlan(attention=Skipped(), ffn=Skipped())
    return Decision(
        plan=Plan((dense, gone)),
        effort=Effort(tokens_forward=11, tokens_backward=7),
        notes={"order": [1], "seed": settings.seed, "draw": float(torch.rand(()))},
        deviations=("a fake",),
    )


def keep_half(model, blocks, target, settings):
    half = {0: Kept(grouping=Grouping(32, 8), kept=2), 1: Kept(grouping=Grouping(64, 1), kept=32)}
    scales = {"attention": torch.tensor([1.0, 0.0, 1.0, 0.0]), "ffn": torch.tensor([1.0, 0.0] * 32)}
    return Decision(
        plan=Plan((LayerPlan(attention=half[0], ffn=half[1]),) * 2),
        tensors={f"layers.{i}.{name}.scale": scale for i in range(2) for name, scale in scales.items()},
    )


def zero_rows(model, blocks, target, settings):
    name = "model.layers.0.mlp.down_proj.weight"
    weight = model.get_parameter(name).detach().clone()
    weight[:, ::2] = 0
    dense = LayerPlan(attention=Dense(), ffn=Dense())
    return Decision(plan=Plan((dense, dense)), weights={name: weight})


def fake(decide, kind="depth"):
    return Method(name="fake", kind=kind, summary="-", source="-", settings=FakeConfig, code=decide)


@pytest.fixture
def model(tiny_model_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_model_folder).eval()


@pytest.fixture
def blocks(tiny_tokenizer):
    return blocks_of_texts(
        ["The quick brown fox jumps over the lazy dog. " * 20] * 4, tiny_tokenizer, sequence_length=32
    )


HALF = Target(sparsity=0.5)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12)).logits


def test_what_a_static_method_decides_is_attached_measured_and_recorded(model, blocks):
    report = apply(model, fake(skip_last_layer), blocks, HALF, seed=17)
    assert (report["attention"], report["ffn"], report["nominal"]) == (0.5, 0.5, 0.5)
    assert report["linear_flops"] == pytest.approx(0.5)
    assert report["parameters_removed"] == pytest.approx(0.5)
    assert report["kv_cache_kept"] == pytest.approx(0.5)
    assert (report["tokens_forward"], report["tokens_backward"]) == (11, 7)
    assert 0.02 <= report["seconds"] < 5
    assert report["deviations"] == ["a fake"]
    assert attachment(model).provenance[PROVENANCE] == json.loads(json.dumps(report))


def test_keys_and_values_of_pruned_heads_stay(model, blocks):
    report = apply(model, fake(keep_half, "width"), blocks, HALF, seed=17)
    assert report["nominal"] == 0.5
    # Of each KV group one head is left, so K and V (a sixth of these layers' matrices) are all still there.
    assert report["linear_flops"] < 0.5
    assert report["kv_cache_kept"] == 1.0


def test_the_seed_is_that_of_the_call(model, blocks):
    state = torch.get_rng_state()
    first = apply(model, fake(skip_last_layer), blocks, HALF, FakeConfig(seed=99), seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    wide.detach(model)
    second = apply(model, fake(skip_last_layer), blocks, HALF, seed=5)
    assert first["notes"]["draw"] == second["notes"]["draw"]
    assert (first["seed"], first["notes"]["seed"], first["settings"]["seed"]) == (5, 5, 5)


def test_settings_that_are_not_the_originals_are_deviations(model, blocks):
    report = apply(model, fake(skip_last_layer), blocks, HALF, FakeConfig(num_windows=2, batch_size=1), seed=1)
    assert report["deviations"] == ["a fake", "settings: num_windows 2 (original: 8)"]


def test_saved_and_loaded_again_computes_the_same(model, blocks, tiny_model_folder, tmp_path):
    apply(model, fake(keep_half, "width"), blocks, HALF, seed=17)
    wide.save(model, tmp_path / "adapter")
    again = wide.load(str(tiny_model_folder), tmp_path / "adapter", device="cpu").eval()
    assert torch.equal(logits(again), logits(model))
    assert attachment(again).provenance[PROVENANCE]["method"] == "fake"


def test_a_method_that_fails_leaves_the_model_as_it_was(model, blocks, monkeypatch):
    before = logits(model)

    def break_down(model, blocks, target, settings):
        raise ConfigError("no such luck")

    def attach_and_break_down(model, *_args, **_options):
        wide.attach(model, wide.WideConfig(ffn_group_size=16, router_rank=4))
        raise KeyboardInterrupt

    with pytest.raises(ConfigError, match="no such luck"):
        apply(model, fake(break_down), blocks, HALF, seed=17)
    monkeypatch.setattr("wide.methods.apply.train", attach_and_break_down)
    with pytest.raises(KeyboardInterrupt):
        apply(model, fake(keep_half, "dynamic"), blocks, HALF, seed=17)
    assert not is_attached(model)
    assert torch.equal(logits(model), before)


def test_an_attached_model_is_refused(model, blocks):
    apply(model, get("dense"), blocks, HALF, seed=17)
    with pytest.raises(NotAttachedError, match="detach"):
        apply(model, get("dense"), blocks, HALF, seed=17)


def test_trained_rows_run_the_given_stage_and_are_measured(model, blocks):
    stage = StageConfig(steps=2, batch_size=2, sequence_length=32, learning_rate=1e-2)
    report = apply(
        model,
        get("wide"),
        blocks,
        HALF,
        get("wide").settings(ffn_group_size=16, router_rank=4),
        stage=stage,
        objective=wide.ObjectiveConfig(smoothing=0.05, weight=5.0),
        seed=23,
    )
    assert report["tokens_backward"] == 2 * 2 * 32
    assert report["nominal"] == pytest.approx((report["attention"] + report["ffn"]) / 2)
    assert 0 < report["linear_flops"] < 1
    assert report["kv_cache_kept"] == 1.0
    assert any("steps 2 (original: 10000)" in text for text in report["deviations"])
    assert any("smoothing 0.05 (original: 0.0)" in text for text in report["deviations"])
    assert any("weight 5.0 (original: 20.0)" in text for text in report["deviations"])
    assert attachment(model).provenance["prune"]["stage"]["seed"] == 23


def test_time_of_the_earlier_parts_of_a_run_counts(model, blocks, monkeypatch):
    def go_on(model, *_args, **_options):
        wide.attach(model, wide.WideConfig(ffn_group_size=16, router_rank=4))
        return Effort(seconds_before=1e6), ()

    monkeypatch.setattr("wide.methods.apply.train", go_on)
    assert 1e6 < apply(model, fake(keep_half, "dynamic"), blocks, HALF, seed=17)["seconds"] < 2e6


@pytest.mark.parametrize("decide", [keep_half, skip_last_layer, zero_rows])
def test_lora_works_on_every_kind_and_what_is_pruned_stays(model, blocks, decide, tmp_path):
    before = apply(model, fake(decide, "width"), blocks, HALF, seed=17)
    stage = RecoverConfig(steps=2, batch_size=2, sequence_length=32, lora_rank=2, learning_rate=1e-2, seed=3)
    old = logits(model)
    wide.recover(model, blocks, stage=stage, output=tmp_path)
    assert attachment(model).provenance["recover"]["tokens"] == 2 * 2 * 32
    assert not torch.equal(logits(model), old)
    assert attachment(model).provenance["recover"]["stage"]["seed"] == 3
    assert attachment(model).provenance[PROVENANCE]["nominal"] == before["nominal"]
    assert (tmp_path / "adapter" / "lora").is_dir()


def test_lora_on_the_dense_model(model, blocks):
    report = apply(model, get("dense"), blocks, Target(sparsity=0.0), seed=17)
    assert (report["nominal"], report["linear_flops"], report["parameters_removed"], report["kv_cache_kept"]) == (
        0,
        0,
        0,
        1,
    )
    old = logits(model)
    wide.recover(model, blocks, stage=RecoverConfig(steps=1, batch_size=2, sequence_length=32, seed=3))
    assert not torch.equal(logits(model), old)
    wide.detach(model)
    assert torch.equal(logits(model), old)
