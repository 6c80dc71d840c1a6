"""Progress bars: only on a terminal, and only on the first process of a run."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_HIDDEN: ContextVar[bool] = ContextVar("_HIDDEN", default=False)


@contextmanager
def without_bars() -> Iterator[None]:
    """Show no bars inside the block, because nothing is worked off there."""
    before = _HIDDEN.set(True)
    try:
        yield
    finally:
        _HIDDEN.reset(before)


def shows_bars() -> bool:
    """Return whether bars are wanted at this place at all."""
    return not _HIDDEN.get()


def progress(items: Iterable[T], *, title: str, total: int | None = None, unit: str = "it") -> Iterator[T]:
    """Yield the items and show how far the work is.

    Args:
        items: What is worked on.
        title: What is being done.
        total: Number of items, where known.
        unit: What one item is.
    """
    from tqdm import tqdm

    # None means: silent unless standard error is a terminal.
    silent = None if os.environ.get("RANK", "0") == "0" and shows_bars() else True
    yield from tqdm(items, desc=title, total=total, unit=unit, disable=silent, leave=False)
