"""Stage 2 on static plans: LoRA alone, and what is pruned stays pruned; stage 1 on a plan of the caller's."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from plans import kept_plan, layer_skip_plan, module_skip_plan, skipped_plan, stream_plan
from tiny import CONFIG, batch, dense_model, stage

from wide.config import ObjectiveConfig, RecoverConfig
from wide.data.batches import TokenBlocks
from wide.data.token_stream import TokenStream
from wide.errors import ConfigError, NotAttachedError, ShapeError
from wide.materialisation.checkpoint import load_checkpoint, save_checkpoint
from wide.models.adapter import load
from wide.models.attach import attach, attachment, is_attached
from wide.models.cost import static_sparsity
from wide.models.discovery import discover
from wide.models.lora import add_lora, merge_lora, without_lora
from wide.models.observe import bypass, force_routing
from wide.models.thresholds import calibrate_thresholds, set_sparsity
from wide.plan import Dense, LayerPlan, Plan
from wide.routing import LayerRouting
from wide.training.modes import training_mode
from wide.training.objective import Objective
from wide.training.stages import prune, recover

KINDS = ("kept", "skipped", "stream", "weights", "both")


@pytest.fixture(scope="module")
def blocks():
    """Return text in which every token follows from the one before."""
    start = np.arange(1024, dtype=np.uint32)
    return TokenBlocks(TokenStream(tokens=start * 7 % 64, starts=np.zeros(1, np.int64), largest_id=63), 16)


def attached(kind):
    model = dense_model()
    dense = LayerPlan(attention=Dense(), ffn=Dense())
    plan, tensors, weights = Plan((dense, dense)), {}, None
    if kind in ("kept", "both"):
        plan, tensors = kept_plan(model)
    elif kind == "skipped":
        plan = skipped_plan(model, {(0, "ffn"), (1, "attention")})
    elif kind == "stream":
        plan, tensors = stream_plan(model, 24)
    if kind in ("weights", "both"):
        names = [name for name, _ in model.named_parameters() if "_proj" in name]
        state = model.state_dict()
        weights = {name: state[name] * (torch.rand(state[name].shape) < 0.5) for name in names}
    return attach(model, plan, tensors=tensors, weights=weights), weights or {}


def lora_stage(**changes):
    settings = {"steps": 8, "batch_size": 4, "sequence_length": 16, "lora_rank": 2, "learning_rate": 1e-2}
    return RecoverConfig(**(settings | changes))


def loss_of(model):
    ids = torch.arange(64).view(4, 16) * 7 % 64
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


@pytest.mark.parametrize("kind", KINDS)
def test_lora_alone_is_trained_and_what_is_pruned_stays_pruned(kind, blocks, tmp_path):
    model, _ = attached(kind)
    before, state = static_sparsity(model), attachment(model)
    constants = {name: value.clone() for name, value in state.static_parameters().items()}
    first = loss_of(model)
    recover(model, blocks, stage=lora_stage(), output=tmp_path / "run")
    assert loss_of(model) < first
    facts = state.provenance["recover"]
    assert json.loads(json.dumps(facts)) == facts
    assert facts["objective"]["weight"] == 0.0
    assert facts["inference"]["sparsity"] == before.mean
    assert facts["at_the_end_of_training"]["sparsity.mean"] == pytest.approx(before.mean)
    assert facts["at_the_end_of_training"]["sparsity.ffn"] == pytest.approx(before.ffn)
    assert state.thresholds_by_sparsity == []
    assert static_sparsity(model) == before
    assert all(torch.equal(value, constants[name]) for name, value in state.static_parameters().items())
    assert loss_of(load(dense_model(), tmp_path / "run" / "adapter")) == pytest.approx(loss_of(model))

    unmerged = loss_of(model)
    merge_lora(model)
    assert static_sparsity(model) == before
    assert loss_of(model) == pytest.approx(unmerged, abs=1e-4)
    save_checkpoint(model, tmp_path / "full")
    again = load_checkpoint(tmp_path / "full", dtype=torch.float32)
    assert loss_of(again) == pytest.approx(loss_of(model))


def test_a_skipped_half_gets_no_lora(blocks):
    model, _ = attached("skipped")
    recover(model, blocks, stage=lora_stage(steps=2))
    names = {name.split(".lora_")[0] for name in attachment(model).lora.named_parameters()}
    assert any("layers.0.self_attn" in name for name in names)
    assert not any("layers.0.mlp" in name or "layers.1.self_attn" in name for name in names)


@pytest.mark.parametrize("asked", ["objective", "stage"])
def test_distillation_teaches_with_the_dense_model(blocks, asked):
    model, _ = attached("both")
    objective = ObjectiveConfig(sparsity=0.5, distillation=1.0) if asked == "objective" else None
    stage = lora_stage(steps=3, distillation=1.0 if asked == "stage" else None)
    recover(model, blocks, stage=stage, objective=objective)
    facts = attachment(model).provenance["recover"]
    assert facts["at_the_end_of_training"]["distillation"] > 0
    assert facts["objective"]["sparsity"] == 0.0
    assert facts["objective"]["distillation"] == 1.0


def test_lora_leaves_each_module_in_its_own_mode():
    model = dense_model().train()
    layers = [spec.layer for spec in discover(model)]
    layers[1].eval()
    add_lora(attach(model, CONFIG), rank=2)
    assert model.training
    assert [{module.training for module in layer.modules()} for layer in layers[:2]] == [{True}, {False}]


def test_compiled_distillation_has_the_gradients_of_the_plain_loss(blocks, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    model, _ = attached("both")
    handle = add_lora(model, rank=2, alpha=2.0, dropout=0.0)
    for parameter in handle.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    labels = blocks.batch([0, 3])
    with bypass(model), without_lora(model), torch.no_grad():
        taught = model(input_ids=labels.input_ids).logits[:, :-1].log_softmax(-1)
    with training_mode(model, routers=False, gradient_checkpointing=False):
        own = model(input_ids=labels.input_ids).logits[:, :-1].log_softmax(-1)
        wanted = (taught.exp() * (taught - own)).sum(-1).mean()
        gradients = torch.autograd.grad(wanted, list(handle.parameters()))
    with training_mode(model, routers=False, gradient_checkpointing=False, compile=True):
        config = ObjectiveConfig(sparsity=0.0, weight=0.0, distillation=1.0)
        loss, _ = Objective(model, config, fuse=True)(labels)
        found = torch.autograd.grad(loss, list(handle.parameters()))
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)


def test_a_run_on_a_static_plan_resumes_only_with_the_same_scales(blocks, tmp_path):
    model, _ = attached("kept")
    recover(model, blocks, stage=lora_stage(steps=4), output=tmp_path)
    other, _ = attached("kept")
    with torch.no_grad():
        attachment(other).static_gates()[0].scale *= 2
    with pytest.raises(ConfigError, match="other settings"):
        recover(other, blocks, stage=lora_stage(steps=4), output=tmp_path, resume=True)
    same, _ = attached("kept")
    recover(same, blocks, stage=lora_stage(steps=4), output=tmp_path, resume=True)
    assert loss_of(same) == pytest.approx(loss_of(model))


def test_without_routers_nothing_can_be_steered_or_dialled(blocks):
    model, _ = attached("kept")
    with pytest.raises(ConfigError, match="no routers"):
        Objective(model, ObjectiveConfig(sparsity=0.5))
    with pytest.raises(ConfigError, match="no router to train"):
        prune(model, blocks, stage=stage(steps=2))
    with pytest.raises(NotAttachedError, match="no routers"):
        set_sparsity(model, threshold=0.0)
    with pytest.raises(NotAttachedError, match="no routers"):
        calibrate_thresholds(model, [batch()])
    fresh = dense_model()
    with pytest.raises(ConfigError, match="no router to train"):
        prune(fresh, blocks, config=skipped_plan(fresh, {(0, "ffn")}), stage=stage(steps=2))
    plan, _ = kept_plan(fresh)
    with pytest.raises(ShapeError, match="missing"):
        prune(fresh, blocks, config=plan, stage=stage(steps=2))
    assert not is_attached(fresh)


def test_stage_1_trains_the_plan_of_the_caller(blocks):
    model = dense_model()
    first = layer_skip_plan(model, form="mlp").layers[0]
    second = module_skip_plan(model, form="mlp").layers[1]
    prune(model, blocks, config=Plan((first, second)), stage=stage(steps=2), sparsity=0.5)
    assert attachment(model).provenance["prune"]["inference"]["sparsity"] == pytest.approx(0.5, abs=0.1)
    recover(model, blocks, stage=lora_stage(steps=1, train_routers=False))
    assert attachment(model).provenance["recover"]["inference"]["measure"] == "mean"


@pytest.mark.parametrize("target", ["mean", "uniform", "linear_flops"])
def test_the_objective_counts_what_follows(target):
    model = dense_model()
    attach(model, layer_skip_plan(model))
    objective = Objective(model, ObjectiveConfig(sparsity=0.5, target=target))
    with force_routing(model, [LayerRouting(attention=_first_tokens(12)), LayerRouting(attention=_first_tokens(4))]):
        _, measured = objective(batch())
    wanted = (4 / 16 + 12 / 16) / 2
    assert float(measured.sparsity) == pytest.approx(wanted)
    assert float(measured.attention) == float(measured.ffn) == pytest.approx(wanted)


def _first_tokens(count):
    return (torch.arange(16) < count).expand(4, 16).unsqueeze(-1)
