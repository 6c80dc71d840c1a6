"""How far the work is, on the first process of a run: a bar on a terminal, now and then a line in a log."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

# In a log what takes less than that says nothing.
_QUIET = {"mininterval": 0.5, "miniters": 1, "delay": 0.5}
_HIDDEN: ContextVar[bool] = ContextVar("_HIDDEN", default=False)


class _Lines(tqdm):  # type: ignore[type-arg]
    """Writes lines where tqdm draws a bar: one in so many seconds, whichever loop is running then."""

    seconds_between = 10.0
    last = time.monotonic()

    def display(self, *_args: Any, **_kwargs: Any) -> None:
        elapsed, now = self.format_dict["elapsed"], time.monotonic()
        # Long work needs fewer lines; the last figures of a course are worth one.
        is_end = self.n == self.total and bool(self.postfix)
        if now - _Lines.last < max(self.seconds_between, elapsed / 10) and not is_end:
            return
        _Lines.last = now
        line = (
            f"{self.desc}: {self.unit} {self.n}{'' if self.total is None else f'/{self.total}'} after {_time(elapsed)}"
        )
        if self.total and self.n > self.initial:
            line += f", {_time(elapsed * (self.total - self.n) / (self.n - self.initial))} left"
        sys.stderr.write(f"{line}{f': {self.postfix}' if self.postfix else ''}\n")
        sys.stderr.flush()

    def close(self) -> None:
        if not self.disable:
            self.disable = True
            self._decr_instances(self)  # type: ignore[attr-defined]


@contextmanager
def without_bars() -> Iterator[None]:
    """Show no bars inside the block, because nothing is worked off there."""
    before = _HIDDEN.set(True)
    try:
        yield
    finally:
        _HIDDEN.reset(before)


def progress(items: Iterable[T], *, title: str, total: int | None = None, unit: str = "it") -> Iterator[T]:
    """Yield the items and show how far the work is: a bar where standard error is a terminal, lines elsewhere."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    yield from bar_of(items, desc=title, total=total, unit=unit)


@contextmanager
def steps(title: str, *, unit: str = "step") -> Iterator[Callable[[int, int | None], None]]:
    """Yield a function that takes how many steps are done, of how many, and shows it as `progress` does."""
    with bar_of(desc=title, unit=unit) as bar:

        def told(done: int, total: int | None) -> None:
            bar.total, bar.n = total, done
            bar.refresh()

        yield told


@contextmanager
def loading() -> Iterator[None]:
    """Show how transformers loads and writes weights inside the block as `progress` does."""
    from transformers.utils import logging

    def hook(_kind: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return bar_of(*args, **options)

    before = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def bar_of(*args: Any, **kwargs: Any) -> Any:
    """Return a bar of tqdm, whose arguments it takes, or what writes lines in its place."""
    hidden = _HIDDEN.get() or os.environ.get("RANK", "0") != "0"
    kind: Any = tqdm
    if not sys.stderr.isatty():
        kind, kwargs = _Lines, kwargs | _QUIET
    return kind(*args, **({"disable": hidden, "leave": False} | kwargs))


def _time(seconds: float) -> str:
    return str(tqdm.format_interval(seconds))
