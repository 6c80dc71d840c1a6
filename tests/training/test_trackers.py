"""Curves go to a tracker through its own library, and what cannot be used is refused before training."""

import sys
from types import SimpleNamespace

import pytest
from tiny import CONFIG, RandomSource, dense_model, routed_model, stage

from wide.errors import ConfigError, MissingExtraError
from wide.training import progress_log
from wide.training.progress_log import ProgressLog, StageOptions, require_tensorboard, require_tracker
from wide.training.stages import prune, recover

POINT = {"loss": 1.0, "lm_loss": 1.0, "sparsity.attention": 0.5, "sparsity.ffn": 0.5, "sparsity.target": 0.5}
POINT |= {"temperature": 1.0, "tokens_per_second": 10.0}


@pytest.fixture
def library(monkeypatch):
    """A tracker's library that keeps what it is told."""
    seen = []

    def init(**options):
        seen.append(options)
        run = SimpleNamespace()
        run.log = lambda values, step: seen.append((step, values["loss"]))
        run.finish = lambda: seen.append("finished")
        return run

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    monkeypatch.setattr(progress_log.importlib.util, "find_spec", lambda name: object())
    return seen


def test_every_step_is_told(library, tmp_path):
    options = StageOptions(title="stage 1", output=tmp_path / "run" / "stage1", tracker="trackio")
    log = ProgressLog(options, steps=2, first_step=0)
    log.add([(0, POINT), (1, POINT | {"loss": 2.0})])
    log.close()
    assert library == [{"project": "wide", "name": "run, stage 1"}, (0, 1.0), (1, 2.0), "finished"]


def test_other_processes_tell_nothing(library, tmp_path):
    options = StageOptions(title="stage 1", output=tmp_path, tracker="trackio")
    log = ProgressLog(options, steps=2, first_step=0, silent=True)
    log.add([(0, POINT)])
    log.close()
    assert library == []


@pytest.mark.parametrize(("name", "options"), [("wandb", {"exit_code": 1}), ("trackio", {})])
def test_a_run_that_failed_is_not_called_finished(name, options, monkeypatch):
    ends = []
    run = SimpleNamespace(log=lambda values, step: None, finish=lambda **found: ends.append(found))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=lambda **_: run))
    monkeypatch.setattr(progress_log.importlib.util, "find_spec", lambda name: object())

    class Failing(RandomSource):
        fails = True

        def batch_at(self, step, **sizes):
            if self.fails and step == 1:
                raise KeyboardInterrupt
            return super().batch_at(step, **sizes)

    with pytest.raises(KeyboardInterrupt):
        prune(dense_model(), Failing(), config=CONFIG, stage=stage(steps=2), tracker=name)
    assert ends == [options]
    Failing.fails = False
    prune(dense_model(), Failing(), config=CONFIG, stage=stage(steps=2), tracker=name)
    assert ends == [options, {}]


def test_a_tracker_is_refused_before_a_model_is_loaded_or_text_read(monkeypatch):
    monkeypatch.setattr(progress_log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install wandb"):
        prune("no/such/model", "no-such-text", tracker="wandb")
    model = routed_model()
    with pytest.raises(MissingExtraError, match="pip install wandb"):
        recover(model, "no-such-text", tracker="wandb")


def test_what_is_not_installed_or_unknown_is_refused(monkeypatch):
    monkeypatch.setattr(progress_log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install wandb"):
        require_tracker("wandb")
    with pytest.raises(ConfigError, match="TensorBoard is --tensorboard"):
        require_tracker("tensorboard")
    require_tracker(None)


def test_tensorboard_is_refused_or_named_before_anything_is_trained(monkeypatch):
    assert require_tensorboard(False) is None
    monkeypatch.setattr(progress_log.importlib.util, "find_spec", lambda name: object())
    assert require_tensorboard(True) is None
    assert require_tensorboard(None) is None
    monkeypatch.setattr(progress_log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"wide\[log\].*leave --tensorboard out"):
        require_tensorboard(True)
    assert "metrics.jsonl" in (require_tensorboard(None) or "")
