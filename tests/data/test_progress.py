"""Progress in a log: lines now and then, from the first process alone."""

import re
from types import SimpleNamespace

import pytest

from wide.data import progress as module
from wide.data.progress import progress, steps, without_bars


@pytest.fixture
def slowly(monkeypatch):
    """Return a generator of numbers for each of which 0.6 seconds pass on the clock that is read."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def numbers(count):
        for item in range(count):
            now[0] += 0.6
            yield item

    return numbers


@pytest.fixture
def often(monkeypatch):
    """Lines as soon as there is something to say."""
    monkeypatch.setattr(module._Lines, "seconds_between", 0.0)
    monkeypatch.setattr(module._Lines, "last", 0.0)


def test_slow_work_says_how_far_it_is_and_how_long_it_takes(often, slowly, capsys):
    assert list(progress(slowly(3), title="tyr: layers", total=3, unit="layer")) == [0, 1, 2]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert re.fullmatch(r"tyr: layers: layer 2/3 after 00:01, 00:00 left", lines[1])


def test_work_of_unknown_length_says_how_far_it_is(often, slowly, capsys):
    assert sum(progress(slowly(2), title="reading", unit="row")) == 1
    assert capsys.readouterr().err.splitlines()[0] == "reading: row 1 after 00:00"


def test_loops_that_are_short_each_write_a_line_now_and_then(slowly, monkeypatch, capsys):
    monkeypatch.setattr(module._Lines, "seconds_between", 1.0)
    monkeypatch.setattr(module._Lines, "last", module.time.monotonic())
    for number in range(3):
        list(progress(slowly(1), title=f"removal {number}", total=1))
    assert capsys.readouterr().err.splitlines() == ["removal 1: it 1/1 after 00:00, 00:00 left"]


def test_what_counts_itself_writes_lines_too(often, slowly, capsys):
    with steps("measuring") as told:
        list(slowly(1))
        told(1, 4)
    assert "measuring: step 1/4 after 00:00" in capsys.readouterr().err


def test_quick_work_and_other_processes_are_silent(often, slowly, monkeypatch, capsys):
    with without_bars():
        list(progress(slowly(1), title="quiet"))
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        list(progress(slowly(1), title="quiet"))
    list(progress(range(9), title="quiet"))
    assert capsys.readouterr().err == ""
