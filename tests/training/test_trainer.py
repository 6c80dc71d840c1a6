"""What the loop does besides minimising: it stops cleanly, keeps what is good, and puts everything back."""

import errno
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import RandomSource, batch, routed_model, stage

from wide.config import ObjectiveConfig
from wide.errors import ConfigError, TrainingError
from wide.models.attach import attachment
from wide.models.lora import add_lora
from wide.records import read_records
from wide.training import modes
from wide.training.checkpoint import CheckpointFolder
from wide.training.modes import trainable_parameters, training_mode
from wide.training.objective import Objective
from wide.training.progress_log import StageOptions
from wide.training.trainer import Trainer, micro_batch_size


def trainer(model, folder=None, *, source=None, config=None, resume=False, fingerprint="same", **changes):
    objective = Objective(model, config or ObjectiveConfig())
    options = StageOptions(title="stage 1", output=folder, resume=resume, fingerprint=fingerprint)
    return Trainer(model, objective, source or RandomSource(), stage(**changes), options)


def router_values(model):
    return torch.cat([p.detach().flatten() for r in attachment(model).routers() for p in r.parameters()])


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["each layer", "all layers at once"])
def test_a_compiled_run_takes_one_graph_for_all_layers_and_is_the_same_run(small, monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend

    monkeypatch.setattr(modes, "_SMALL_LAYER", small)
    changes = {"steps": 3, "temperature_start": 4.0}
    plain, model = routed_model(), routed_model()
    trainer(plain, **changes).train()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    read = set()

    class Watched(Objective):
        def __call__(self, *args, **kwargs):
            read.add(attachment(model).control.sampling.temperature.data_ptr())
            return super().__call__(*args, **kwargs)

    run = trainer(model, compile=True, **changes)
    run._objective = Watched(model, ObjectiveConfig())
    run.train()
    assert counter.frame_count == 1
    assert len(read) == 1
    torch.testing.assert_close(router_values(model), router_values(plain))
    assert isinstance(attachment(model).control.sampling.temperature, float)


def test_small_models_with_lora_are_compiled_layer_by_layer(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function.__name__) or function)
    model = routed_model()
    with modes.layers_run(model, fuse=True):
        pass
    add_lora(model, rank=2)
    with modes.layers_run(model, fuse=True):
        pass
    assert compiled == ["forward", "_run_layer"]


def test_masks_are_drawn_at_the_temperature_of_the_step(monkeypatch):
    drawn, sample = [], torch.nn.functional.gumbel_softmax

    def noting(logits, tau, hard):
        drawn.append(float(tau))
        return sample(logits, tau=tau, hard=hard)

    monkeypatch.setattr(torch.nn.functional, "gumbel_softmax", noting)
    trainer(routed_model(), steps=10).train()
    assert list(dict.fromkeys(drawn)) == pytest.approx([5.0 - 0.5 * step for step in range(10)])


@pytest.mark.gpu
def test_steps_of_several_replays_are_those_that_are_launched(monkeypatch):
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    recorded, record = [], CUDAGraphTreeManager.record_function
    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", lambda *args: recorded.append(1) or record(*args))

    def without_noise(logits, tau, hard):
        soft = (logits / tau).softmax(-1)
        return torch.nn.functional.one_hot(soft.argmax(-1), 2) - soft.detach() + soft if hard else soft

    # Inductor draws other noise than PyTorch.
    monkeypatch.setattr(torch.nn.functional, "gumbel_softmax", without_noise)
    changes = {"steps": 8, "micro_batch_size": 2}
    plain, model = (routed_model(num_hidden_layers=4).to("cuda") for _ in range(2))
    trainer(plain, **changes).train()
    trainer(model, compile=True, **changes).train()
    # Not in every step.
    assert 0 < len(recorded) < 8
    torch.testing.assert_close(router_values(model), router_values(plain), atol=1e-3, rtol=1e-2)


def test_training_reaches_the_target_sparsity_and_lowers_the_loss():
    model = routed_model()
    outcome = trainer(model, config=ObjectiveConfig(sparsity=0.3), steps=60, learning_rate=3e-2).train()
    assert outcome.last["sparsity.mean"] == pytest.approx(0.3, abs=0.05)
    assert outcome.last["lm_loss"] < 5.0
    assert outcome.tokens == 60 * 4 * 16
    assert outcome.tokens_per_second > 0


