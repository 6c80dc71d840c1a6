"""The process of a run: which of several speaks and writes, what it holds, and how it is stopped."""

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

LOCK = "lock"
"""Name of the file in a folder that is locked by who works there; it stays, because others may be waiting at it."""
_SECONDS_TO_ASK = 5


def is_main_process() -> bool:
    """Return whether this process is the one that speaks and writes (rank 0 under torchrun)."""
    return os.environ.get("RANK", "0") == "0"


def num_processes() -> int:
    """Return the number of processes of the run (1 without torchrun)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ends_first() -> bool:
    """Return whether no other process of the run has asked this before: one message says why a run ends.

    The answer comes from the store that torchrun keeps for its processes, which outlives each of them.
    """
    if num_processes() == 1:
        return True
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_SECONDS_TO_ASK))
        return bool(store.add(f"wide/ended/{attempt}", 1) == 1)
    # Whatever is wrong with the store, the reason must be told.
    except Exception:
        return True


def say(text: str = "", file: TextIO | None = None) -> None:
    """Print a line from the main process, at once; None stands for stdout."""
    if is_main_process():
        print(text, file=file, flush=True)


@contextmanager
def held(folder: Path, *, shared: bool = False) -> Iterator[bool]:
    """Hold a folder for the length of the block; yields False, and does not wait, where another process holds it.

    If it is `shared`, others may hold it as shared, too. The system gives the lock back when the process ends,
    by `kill -9` too. Raises OSError if the file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            # Closing alone would leave it with a child that was forked meanwhile.
            fcntl.flock(file, fcntl.LOCK_UN)


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
