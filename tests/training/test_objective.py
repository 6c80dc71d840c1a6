"""The objective by hand, padding, ranks and accumulation."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import CONFIG, batch, dense_model, freeze_noise, routed_model
from torch.nn import functional

from wide.config import ObjectiveConfig
from wide.data.batches import TokenBatch
from wide.errors import UnsupportedModelError
from wide.models.attach import attach, attachment
from wide.models.cost import SkipCounter
from wide.models.gates import PENDING_NAME
from wide.models.observe import bypass, observe
from wide.training.modes import training_mode
from wide.training.objective import Objective, target_labels
from wide.training.token_loss import num_targets


def evaluate(model, config, data, **options):
    """Return loss, measurements and router gradients with deterministic noise."""
    with training_mode(model, routers=True, gradient_checkpointing=False):
        model.zero_grad()
        loss, measured = Objective(model, config)(data, **options)
        loss.backward()
    return loss.detach(), measured, gradients(model)


def gradients(model):
    return torch.cat([p.grad.flatten() for r in attachment(model).routers() for p in r.parameters()])


def rates(model, data):
    """Return (attention, FFN, linear FLOP) skip rates counted independently, of the same masks."""
    counter = SkipCounter(model)
    with training_mode(model, routers=True, gradient_checkpointing=False), observe(model) as routing:
        model(input_ids=data.input_ids)
        counter.add(routing, data.valid)
    return counter.result()


@pytest.mark.parametrize("target", ["mean", "uniform", "linear_flops"])
def test_value_is_language_loss_plus_weighted_distance(target):
    model, data = freeze_noise(routed_model()), batch()
    config = ObjectiveConfig(sparsity=0.3, target=target, weight=7.0)
    loss, measured, _ = evaluate(model, config, data)
    found = rates(model, data)
    with training_mode(model, routers=True, gradient_checkpointing=False):
        logits = model(input_ids=data.input_ids).logits
    lm = functional.cross_entropy(logits[:, :-1].flatten(0, 1), data.input_ids[:, 1:].flatten())
    distance = {
        "mean": abs(0.3 - found.mean),
        "uniform": (abs(0.3 - found.attention) + abs(0.3 - found.ffn)) / 2,
        "linear_flops": abs(0.3 - found.linear_flops),
    }[target]
    assert float(loss) == pytest.approx(float(lm.detach()) + 7.0 * distance, rel=1e-5)
    assert float(measured.loss) == pytest.approx(float(loss), rel=1e-6)
    assert float(measured.lm_loss) == pytest.approx(float(lm.detach()), rel=1e-5)
    assert float(measured.attention) == pytest.approx(found.attention, rel=1e-5)
    assert float(measured.ffn) == pytest.approx(found.ffn, rel=1e-5)


@pytest.mark.parametrize(("sparsity", "slope"), [(0.0, -1.0), (0.99, 1.0)])
def test_sparsity_gradient_is_the_same_on_executed_and_skipped_groups(sparsity, slope):
    """More execution lowers the loss where too much is skipped, and raises it where too little is."""
    model, data, masks = freeze_noise(routed_model()), batch(), []
    router = attachment(model).routers()[-1]
    router.register_forward_hook(lambda _module, _inputs, mask: masks.append(mask))
    with training_mode(model, routers=True, gradient_checkpointing=False):
        loss, _ = Objective(model, ObjectiveConfig(sparsity=sparsity, weight=1e6))(data)
        masks[0].retain_grad()
        loss.backward()
    # 2 halves x 2 layers x 4 groups x 64 tokens; nothing comes after the last FFN, so the LM part is negligible.
    expected = torch.full_like(masks[0], slope * 1e6 / (2 * 2 * 4 * 64))
    torch.testing.assert_close(masks[0].grad, expected, rtol=1e-3, atol=0)
    assert 0 < masks[0].mean() < 1


def test_skips_are_counted_in_float32_inside_an_autocast():
    model, data = freeze_noise(routed_model()).train(), batch(rows=31)
    objective = Objective(model, ObjectiveConfig(sparsity=0.3))
    with observe(model) as routing:
        model(input_ids=data.input_ids)
    wanted = objective.distance(routing, data.valid)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = objective.distance(routing, data.valid)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_padding_counts_nowhere():
    model = freeze_noise(routed_model())
    padded = batch(padding=5)
    short = TokenBatch(input_ids=padded.input_ids[:, :-5], labels=padded.labels[:, :-5], valid=padded.valid[:, :-5])
    other = TokenBatch(
        input_ids=padded.input_ids.masked_fill(~padded.valid, 3),
        labels=padded.input_ids.masked_fill(~padded.valid, 3),
        valid=padded.valid,
    )
    config = ObjectiveConfig(sparsity=0.3, distillation=0.5)
    reference = evaluate(model, config, short)
    for data in (padded, other):
        found = evaluate(model, config, data)
        torch.testing.assert_close(found[0], reference[0])
        torch.testing.assert_close(found[1].attention, reference[1].attention)
        torch.testing.assert_close(found[2], reference[2], rtol=1e-4, atol=1e-6)


def test_accumulated_micro_batches_equal_the_whole_batch_on_one_side_of_the_target():
    model, data = freeze_noise(routed_model()), batch(rows=4)
    config = ObjectiveConfig(sparsity=0.95)
    _, measured, whole = evaluate(model, config, data)
    with training_mode(model, routers=True, gradient_checkpointing=False):
        model.zero_grad()
        objective, parts = Objective(model, config), []
        for i in range(4):
            part = TokenBatch(
                input_ids=data.input_ids[i : i + 1], labels=data.labels[i : i + 1], valid=data.valid[i : i + 1]
            )
            piece, found = objective(part, targets_in_step=num_targets(target_labels(data)), micro_batches=4)
            piece.backward()
            parts.append(found)
    torch.testing.assert_close(gradients(model), whole, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sum(p.loss for p in parts), measured.loss)
    torch.testing.assert_close(sum(p.lm_loss for p in parts), measured.lm_loss)
    torch.testing.assert_close(sum(p.sparsity for p in parts) / 4, measured.sparsity)


def test_distillation_compares_with_the_dense_model_without_lora():
    pytest.importorskip("peft")
    from wide.models.lora import add_lora

    data, dense = batch(), dense_model()
    model = freeze_noise(attach(dense_model(), CONFIG))
    handle = add_lora(model, rank=2, dropout=0.0)
    for parameter in handle.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    objective = Objective(model, ObjectiveConfig(distillation=1.0, weight=0.0))
    with training_mode(model, routers=True, gradient_checkpointing=False):
        loss, measured = objective(data)
        pruned = model(input_ids=data.input_ids).logits
    teacher = dense(input_ids=data.input_ids).logits
    with bypass(model):
        assert not torch.allclose(model(input_ids=data.input_ids).logits, teacher)
    kl = functional.kl_div(
        pruned[:, :-1].log_softmax(-1).flatten(0, 1),
        teacher[:, :-1].log_softmax(-1).flatten(0, 1),
        reduction="batchmean",
        log_target=True,
    )
    torch.testing.assert_close(measured.distillation, kl.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss.detach(), kl.detach(), rtol=1e-4, atol=1e-5)


def test_recomputation_that_loses_what_a_router_reads_is_refused():
    model, data = attach(dense_model(), replace(CONFIG, router_input="layer_input")), batch()
    gate = getattr(model.model.layers[1].mlp, PENDING_NAME)
    loss, _ = Objective(model, ObjectiveConfig())(data)
    loss.backward()
    with pytest.raises(UnsupportedModelError, match="runs again without its hooks"):
        gate.prepare(None, (torch.randn(1, 3, 32),), {})


@pytest.mark.parametrize(
    ("how", "router_input"),
    [
        ("recomputed", "normed"),
        # What routers read comes from a hook on the layer, which recomputing does not run again.
        ("recomputed", "layer_input"),
        ("both", "layer_input"),
        ("the model's own, reentrant", "normed"),
    ],
)
def test_layers_that_are_run_otherwise_give_the_same_gradients(how, router_input, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model, data = attach(dense_model(), replace(CONFIG, router_input=router_input)), batch()
    config, is_own = ObjectiveConfig(sparsity=0.9), how.startswith("the model's own")
    found = []
    for recompute, fuse in ((False, False), (how in ("recomputed", "both"), how in ("compiled", "both"))):
        if found and is_own:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        with training_mode(model, routers=True, gradient_checkpointing=recompute, compile=fuse):
            torch.manual_seed(1)
            model.zero_grad()
            loss, _ = Objective(model, config, fuse=fuse)(data)
            loss.backward()
        found.append(gradients(model))
    torch.testing.assert_close(found[1], found[0])
    assert model.is_gradient_checkpointing == is_own
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)
