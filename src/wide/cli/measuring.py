"""What commands that measure on a GPU share: the GPU, and a note in their files of the command and the date."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from wide.errors import UnsupportedBackendError
from wide.version import __version__
from wide.writing import write_whole


def require_gpu(command: str) -> None:
    """Refuse a machine without a CUDA device; raises UnsupportedBackendError if there is none."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedBackendError(
            f"wide {command} times kernels on a CUDA GPU and this machine has none that torch {torch.__version__} can "
            "use; run it on a machine with one (sm_80 or newer)"
        )


@contextmanager
def noted(folder: Path, command: str, given: Sequence[str]) -> Iterator[None]:
    """Note the command and the date in the JSON files that the body writes into a folder, even if it fails at last."""
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    try:
        yield
    finally:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {"command": shlex.join(["wide", command, *given]), "date": date, "wide": __version__}
        for path in sorted(folder.glob("*.json")):
            # A file that was cut while it was written stays as it is: whoever reads it says so.
            with suppress(ValueError):
                if path.stat().st_mtime_ns != before.get(path):
                    content = json.loads(path.read_text(encoding="utf-8"))
                    if isinstance(content, dict):
                        write_whole(path, json.dumps(facts | content, indent=1) + "\n")
