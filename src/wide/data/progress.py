"""How far the work is, on the first process of a run: a bar on a terminal, now and then a line in a log."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

# In a log, what ends sooner says nothing.
_SECONDS_BETWEEN_LINES = 20.0

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
    """Yield the items and show how far the work is: a bar where standard error is a terminal, lines elsewhere.

    Args:
        items: What is worked on.
        title: What is being done.
        total: Number of items, where known and not the length of `items`.
        unit: What one item is.
    """
    from tqdm import tqdm

    if total is None and isinstance(items, Sized):
        total = len(items)
    if os.environ.get("RANK", "0") != "0" or not shows_bars():
        yield from items
    elif sys.stderr.isatty():
        yield from tqdm(items, desc=title, total=total, unit=unit, leave=False)
    else:
        yield from _with_lines(items, title, total, unit)


@contextmanager
def steps(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes how many steps are done, of how many, and shows it as `progress` does."""
    from tqdm import tqdm

    began = time.monotonic()
    if not shows_bars() or not sys.stderr.isatty():
        yield lambda done, total: _write_line(title, f"{done}/{total} after {time.monotonic() - began:.0f} s")
        return
    with tqdm(desc=title, leave=False) as bar:

        def told(done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.refresh()

        yield told


def _write_line(title: str, text: str) -> None:
    if shows_bars():
        sys.stderr.write(f"{title}: {text}\n")
        sys.stderr.flush()


def _with_lines(items: Iterable[T], title: str, total: int | None, unit: str) -> Iterator[T]:
    began = shown = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - shown >= _SECONDS_BETWEEN_LINES:
            shown = now
            of_all = "" if total is None else f"/{total}"
            _write_line(title, f"{unit} {done}{of_all} after {now - began:.0f} s")
        yield item
