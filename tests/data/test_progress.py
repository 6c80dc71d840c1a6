"""Progress in a log: lines now and then, from the first process alone."""

import pytest

from wide.data import progress as module
from wide.data.progress import progress, without_bars


@pytest.fixture
def slow(monkeypatch):
    """A clock that moves on by 8 s whenever somebody looks."""
    times = iter(range(0, 10_000, 8))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(times)))


def test_slow_work_writes_lines_where_there_is_no_terminal(slow, capsys):
    assert list(progress(range(7), title="tyr: layers", unit="layer")) == list(range(7))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["tyr: layers: layer 2/7 after 24 s", "tyr: layers: layer 5/7 after 48 s"]


def test_work_of_unknown_length_writes_lines_too(slow, capsys):
    assert sum(progress(iter(range(4)), title="reading", unit="row")) == 6
    assert capsys.readouterr().err == "reading: row 2 after 24 s\n"


def test_quick_work_and_other_processes_are_silent(slow, monkeypatch, capsys):
    with without_bars():
        list(progress(range(9), title="quiet"))
    monkeypatch.setenv("RANK", "1")
    list(progress(range(9), title="quiet"))
    monkeypatch.undo()
    list(progress(range(9), title="quiet"))
    assert capsys.readouterr().err == ""
