"""SIGTERM, by which schedulers and `timeout` end a process, ends it as Ctrl-C does; both say what is kept."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt for the length of the block, so that what is open is closed in good order.

    Training takes both signals for itself and ends after its step (`wide.training.interrupt`). Outside the main thread,
    where Python allows no handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def telling(kept: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C inside the block end with a message that says what is kept.

    Args:
        kept: Looks at what is there then, and returns it in words.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"{str(interrupt) or 'stopped'}; {kept()}") from interrupt


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt("stopped by SIGTERM")