def test_only_routers_change_and_every_flag_is_put_back():
    model = routed_model()
    model.train()
    model.lm_head.eval()
    model.lm_head.weight.requires_grad_(False)
    flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    random_state = torch.get_rng_state()
    trainer(model, steps=2).train()
    assert ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]) == flags
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), before[name]) != ("wide_router" in name), name


@pytest.mark.parametrize("wrapped", [False, True], ids=["whole", "peft"])
def test_dropout_of_the_base_is_off_in_training(wrapped):
    model = routed_model(attention_dropout=0.5)
    if wrapped:
        peft = pytest.importorskip("peft")
        # Of the caller's own, which is frozen, too.
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.5))
    with training_mode(model, routers=True, gradient_checkpointing=True):
        assert not any(m.training for n, m in model.named_modules() if "lora_dropout" in n)
        assert not any(m.training for n, m in model.named_modules() if n.endswith(("self_attn", "mlp")))
        assert all(router.training for router in attachment(model).routers())


def test_routers_of_a_bfloat16_base_are_trained_in_float32():
    model = routed_model().bfloat16()
    for router in attachment(model).routers():
        router.float()
    run = trainer(model, steps=2)
    run.train()
    assert {p.dtype for p in trainable_parameters(model, routers=True).values()} == {torch.float32}
    states = [value for state in run._optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in states} == {torch.float32}


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_checkpoint(tmp_path):
    class Poisoned(RandomSource):
        def batch_at(self, step, **options):
            if step == 7:
                with torch.no_grad():
                    model.lm_head.weight.fill_(float("nan"))
            return super().batch_at(step, **options)

    model = routed_model()
    with pytest.raises(TrainingError, match=r"step 7: .*loss = nan.*step-00000006.*learning_rate"):
        trainer(model, tmp_path, source=Poisoned(), checkpoint_every=2).train()
    kept = CheckpointFolder(tmp_path / "checkpoints", fingerprint="same").latest()
    assert kept.step == 6
    assert all(torch.isfinite(value).all() for value in kept.parameters.values())


def test_the_optimiser_has_the_settings_of_the_stage():
    (group,) = trainer(routed_model(), adam_beta2=0.95, weight_decay=0.2)._optimizer.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.9, 0.95), 0.2)


@pytest.mark.parametrize(("target", "times"), [(0.2, 1), (0.99, 0)], ids=["at the target", "far from it"])
def test_a_loss_that_rises_at_the_target_is_told_of_once(target, times, recwarn):
    class Changed(RandomSource):
        def batch_at(self, step, **options):
            if step == 15:
                with torch.no_grad():
                    model.lm_head.weight.mul_(30)
            return super().batch_at(step, **options)

    model = routed_model()
    trainer(model, config=ObjectiveConfig(sparsity=target), source=Changed(), steps=30, checkpoint_every=3).train()
    told = [str(each.message) for each in recwarn if "has risen from 4" in str(each.message)]
    assert len(told) == times
    assert all(re.match(r"stage 1, step 1[5-9]: ", each) for each in told)


def test_a_full_disk_is_reported_and_the_earlier_checkpoint_survives(tmp_path, monkeypatch):
    inner = Path.write_bytes

    def full(path, content):
        if folder.steps():
            inner(path, content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return inner(path, content)

    folder = CheckpointFolder(tmp_path / "checkpoints", fingerprint="same")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TrainingError, match=r"step 4 .*No space left.*step-00000002.*resume"):
        trainer(routed_model(), tmp_path, checkpoint_every=2).train()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    monkeypatch.undo()
    assert trainer(routed_model(), tmp_path, checkpoint_every=2, resume=True).train().steps == 12


