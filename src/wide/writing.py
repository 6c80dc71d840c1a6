"""Files and folders that appear whole or not at all, while others may read or write them, and after a crash."""

import errno
import fcntl
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from wide.errors import ConfigError

_SUFFIX, _EARLIER = ".writing", ".earlier"


def write_whole(path: Path, text: str) -> None:
    """Write a text file as UTF-8 so that a reader sees the old or the new text, never a part."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the system say what was to be written: a write, unlike an open, does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file, and put it in its place, in a folder that is made, when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Threads and processes, also of other machines, that write the same file must not share the unfinished one.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_SUFFIX}")
    try:
        with naming(path):
            yield unfinished
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def is_unfinished(path: Path) -> bool:
    """Return whether a file is one that `replacing` is writing, or was when its process was killed."""
    return path.name.startswith(".") and path.name.endswith(_SUFFIX)


@contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target` for what becomes it; what is left of it afterwards is removed.

    So is what a process that was killed has left there. One that lives holds its folder by a lock, which the system
    gives back when it ends.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in _beside(target, _SUFFIX):
        with _held(folder) as is_left:
            if is_left:
                shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as held:
        temporary = None
        # Another process may have taken it for left before it was held.
        while temporary is None or not temporary.exists():
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_SUFFIX, dir=target.parent))
            held.enter_context(_held(temporary, waits=True))
        held.callback(shutil.rmtree, temporary, ignore_errors=True)
        yield temporary


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends without an error, forced to the disk by then.

    A folder that is there is replaced; a crash between the two renames leaves it whole as .NAME.*.earlier beside it. A
    full disk is an OSError, whatever the library that writes makes of that.
    """
    if target.resolve() == Path.cwd():
        raise ConfigError(
            f"{str(target)!r} is the folder that this process runs in and cannot be replaced; name another"
        )
    with unfinished_folder(target) as temporary:
        try:
            # mkdtemp makes the folder private.
            temporary.chmod(0o755)
            with naming(target):
                yield temporary
                for path in (*temporary.rglob("*"), temporary):
                    _sync(path)
                if target.exists():
                    target.rename(temporary.with_name(f"{temporary.name}{_EARLIER}"))
                temporary.rename(target)
                _sync(target.parent)
        except Exception as error:
            # Known by its name, because importing safetensors here would slow every command down.
            if type(error).__name__ == "SafetensorError":
                raise OSError(errno.EIO, f"the weights cannot be written ({error})", str(target)) from error
            raise
    for earlier in _beside(target, _SUFFIX + _EARLIER):
        # That of a process between its two renames is needed yet.
        if not earlier.with_suffix("").exists():
            shutil.rmtree(earlier, ignore_errors=True)


def _beside(target: Path, suffix: str) -> list[Path]:
    """Return the folders that `unfinished_folder` has made for a target."""
    name = re.compile(rf"\.{re.escape(target.name)}\.\w{{8}}{re.escape(suffix)}")
    return [path for path in target.parent.iterdir() if name.fullmatch(path.name)]


@contextmanager
def _held(folder: Path, *, waits: bool = False) -> Iterator[bool]:
    """Hold a folder by a lock for the length of the block; yield False where another process does, or none can."""
    with ExitStack() as held:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            # Closing alone would leave it with a child that was forked meanwhile.
            held.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
            is_held = True
        except OSError:
            is_held = False
        yield is_held


def _sync(path: Path) -> None:
    """Force a file, or the names in a folder after a rename, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
