"""Routers in the loops of others: the same gradient as in wide's own, and checkpoints that load routed."""

import shutil

import pytest
import torch
from tiny import CONFIG, RandomSource, batch, dense_model, routed_model, stage
from torch.nn import functional
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import wide
from wide.data.batches import IGNORED
from wide.errors import ConfigError, NotAttachedError
from wide.models.attach import attachment, trained_on
from wide.models.thresholds import set_sparsity
from wide.training import callback
from wide.training.callback import FOLDER
from wide.training.objective import Objective

STEPS = 8


def examples(count=64):
    source = RandomSource()
    rows = [source.batch_at(step, batch_size=8).input_ids for step in range(count // 8)]
    # As in supervised fine-tuning: the first half is a prompt.
    return [
        {"input_ids": row, "labels": row.clone().index_fill(0, torch.arange(8), IGNORED)} for row in torch.cat(rows)
    ]


class Stream(IterableDataset):
    """The examples as a stream, whose length is not known."""

    def __iter__(self):
        return iter(examples())


def trainer_of(model, folder, callback, **changes):
    settings = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    arguments = TrainingArguments(**(settings | changes))
    return Trainer(model, arguments, train_dataset=examples(), eval_dataset=examples(8), callbacks=[callback])


def router_gradients(model):
    return torch.cat([p.grad.flatten() for router in attachment(model).routers() for p in router.parameters()])


def own_loss(model, inputs, targets):
    """A loss that the loop makes of logits, as TRL's trainers do, beside that of the model."""
    logits = model(**inputs, num_items_in_batch=targets).logits
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    ).div(targets)


def returned_loss(model, inputs, targets):
    return model(**inputs, num_items_in_batch=targets).loss


def watched_loss(model, inputs, targets):
    with wide.capture_routing(model):
        return returned_loss(model, inputs, targets)


@pytest.mark.parametrize("loss_of", [returned_loss, own_loss, watched_loss])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_gradient_is_that_of_the_objective(padding, micro_batches, loss_of):
    text, config = batch(padding=padding), wide.ObjectiveConfig(sparsity=0.4)
    model = routed_model().train()
    parts = text.split(4 // micro_batches)
    targets = sum(int((part.labels[:, 1:] != IGNORED).sum()) for part in parts)
    objective = Objective(model, config)
    attachment(model).control.sampling.temperature = 5.0
    torch.manual_seed(1)
    for part in parts:
        objective(part, targets_in_step=targets, micro_batches=micro_batches)[0].backward()
    wanted = router_gradients(model)
    model.zero_grad()
    routers = wide.RouterCallback(objective=config)
    routers.begin(model, steps=3, micro_batches=micro_batches)
    torch.manual_seed(1)
    for part in parts:
        inputs = {"input_ids": part.input_ids, "attention_mask": part.valid.long(), "labels": part.labels}
        loss_of(model, inputs, targets).backward()
    assert torch.allclose(router_gradients(model), wanted, rtol=1e-4, atol=1e-6)
    routers.end()
    with torch.no_grad():
        plain = model(input_ids=text.input_ids, labels=text.labels).loss
    assert plain < 10
    assert not attachment(model).control.observed


def test_supervised_fine_tuning_with_routers_on(tmp_path):
    model = routed_model()
    callback = wide.RouterCallback(sparsity=0.5)
    trainer = trainer_of(model, tmp_path / "out", callback, max_steps=28, save_steps=28, lr_scheduler_type="constant")
    trainer.train()
    logs = [line for line in trainer.state.log_history if "sparsity" in line]
    assert len(logs) == 28
    assert sum(line["sparsity"] for line in logs[-8:]) / 8 == pytest.approx(0.5, abs=0.08)
    facts = attachment(model).provenance["prune"]
    assert facts["inference"]["sparsity"] == pytest.approx(0.5, abs=0.1)
    assert len(attachment(model).thresholds_by_sparsity) > 3
    trainer.save_model(str(tmp_path / "whole"))
    again = wide.load_checkpoint(tmp_path / "whole")
    ids = batch().input_ids
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    assert attachment(wide.load_checkpoint(tmp_path / "out" / "checkpoint-28")).routers()
    # The base was trained along, so an adapter cannot describe this model.
    with pytest.raises(NotAttachedError, match="changed since"):
        wide.save(model, tmp_path / "adapter")


@pytest.mark.parametrize("wrapped", [False, True], ids=["whole", "peft"])
def test_a_resumed_trainer_ends_as_if_it_had_not_stopped(tmp_path, wrapped):
    if wrapped:
        peft = pytest.importorskip("peft")

    def model():
        made = routed_model()
        if not wrapped:
            # Routers alone.
            for name, parameter in made.named_parameters():
                parameter.requires_grad_("wide_router" in name)
            return made
        torch.manual_seed(5)
        return peft.get_peft_model(made, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))

    first, second = model(), model()
    trainer_of(first, tmp_path / "out", wide.RouterCallback(0.5)).train()
    before = [p.clone() for p in second.parameters()]
    trainer = trainer_of(second, tmp_path / "out", wide.RouterCallback(0.5))
    moved = shutil.move(tmp_path / "out" / "checkpoint-4", tmp_path / "elsewhere")
    trainer.train(resume_from_checkpoint=str(moved))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    # Thresholds are calibrated on what was read before the stop, too.
    inner = [model.get_base_model() if wrapped else model for model in (first, second)]
    assert attachment(inner[0]).thresholds_by_sparsity == attachment(inner[1]).thresholds_by_sparsity
    facts = [attachment(model).provenance["prune"]["inference"] for model in inner]
    assert facts[0] == facts[1]
    assert facts[0]["tokens"] == STEPS * 4 * 16
    moved = [name for (name, p), old in zip(second.named_parameters(), before, strict=True) if not torch.equal(p, old)]
    assert any("wide_router" in name for name in moved)
    assert all("wide_router" in name or "lora_" in name for name in moved)
    if wrapped:
        shutil.rmtree(tmp_path / "elsewhere" / FOLDER)
        with pytest.raises(ConfigError, match="step 4 has no routers beside LoRA"):
            trainer_of(model(), tmp_path / "out", wide.RouterCallback(0.5)).train(
                resume_from_checkpoint=str(tmp_path / "elsewhere")
            )


def test_a_loss_with_label_smoothing_and_a_callback_made_again_have_the_term(tmp_path):
    # The model returns no loss there.
    changes = {"label_smoothing_factor": 0.1, "restore_callback_states_from_checkpoint": True, "max_steps": 24}
    strong = wide.ObjectiveConfig(sparsity=0.9, weight=30)
    changes |= {"learning_rate": 1e-1, "lr_scheduler_type": "constant"}
    first = changes | {"save_steps": 4, "max_steps": 4}
    trainer_of(routed_model(), tmp_path, wide.RouterCallback(objective=strong), **first).train()
    changes["save_strategy"] = "no"
    trainer = trainer_of(routed_model(), tmp_path, wide.RouterCallback(objective=strong), **changes)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    skipped = [line["sparsity"] for line in trainer.state.log_history if "sparsity" in line]
    assert sum(skipped[-8:]) / 8 > 0.8


def test_the_last_step_of_an_epoch_has_the_whole_sparsity_term_in_fewer_forwards(tmp_path):
    class Noted(wide.RouterCallback):
        def _carry_term(self, *args):
            found.append(self._forwards)
            return super()._carry_term(*args)

    found, rows = [], examples(32)[: 4 * 4]
    changes = {"gradient_accumulation_steps": 3, "max_steps": 4, "save_strategy": "no"}
    trainer = trainer_of(routed_model(), tmp_path, Noted(0.5), **changes)
    trainer.train_dataset = rows
    trainer.train()
    assert found == [3, 3, 3, 1] * 2
    found.clear()
    trainer = trainer_of(routed_model(), tmp_path, Noted(0.5), **changes)
    trainer.train_dataset = Stream()
    trainer.train()
    assert found == [3] * 12


def test_checkpoints_of_a_peft_model_have_the_routers_beside_lora(tmp_path):
    peft = pytest.importorskip("peft")
    # The head is trained as a whole.
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(routed_model(), settings)
    trainer_of(model, tmp_path, wide.RouterCallback(0.5)).train()
    folder = tmp_path / f"checkpoint-{STEPS}"
    again = peft.PeftModel.from_pretrained(wide.load(dense_model(), folder / FOLDER), folder)
    ids = batch().input_ids
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


def test_what_was_read_and_calibrated_before_is_told_apart():
    model = wide.prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=2))
    state, text = attachment(model), batch()
    state.provenance["prune"] |= {"text": "corpus.txt", "split": "train"}
    routers = wide.RouterCallback(0.3)
    routers.begin(model.train(), steps=2)
    # Of routers that are about to change.
    assert not state.thresholds_by_sparsity
    model(input_ids=text.input_ids, labels=text.labels).loss.backward()
    routers.end()
    routers.calibrate()
    routers.calibrate()
    assert trained_on(model) == {"before: prune": {"text": "corpus.txt", "split": "train"}}
    assert state.provenance["prune"]["objective"]["sparsity"] == 0.3
    assert state.thresholds_by_sparsity