@pytest.mark.parametrize("last", [5, 12])
def test_ctrl_c_finishes_the_step_writes_a_checkpoint_and_can_be_resumed(last, tmp_path):
    class Interrupting(RandomSource):
        def batch_at(self, step, **options):
            if step == last - 1:
                os.kill(os.getpid(), signal.SIGINT)
            return super().batch_at(step, **options)

    whole = routed_model()
    trainer(whole).train()
    with pytest.raises(KeyboardInterrupt, match=f"after step {last} of 12"):
        trainer(routed_model(), tmp_path, source=Interrupting()).train()
    folder = CheckpointFolder(tmp_path / "checkpoints", fingerprint="same")
    assert folder.steps() == [last]
    before = folder.latest().seconds
    resumed = routed_model()
    outcome = trainer(resumed, tmp_path, resume=True).train()
    assert torch.equal(router_values(resumed), router_values(whole))
    assert 0 < outcome.seconds_before == before
    assert (outcome.seconds > before) == (last < 12)
    assert outcome.tokens_per_second > 0
    assert outcome.last["lm_loss"] > 0


def test_a_signal_while_the_last_checkpoint_is_written_is_not_lost(tmp_path, monkeypatch):
    inner = Path.write_bytes

    def interrupted(path, content):
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(Path, "write_bytes", inner)
        return inner(path, content)

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt, match="after step 2 of 2"):
        trainer(routed_model(), tmp_path, steps=2).train()
    assert trainer(routed_model(), tmp_path, steps=2, resume=True).train().last["lm_loss"] > 0


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    trainer(routed_model(), tmp_path, checkpoint_every=5).train()
    folder = CheckpointFolder(tmp_path / "checkpoints", fingerprint="same")
    file = tmp_path / "checkpoints" / "step-00000012" / "parameters.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert folder.latest().step == 10
    # Without any that is whole nothing begins anew by itself.
    (tmp_path / "checkpoints" / "step-00000010" / "checkpoint.json").unlink()
    with pytest.raises(TrainingError, match=r"steps \[10, 12\].*delete that folder"):
        trainer(routed_model(), tmp_path, resume=True).train()


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    trainer(routed_model(), tmp_path).train()
    with pytest.raises(ConfigError, match="other settings"):
        trainer(routed_model(), tmp_path, resume=True, fingerprint="another").train()


def test_micro_batches_leave_the_result_of_the_step_alone():
    """The noise differs, so only the first loss (before any update) is compared, at temperature-free rates."""
    whole, parts = routed_model(), routed_model()
    config = ObjectiveConfig(sparsity=0.99)
    first = trainer(whole, config=config, steps=1).train().last
    second = trainer(parts, config=config, steps=1, micro_batch_size=1).train().last
    assert second["lm_loss"] == pytest.approx(first["lm_loss"], rel=0.2)
    assert second["sparsity.mean"] == pytest.approx(first["sparsity.mean"], abs=0.1)


def test_batches_that_cannot_be_shared_are_refused():
    assert micro_batch_size(stage(batch_size=8), 2) == 4
    assert micro_batch_size(stage(batch_size=8, micro_batch_size=2), 2) == 2
    with pytest.raises(ConfigError, match="multiple of 3"):
        micro_batch_size(stage(batch_size=8), 3)
    with pytest.raises(ConfigError, match="does not divide"):
        micro_batch_size(stage(batch_size=8, micro_batch_size=3), 1)
    with pytest.raises(ConfigError, match="micro_batch_size 3 does not divide the 2"):
        micro_batch_size(stage(batch_size=2, micro_batch_size=3), 1)


def test_metrics_are_records_of_every_step(tmp_path):
    trainer(routed_model(), tmp_path).train()
    records, notes = read_records(tmp_path / "metrics.jsonl")
    assert not notes
    assert [r.step for r in records if r.metric == "training.sparsity.attention"] == list(range(12))
    assert {r.subject for r in records} == {"stage 1"}
    heat = [r.value for r in records if r.metric == "training.temperature"]
    assert (heat[0], heat[-1]) == (5.0, 0.5)


def test_the_command_line_sees_plain_lines_where_there_is_no_terminal(capfd):
    trainer(routed_model()).train()
    lines = capfd.readouterr().err.splitlines()
    assert re.match(r"stage 1: step 12/12 after 00:\d\d, 00:00 left: loss ", lines[-1])
    assert "tokens/s" in lines[-1]


def test_padding_of_a_source_counts_in_no_rate():
    class Padded(RandomSource):
        def batch_at(self, step, **_options):
            return batch(4, 16, seed=step, padding=6)

    outcome = trainer(routed_model(), source=Padded(), steps=2).train()
    assert 0 < outcome.last["sparsity.mean"] < 1
