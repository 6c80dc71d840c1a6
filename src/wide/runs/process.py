"""The process of a run: which of several speaks and writes, and how it is stopped."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def is_main_process() -> bool:
    """Return whether this process is the one that speaks and writes (rank 0 under torchrun)."""
    return os.environ.get("RANK", "0") == "0"


def num_processes() -> int:
    """Return the number of processes of the run (1 without torchrun)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def say(text: str = "") -> None:
    """Print a line from the main process, at once."""
    if is_main_process():
        print(text, flush=True)


@contextmanager
def stoppable(kept: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM, by which schedulers and `timeout` end a process, end the block and say what is kept.

    Both raise KeyboardInterrupt, so that what is open is closed in good order. Training takes both signals for itself
    and ends after its step (`wide.training.trainer`). Outside the main thread, where Python allows no handlers,
    SIGTERM is left as it is.

    Args:
        kept: Looks at what is there when the block is stopped, and returns it in words.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if main_thread else None
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"{str(interrupt) or 'stopped'}; {kept()}") from interrupt
    finally:
        if main_thread:
            signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt("stopped by SIGTERM")
