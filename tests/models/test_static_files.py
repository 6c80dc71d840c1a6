"""Static plans on disk: adapters, full checkpoints, cards, and the format before."""

import pytest
import torch
from families import FAMILIES, distinct, make, tokens
from plans import kept_plan, layer_skip_plan, module_skip_plan, skipped_plan, stream_plan
from safetensors.torch import load_file, save_file
from test_replaced import dense_plan, sparse_weights
from transformers import AutoModelForCausalLM

from wide.cli.inspect import describe_adapter
from wide.config import WideConfig
from wide.errors import AdapterError, NotAttachedError, ShapeError
from wide.grouping import Grouping
from wide.materialisation.checkpoint import load_checkpoint, save_checkpoint
from wide.materialisation.materialise import materialise
from wide.models.adapter import ROUTER_FILE, STATIC_FILE, WEIGHTS_FILE, load, save
from wide.models.attach import attach, attachment, detach, is_attached
from wide.models.discovery import discover
from wide.models.files import SUMS
from wide.models.lora import add_lora
from wide.models.observe import bypass
from wide.plan import Kept, LayerPlan, Plan

KINDS = ("kept", "skipped", "stream", "weights", "both", "following", "forms")


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def attached(kind, family="llama", dtype=torch.float32):
    model = make(family).to(dtype)
    weights = None
    tensors = {}
    if kind in ("kept", "both"):
        plan, tensors = kept_plan(model)
    elif kind == "skipped":
        plan = skipped_plan(model, {(0, "ffn"), (1, "attention")})
    elif kind == "stream":
        plan, tensors = stream_plan(model, 24)
    elif kind == "following":
        plan = layer_skip_plan(model)
    elif kind == "forms":
        plan = module_skip_plan(model, form="dllm", router_input="layer_input")
    else:
        plan = dense_plan()
    if kind in ("weights", "both"):
        weights = sparse_weights(model)
    return attach(model, plan, tensors=tensors, weights=weights)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_every_kind_give_the_same_logits_again(tmp_path, kind, lora):
    model, ids = attached(kind), tokens()
    if lora:
        for parameter in add_lora(model, rank=2).parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.eval()
    folder = save(model, tmp_path / "adapter")
    again = load(make("llama"), folder)
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert attachment(again).plan == attachment(model).plan
    assert (folder / ROUTER_FILE).exists() == (kind in ("following", "forms"))
    assert (folder / STATIC_FILE).exists() == (kind in ("kept", "stream", "both"))
    assert (folder / WEIGHTS_FILE).exists() == (kind in ("weights", "both"))
    if not lora:
        detach(again)
        assert torch.equal(logits(again, ids), logits(make("llama"), ids))


@pytest.mark.parametrize(
    ("kind", "card", "told"),
    [
        ("kept", "keeps 3 of 4 units of 8 channels", "keeps 3 of 4 units of 8 channels"),
        ("skipped", "left out for every token", "left out for every token"),
        ("stream", "stream: 24 of 32 dimensions kept", "stream: 24 of 32 dimensions kept"),
        ("weights", "base weights: replaced", "base weights replaced"),
        (
            "following",
            "for the tokens that the attention executes for",
            "for the tokens that the attention executes for",
        ),
        ("forms", "every token chooses which of these groups", "dllm router, rank 4, layer_input input"),
    ],
)
def test_the_card_and_inspect_tell_the_kind_of_plan(tmp_path, kind, card, told):
    folder = save(attached(kind), tmp_path / "adapter")
    readme = (folder / "README.md").read_text()
    assert card in readme
    assert ("static-pruning" in readme) == (kind not in ("following", "forms"))
    assert told in describe_adapter(folder)


@pytest.mark.parametrize("file", [STATIC_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("damage", ["missing", "surplus", "shape", "value", "torn"])
def test_damaged_files_are_refused(tmp_path, file, damage):
    folder = save(attached("both"), tmp_path / "adapter")
    tensors = load_file(folder / file)
    name = sorted(tensors)[0]
    if damage == "missing":
        (folder / file).unlink()
    elif damage == "torn":
        (folder / file).write_bytes((folder / file).read_bytes()[:50])
    elif damage == "surplus":
        save_file(tensors | {"layers.7.ffn.scale": torch.ones(2)}, folder / file)
    elif damage == "shape":
        save_file(tensors | {name: tensors[name][:-1].contiguous()}, folder / file)
    else:
        save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, folder / file)
    model = make("llama")
    with pytest.raises(AdapterError):
        load(model, folder)
    assert not is_attached(model)
    assert torch.equal(logits(model, tokens()), logits(make("llama"), tokens()))


def test_files_of_another_adapter_are_refused(tmp_path):
    folder = save(attached("skipped"), tmp_path / "adapter")
    save_file({"layers.0.ffn.scale": torch.ones(64)}, folder / STATIC_FILE)
    with pytest.raises(AdapterError, match="does not belong"):
        load(make("llama"), folder)


def test_unknown_router_forms_are_malformed():
    plan = module_skip_plan(make("llama")).to_json()
    plan["layers"][0]["ffn"]["form"] = "deep"
    with pytest.raises(AdapterError, match="deep"):
        Plan.from_json(plan)


def test_scales_behind_a_transform_are_not_saved(tmp_path):
    model = attached("kept")
    attachment(model).static_gates()[0].transform = torch.relu
    with pytest.raises(NotAttachedError, match="transform"):
        save(model, tmp_path / "adapter")
    with pytest.raises(NotAttachedError, match="transform"):
        save_checkpoint(model, tmp_path / "full")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [save, save_checkpoint])
