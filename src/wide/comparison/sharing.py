"""Cells that several processes take one by one: whoever works on a cell holds a lock that ends with its process."""

import fcntl
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from wide.errors import ConfigError
from wide.records import Cell
from wide.runs.folder import LOCK


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Hold a cell for the length of the block; yields False, and does not wait, where another process holds it.

    The system gives the lock back when the process ends, by `kill -9` too.

    Args:
        folder: Of the cell; made if it is missing.

    Raises:
        ConfigError: If the file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        mine = _lock(descriptor, folder)
        try:
            yield mine
        finally:
            if mine:
                # Closing alone would leave it with a child that was forked meanwhile.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be locked ({error.strerror or error}), and --shard next shares cells by locks; give each "
            "process its part with --shard I/N, or let --output lie on a file system that has locks"
        ) from error
    return True


def free_cells(
    cells: Sequence[Cell], folder: Callable[[Cell], Path], is_over: Callable[[Cell], bool]
) -> Generator[Cell, None, None]:
    """Yield the cells that are left and that no other process works on; each is held until the next is asked for.

    The search begins anew for each, so that a cell whose process has died is taken up by the next one that is free.
    No cell is yielded twice.

    Args:
        cells: In the order in which they are wanted.
        folder: Of a cell.
        is_over: Whether nothing of a cell is left to do.

    Raises:
        ConfigError: If the file system has no locks.
    """
    left = list(cells)
    while True:
        for cell in left:
            with held(folder(cell)) as mine:
                if not mine:
                    continue
                left.remove(cell)
                # Asked for under the lock: whoever held it before may have finished it.
                if not is_over(cell):
                    yield cell
                break
        else:
            return
