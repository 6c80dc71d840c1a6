"""Notes which kernels some calls would compile, so that all are compiled in parallel before the first of them runs."""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

from wide.kernels.native import tilelang


class Note(NamedTuple):
    """A kernel that is to be compiled.

    Args:
        name: What a record calls it.
        build: Compiles it and keeps it on disk; a function of a module, which another process can be given.
        arguments: Of `build`.
    """

    name: str
    build: Callable[..., object]
    arguments: tuple[Hashable, ...]


_notes: dict[Note, None] | None = None


@contextlib.contextmanager
def noting() -> Iterator[dict[Note, None]]:
    """Note kernels instead of compiling them: callers get functions that do nothing."""
    global _notes
    _notes = {}
    build = tilelang.compiled

    def note(make: Callable[..., Any], architecture: str, constants: tuple[tuple[str, Any], ...]) -> Any:
        return stand_in(f"{make.__name__} {dict(constants)}", build, make, architecture, constants)

    vars(tilelang)["compiled"] = note
    try:
        yield _notes
    finally:
        _notes = None
        vars(tilelang)["compiled"] = build


def stand_in(name: str, build: Callable[..., object], *arguments: Hashable) -> Callable[..., None] | None:
    """Return a function that does nothing while kernels are noted, else None; arguments as of `Note`."""
    if _notes is None:
        return None
    _notes[Note(name, build, arguments)] = None
    return _nothing


def _nothing(*_: object) -> None:
    """Launch nothing."""


def compiled(notes: dict[Note, None]) -> Iterator[dict[str, Any]]:
    """Compile noted kernels on all cores, and yield for each its name and seconds, or why it failed, as they end."""
    # Not forked: the process has a GPU already.
    workers = min(len(notes), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_timed, note): note for note in notes}
        for done in as_completed(running):
            died = done.exception()  # of a full memory, for example
            yield {"kernel": running[done].name} | ({"failure": repr(died)} if died else done.result())


def _timed(note: Note) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        note.build(*note.arguments)
    # The first real call raises it again.
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"seconds": round(time.perf_counter() - began, 2)}
