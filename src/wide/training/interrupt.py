"""Ctrl-C and SIGTERM end the training after the current step, not in the middle of one."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, the first signal only raises `requested`; a second one acts as it used to."""

    def __init__(self) -> None:
        """Start without a request."""
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        """Take over the handlers; Python allows it in the main thread only."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        self.__exit__(None, None, None)
