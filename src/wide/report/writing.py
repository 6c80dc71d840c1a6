"""Writing files that others may read or write at the same time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SUFFIX = ".writing"


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old or the new text, never a part.

    Args:
        path: The file; its folder is made if it is missing.
        text: The content, written as UTF-8.
    """
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file, and put it in its place when the block ends without an error.

    Args:
        path: The file; its folder is made if it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes that write the same file at the same time must not share the unfinished one.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{_SUFFIX}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def is_unfinished(path: Path) -> bool:
    """Return whether a file is one that `replacing` is writing, or was when its process was killed."""
    return path.name.startswith(".") and path.name.endswith(_SUFFIX)
