"""Which command measured a bench's file, and when: written into the file, for those who read it later."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from wide.version import __version__
from wide.writing import write_whole


@contextmanager
def noted(folder: Path, command: str, given: Sequence[str]) -> Iterator[None]:
    """Note the command and the date in the JSON files that the body writes into a folder, even if it fails at last.

    Args:
        folder: Where the body writes; it need not exist yet.
    """
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    try:
        yield
    finally:
        facts = {
            "command": shlex.join(["wide", command, *given]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "wide": __version__,
        }
        for path in sorted(folder.glob("*.json")):
            if path.stat().st_mtime_ns != before.get(path):
                _note(path, facts)


def _note(path: Path, facts: dict[str, str]) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    # A file that was cut while it was written stays as it is: whoever reads it says so.
    except ValueError:
        return
    if isinstance(content, dict):
        write_whole(path, json.dumps({**facts, **content}, indent=1) + "\n")
