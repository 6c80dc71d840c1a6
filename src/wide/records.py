"""Records: every measured value as one JSON line that says of what, in which unit, and where it was measured.

Tables and figures are drawn from records alone.
"""

import gzip
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from wide.errors import DataError
from wide.writing import naming

_DISTRIBUTIONS = ("wide", "torch", "transformers", "peft", "lm-eval", "triton")
RECORDS, STUDY = "records.jsonl", "records.jsonl.gz"
"""Records of a run or a cell, and those of a study, compressed in one file, where each line names its run."""
GRID, CELLS, COMPARISON = "grid.jsonl", "cells", "compare.jsonl"
"""In the folder of a comparison: what was asked for, the folder of all cells, and the records of all of them."""


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """One point of a comparison's grid: a row, a target in [0, 1) (dense: 0), and the seed of calibration."""

    method: str
    sparsity: float
    seed: int

    @property
    def folder(self) -> str:
        """Name of the folder that holds what the cell leaves behind."""
        return f"{self.method}-{self.sparsity:g}-seed{self.seed}"

    @property
    def title(self) -> str:
        """Name for a line on the terminal."""
        return f"{self.method}{'' if not self.sparsity else f' {self.sparsity:.4g}'} seed {self.seed}"

    @classmethod
    def from_folder(cls, name: str) -> "Cell | None":
        """Return the cell whose `folder` has this name, None where it is no cell's."""
        method, _, seed = name.rpartition("-seed")
        method, _, sparsity = method.rpartition("-")
        try:
            return cls(method, float(sparsity), int(seed)) if method else None
        except ValueError:
            return None


@dataclass(frozen=True, order=True, slots=True)
class Stage:
    """A cell of a comparison as it was measured: calibrated only, or with LoRA on top (`recovered`)."""

    cell: Cell
    recovered: bool


Subject = str | Stage
Content = float | str | list[Any] | dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One measured value.

    Args:
        subject: What was measured: a name, e.g. 'dense' or 'stage 1', or the stage of a comparison's cell.
        metric: Which property, dotted from coarse to fine, e.g. 'sparsity.ffn'.
        value: The number, or a text, list or mapping where the metric is one.
        unit: 'share' for a fraction in [0, 1], empty for a pure number.
        where: Data and protocol, e.g. 'python-docs held out, windows of 1024'.
        layer: Decoder layer, from 0, where the value belongs to one.
        step: Optimiser step, where the value belongs to one.
        run: Name of the run or comparison, in a file that holds several.
        config_fingerprint: `fingerprint` of the resolved configuration.
        versions: Distribution -> version; None means those of the latest earlier record that has them.
        time: ISO 8601, UTC.
    """

    subject: Subject
    metric: str
    value: Content
    unit: str = ""
    where: str = ""
    layer: int | None = None
    step: int | None = None
    run: str = ""
    config_fingerprint: str = ""
    device: str = ""
    versions: Mapping[str, str] | None = None
    time: str = ""


_FIELDS = tuple(field.name for field in fields(Record))
_CELL: dict[str, type] = {"method": str, "sparsity": float, "seed": int}


class RecordFile:
    """A JSON-lines file of records that is only ever appended to; `silent` where another process of the run writes."""

    def __init__(self, path: Path, *, config_fingerprint: str = "", device: str = "", silent: bool = False) -> None:
        self.path = path
        self._silent = silent
        self.has_grown = False
        self.device = device
        self._fingerprint = config_fingerprint
        self._versions = versions()

    def latest(self, subject: Subject, metric: str) -> Record | None:
        """Return the last record of a whole-model value; None where it was not measured."""
        found = read_records(self.path)[0] if self.path.is_file() else []
        return next((each for each in reversed(found) if (each.subject, each.metric) == (subject, metric)), None)

    def append(self, records: Iterable[Record]) -> None:
        """Write records with fingerprint, device and the time, and force them to the disk.

        Versions are long and the same for all: only the first record of each call carries them.
        """
        if self._silent:
            return
        self.has_grown = True
        facts: dict[str, Any] = {
            "config_fingerprint": self._fingerprint,
            "device": self.device,
            "versions": self._versions,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        lines = []
        for record in records:
            found = {field: getattr(record, field) for field in _FIELDS} | facts
            if isinstance(record.subject, Stage):
                found["subject"] = {**asdict(record.subject.cell), "recovered": record.subject.recovered}
            # What a record does not have is not written; an empty text may be its value.
            kept = {key: value for key, value in found.items() if key == "value" or value not in (None, "")}
            lines.append(json.dumps(kept, ensure_ascii=False))
            facts["versions"] = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with naming(self.path):
            _end_last_line(self.path)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())


def read_records(path: Path, run: str = "") -> tuple[list[Record], list[str]]:
    """Return the records of a file (of one run, in a file that holds several) and what was left out of it, in words.

    Raises DataError if the file is missing, or a line other than a cut one is not a record.
    """
    lines, notes = read_lines(path)
    of_others = [isinstance(line, dict) and ("bench" in line or run not in ("", line.get("run", ""))) for line in lines]
    found = [line for line, is_other in zip(lines, of_others, strict=True) if not is_other]
    return [_record(line, f"{path}, record {number}") for number, line in enumerate(found, 1)], notes


def read_lines(path: Path) -> tuple[list[Any], list[str]]:
    """Return the content of each line of a JSON-lines file (.gz, too), and what was left out of it, in words.

    A process that is killed while it writes leaves half a line; that line is left out and reported. Raises DataError if
    the file is missing.
    """
    if not path.is_file():
        raise DataError(f"there are no records at {path}; name the records.jsonl of a run")
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    found, notes = [], []
    for number, line in enumerate(content.decode("utf-8", errors="replace").split("\n"), 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                notes.append(f"line {number} of {path.name} was cut while being written and is left out")
    return found, notes


def fingerprint(config: Any) -> str:
    """Return a short hash of a JSON-ready configuration; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


# Reading the metadata of all of them takes tens of milliseconds.
@cache
def versions() -> Mapping[str, str]:
    """Return the versions of Python and of the installed distributions that results depend on."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _record(found: Any, where: str) -> Record:
    try:
        # A later version may know more fields; what this version does not know it does not draw either.
        kept = {key: value for key, value in found.items() if key in _FIELDS}
        if not isinstance(kept["subject"], str):
            cell = Cell(*(kind(kept["subject"][name]) for name, kind in _CELL.items()))
            kept["subject"] = Stage(cell, bool(kept["subject"]["recovered"]))
        if not isinstance(kept["metric"], str):
            raise TypeError(f"metric {kept['metric']!r} is no text")
        return Record(**kept)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: a record needs subject, metric and value ({error!r}), got {f'{found!r}'[:200]}; delete the "
            "line, or measure again"
        ) from error


def _end_last_line(path: Path) -> None:
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
