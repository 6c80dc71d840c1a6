"""Progress bars: only on a terminal, and only on the first process of a run."""

import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


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
    silent = None if os.environ.get("RANK", "0") == "0" else True
    yield from tqdm(items, desc=title, total=total, unit=unit, disable=silent, leave=False)
