"""The next greedy step, begun on a stream of its own while `generate` still picks the token on the host's time."""

from typing import Any

import torch
from torch import Tensor

from wide.inference.engine.cache import KvCache
from wide.inference.engine.graphs import CapturedStep


class NextStep:
    """Holds at most one step that runs for a guessed token, until it is asked for or has to make way.

    It writes the place after a cache's last token and moves its lengths on, so that whatever else uses the engine's
    memory has to `drop` it first; graphs share memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._guessed, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._running: tuple[CapturedStep, KvCache] | None = None

    @property
    def _current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def begin(self, step: CapturedStep, cache: KvCache) -> None:
        """Let a step run for the likeliest token after the logits that it gave last; the cache has room for it."""
        self._stream.wait_stream(self._current)
        with torch.cuda.stream(self._stream):
            torch.argmax(step.logits, 1, out=step.ids)
            self._guessed.record()
            step.graph.replay()
            self._done.record()
        self._running = step, cache

    def take(self, step: CapturedStep | None, ids: Tensor) -> Tensor | None:
        """Return the logits [B, V] of a step if it runs for these tokens [B]; otherwise drop what runs."""
        if self._running is not None and self._running[0] is step:
            self._current.wait_event(self._guessed)
            # The host waits for the comparison alone: the step goes on beside it.
            if torch.equal(step.ids, ids):
                self._running = None
                self._current.wait_event(self._done)
                return step.logits
        self.drop()
        return None

    def drop(self) -> None:
        """Take back the step that runs, if one does; the current stream waits for it, also if another dropped it."""
        running, self._running = self._running, None
        self._current.wait_event(self._done)
        if running is not None:
            running[1].lengths.sub_(1)
