"""TensorBoard is refused or named before training, where it is not installed."""

import pytest

from wide.errors import MissingExtraError
from wide.training import progress_log
from wide.training.progress_log import require_tensorboard


def test_tensorboard_is_refused_or_named_before_anything_is_trained(monkeypatch):
    assert require_tensorboard(False) is None
    monkeypatch.setattr(progress_log.importlib.util, "find_spec", lambda name: object())
    assert require_tensorboard(True) is None
    assert require_tensorboard(None) is None
    monkeypatch.setattr(progress_log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"wide\[log\].*leave --tensorboard out"):
        require_tensorboard(True)
    assert "metrics.jsonl" in (require_tensorboard(None) or "")
