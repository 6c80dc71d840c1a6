"""A second stream for work whose result is not needed at once; in a CUDA graph it becomes a branch of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """A second stream, for a router that runs while a product does not yet need its mask."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Any, Any] = {}
        self._running: tuple[Any, Callable[[], Tensor]] | None = None

    @property
    def runs(self) -> bool:
        """Whether something was begun that nobody has waited for."""
        return self._running is not None

    def begin(self, call: Callable[[], Tensor]) -> Tensor:
        """Return what `call` returns, which nobody may read before `wait`; outside of captures it runs at once."""
        if not torch.cuda.is_current_stream_capturing():
            # Two streams would cost the host more than they save.
            return call()
        current = torch.cuda.current_stream(self._device)
        if current not in self._streams:
            # One for each, since a capture keeps it to its end. Of the lowest priority: what runs there is to take what
            # the product leaves over.
            self._streams[current] = torch.cuda.Stream(self._device)
        stream = self._streams[current]
        stream.wait_stream(current)
        # Held until then, since what it reads must not be given to others meanwhile.
        self._running = stream, call
        with torch.cuda.stream(stream):
            return call()

    def wait(self) -> None:
        """Let the current stream wait for what was begun, if anything was."""
        running, self._running = self._running, None
        if running is not None:
            torch.cuda.current_stream(self._device).wait_stream(running[0])

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Wait where the block ends by an exception: a capture with a loose end cannot be ended, nor followed."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                self.wait()
            raise
