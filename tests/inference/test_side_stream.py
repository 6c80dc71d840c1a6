"""Work on a second stream is waited for, keeps what it reads until then, and leaves no loose end after an exception."""

import contextlib
import weakref

import pytest
import torch

from wide.inference.engine.side_stream import SideStream


class _Stream:
    def __init__(self, name, said):
        self.name, self._said = name, said

    def wait_stream(self, other):
        self._said.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def said(monkeypatch):
    """Stand in for streams, of which one is being captured."""
    said = []
    main = _Stream("main", said)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream("side", said))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return said


def test_both_streams_wait_once_and_what_is_read_lives_until_then(said):
    side, read = SideStream(torch.device("cuda")), torch.ones(3)
    alive = weakref.ref(read)
    out = side.begin(lambda read=read: read * 2)
    del read
    assert side.runs
    assert alive() is not None
    assert said == ["side waits for main"]
    side.wait()
    side.wait()
    assert alive() is None
    assert said == ["side waits for main", "main waits for side"]
    assert out.tolist() == [2, 2, 2]


def test_an_interruption_joins_what_runs(said):
    side = SideStream(torch.device("cuda"))

    def step():
        with side.joined():
            side.begin(lambda: torch.ones(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step()
    assert not side.runs
    assert said[-1] == "main waits for side"


def test_outside_of_captures_it_runs_at_once(said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    side = SideStream(torch.device("cuda"))
    assert side.begin(lambda: torch.ones(1)).item() == 1
    assert not side.runs
    assert not said
