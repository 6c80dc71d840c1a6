"""Records: every measured value as one JSON line that says of what, in which unit, and where it was measured.

Tables and figures are drawn from records alone.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from wide.errors import DataError

_DISTRIBUTIONS = ("wide", "torch", "transformers", "peft", "lm-eval", "triton")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One measured value.

    Args:
        subject: What was measured, e.g. 'dense', 'stage 1'.
        metric: Which property, dotted from coarse to fine, e.g. 'sparsity.ffn'.
        value: The number, or a text where the metric is one.
        unit: Unit of the value; 'share' for a fraction in [0, 1], empty for a pure number.
        where: Data and protocol, e.g. 'python-docs held out, windows of 1024'.
        layer: Decoder layer, from 0, where the value belongs to one.
        step: Optimiser step, where the value belongs to one.
        config_fingerprint: `fingerprint` of the resolved configuration.
        device: What it ran on.
        versions: Distribution -> version; None means those of the latest earlier record that has them.
        time: ISO 8601, UTC.
    """

    subject: str
    metric: str
    value: float | str
    unit: str = ""
    where: str = ""
    layer: int | None = None
    step: int | None = None
    config_fingerprint: str = ""
    device: str = ""
    versions: Mapping[str, str] | None = None
    time: str = ""


_FIELDS = frozenset(field.name for field in fields(Record))
_REQUIRED = frozenset({"subject", "metric", "value"})


class RecordFile:
    """A file of records that is only ever appended to.

    Args:
        path: The JSON-lines file; made at the first `append`.
        config_fingerprint: Written into every record.
        device: Written into every record.
    """

    def __init__(self, path: Path, *, config_fingerprint: str = "", device: str = "") -> None:
        """Open nothing yet."""
        self.path = path
        self.device = device
        self._fingerprint = config_fingerprint
        self._versions = versions()

    def append(self, records: Iterable[Record]) -> None:
        """Write records with fingerprint, device and the time, and force them to the disk.

        Versions are long and the same for all: only the first record of each call carries them.
        """
        facts: dict[str, Any] = {
            "config_fingerprint": self._fingerprint,
            "device": self.device,
            "versions": self._versions,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        lines = []
        for record in records:
            found = asdict(record) | facts
            # What a record does not have is not written; an empty text may be its value.
            lines.append(json.dumps({k: v for k, v in found.items() if k == "value" or v not in (None, "")}))
            facts["versions"] = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(self.path)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())


def read_records(path: Path) -> tuple[list[Record], list[str]]:
    """Return the records of a file and what was left out of it, in words.

    A process that is killed while it writes leaves half a line; that line is left out and reported.

    Args:
        path: A file written by `RecordFile`.

    Raises:
        DataError: If the file is missing, or a line other than a cut one is not a record.
    """
    if not path.is_file():
        raise DataError(f"there are no records at {path}; name the records.jsonl of a run")
    records, notes = [], []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            notes.append(f"line {number} of {path.name} was cut while being written and is left out")
            continue
        records.append(_record(found, f"{path}, line {number}"))
    return records, notes


def fingerprint(config: Any) -> str:
    """Return a short hash of a JSON-ready configuration; the order of keys does not matter."""
    content = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed distributions that results depend on."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _record(found: object, where: str) -> Record:
    if not isinstance(found, dict) or not set(found) >= _REQUIRED:
        raise DataError(f"{where}: a record needs {sorted(_REQUIRED)}, got {found!r}"[:300])
    # A later version may know more fields; what this version does not know it does not draw either.
    return Record(**{key: value for key, value in found.items() if key in _FIELDS})


def _end_last_line(path: Path) -> None:
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
