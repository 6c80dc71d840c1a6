"""Cells that several processes take one by one: whoever works on a cell holds its folder until its process ends."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from pathlib import Path

from wide.errors import ConfigError
from wide.records import Cell
from wide.runs.process import held


def free_cells(
    cells: Sequence[Cell], folder: Callable[[Cell], Path], is_over: Callable[[Cell], bool]
) -> Generator[Cell, None, None]:
    """Yield the cells that are left and that no other process works on; each is held until the next is asked for.

    The search begins anew for each, so that a cell whose process has died is taken up by the next one that is free.
    No cell is yielded twice.

    Args:
        cells: In the order in which they are wanted.
        is_over: Whether nothing of a cell is left to do.

    Raises:
        ConfigError: If the file system has no locks.
    """
    left = list(cells)
    with ExitStack() as own:
        while free := next((cell for cell in left if _takes(own, folder(cell))), None):
            left.remove(free)
            # Asked for under the lock: whoever held it before may have finished it.
            if not is_over(free):
                yield free
            own.close()


def _takes(own: ExitStack, folder: Path) -> bool:
    try:
        return own.enter_context(held(folder))
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be locked ({error.strerror or error}), and --shard next shares cells by locks; give each "
            "process its part with --shard I/N, or let --output lie on a file system that has locks"
        ) from error