def test_what_an_interrupted_training_left_on_ends_with_the_next_one():
    model, text = routed_model().train(), batch()

    def loss(state=0):
        torch.manual_seed(state)
        return float(model(input_ids=text.input_ids, labels=text.labels).loss.detach())

    plain = loss()
    wide.RouterCallback(0.9).begin(model, steps=2)
    interrupted = loss()
    routers = wide.RouterCallback(0.9)
    routers.begin(model, steps=2)
    assert loss() == interrupted != plain
    with pytest.raises(NotAttachedError):
        routers.begin(dense_model(), steps=2)
    assert loss() == interrupted
    routers.end()
    assert loss() == plain
    wide.RouterCallback(0.9).begin(model, steps=2)
    wide.detach(model)
    assert not model._forward_hooks
    assert not model.model._forward_hooks


class Stopping(TrainerCallback):
    """Ends the training after an evaluation, as early stopping does."""

    def on_evaluate(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 4


@pytest.mark.parametrize("how", ["steps", "epochs", "best", "stopped"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["whole", "peft"])
def test_the_last_checkpoint_has_the_calibrated_threshold(how, wrapped, tmp_path, monkeypatch):
    if wrapped:
        peft = pytest.importorskip("peft")
    best = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True}
    changes = {
        "steps": {"save_steps": 5},
        "epochs": {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 1},
        "best": best,
        "stopped": {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4},
    }[how]
    model, found = routed_model(), []
    inner = model
    if wrapped:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))

    def calibrate(*args, **named):
        found.append(0.25 + len(found))
        set_sparsity(inner, threshold=found[-1])
        return {}

    monkeypatch.setattr(callback, "meet_target", calibrate)
    trainer = trainer_of(model, tmp_path, wide.RouterCallback(0.5), **changes)
    evaluated, evaluate = [], trainer.evaluate
    trainer.evaluate = lambda *a, **k: evaluated.append(attachment(inner).routers()[0].threshold) or evaluate(*a, **k)
    if how == "stopped":
        trainer.add_callback(Stopping())
    trainer.train()
    last = tmp_path / f"checkpoint-{trainer.state.global_step}"
    again = wide.load(dense_model(), last / FOLDER) if wrapped else wide.load_checkpoint(last)
    thresholds = {router.threshold for router in attachment(again).routers()}
    # A whole model is written before it can be known, where evaluations choose or end.
    assert thresholds == ({0.0} if not wrapped and how in ("best", "stopped") else {0.25})
    assert set(evaluated) <= {0.0}
    # The best model may be another than the last.
    assert found == ([0.25, 1.25] if wrapped and how == "best" else [0.25])
    assert {router.threshold for router in attachment(inner).routers()} == {found[-1]}


def test_what_cannot_work_is_refused(tmp_path):
    model = routed_model()
    routers = wide.RouterCallback(0.5)
    routers.begin(model.train(), steps=3)
    with pytest.raises(ConfigError, match="the model was called with inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 4, 32))
    # As `fp16` of a Trainer has it, which needs a GPU.
    routers._refused = "fp16 scales"
    with pytest.raises(ConfigError, match="fp16 scales"):
        model(batch().input_ids).logits.sum().backward()
    routers.end()
    model.eval()
    with pytest.raises(ConfigError, match="not both"):
        wide.RouterCallback(0.5, objective=wide.ObjectiveConfig())
    with pytest.raises(NotAttachedError):
        trainer_of(dense_model(), tmp_path, wide.RouterCallback(0.5))
    wide.models.lora.add_lora(model, rank=2)
    with pytest.raises(ConfigError, match="with PEFT"):
        trainer_of(model, tmp_path, wide.RouterCallback(0.5)).train()