def test_bases_that_were_rounded_are_not_saved(tmp_path, write):
    with pytest.raises(ShapeError, match="orthonormal"):
        write(attached("stream").to(torch.bfloat16), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_full_checkpoints_of_every_kind_reload(tmp_path, kind):
    model, ids = attached(kind), tokens()
    save_checkpoint(model, tmp_path)
    again = load_checkpoint(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert again.generate(ids, max_new_tokens=3).shape[0] == 2
    if kind in ("weights", "both"):
        with pytest.raises(NotAttachedError, match="compare_dense"), bypass(again):
            pass
        with pytest.raises(NotAttachedError, match="save_checkpoint"):
            save(again, tmp_path / "adapter")
        save_checkpoint(again, tmp_path / "again")
        assert torch.equal(logits(load_checkpoint(tmp_path / "again", dtype=torch.float32), ids), logits(model, ids))
    else:
        with bypass(again):
            assert torch.equal(logits(again, ids), logits(make("llama"), ids))


@pytest.mark.parametrize("kind", KINDS)
def test_a_detached_full_checkpoint_is_saved_as_an_ordinary_model(tmp_path, kind):
    again = load_checkpoint(save_checkpoint(attached(kind), tmp_path / "checkpoint"))
    # A model that was built from the same configuration stays what it is.
    other = type(again)(again.config)
    detach(again).save_pretrained(tmp_path / "detached")
    ordinary = AutoModelForCausalLM.from_pretrained(tmp_path / "detached")
    assert type(ordinary) is type(again) is type(make("llama"))
    assert torch.equal(logits(ordinary, tokens()), logits(again, tokens()))
    assert is_attached(load_checkpoint(save_checkpoint(other, tmp_path / "other")))
    attach(again, WideConfig(ffn_group_size=16))
    assert is_attached(load_checkpoint(save_checkpoint(again, tmp_path / "attached")))


@pytest.mark.parametrize("family", distinct(FAMILIES))
def test_full_checkpoints_of_kept_units_reload_in_every_family(tmp_path, family):
    model, ids = attached("kept", family), tokens()
    save_checkpoint(model, tmp_path)
    again = load_checkpoint(tmp_path, dtype=torch.float32, attn_implementation=model.config._attn_implementation)
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.parametrize("write", [save_checkpoint, materialise])
@pytest.mark.parametrize(("family", "experts"), [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts")])
def test_what_files_hold_otherwise_than_modules_reloads(tmp_path, family, experts, write):
    base = make(family, **{experts: 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16})
    base.save_pretrained(tmp_path / "base")
    # As it was loaded, it is saved.
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval(), tokens()
    halves = [Kept(grouping=Grouping(spec.attention.query_width, 8), kept=2) for spec in discover(model)]
    plan = Plan(tuple(LayerPlan(attention=half) for half in halves))
    attach(model, plan, tensors=dict.fromkeys(plan.tensor_shapes(), torch.tensor([1.0, 1.0, 0.0, 0.0])))
    if write is materialise:
        write(model).save_pretrained(tmp_path / "full")
    else:
        write(model, tmp_path / "full")
    again = load_checkpoint(tmp_path / "full", dtype=torch.float32)
    assert torch.equal(logits(again, ids), logits(model, ids))
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load_checkpoint(tmp_path / "again", dtype=torch.float32), ids), logits(model, ids))


def test_checkpoints_in_bfloat16_keep_float32_scales(tmp_path):
    for kind in ("kept", "stream"):
        model = attached(kind, dtype=torch.bfloat16)
        save_checkpoint(model, tmp_path / kind)
        again = load_checkpoint(tmp_path / kind, dtype=torch.bfloat16)
        assert all(p.dtype == torch.float32 for p in attachment(again).static_parameters().values())


def test_a_checkpoint_with_other_scales_than_planned_is_refused(tmp_path):
    save_checkpoint(attached("kept"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("wide_gate.scale"))
    save_file(tensors | {name: torch.ones_like(tensors[name])}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / SUMS).unlink()
    with pytest.raises(AdapterError, match="scales that are not 0"):
        load_checkpoint(tmp_path)
