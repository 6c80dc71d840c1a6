"""Weights that prove themselves: beside each file of a checkpoint its sha256, and whether an index can be read."""

import hashlib
import json
from pathlib import Path
from typing import Any

from wide.data.progress import progress
from wide.errors import AdapterError
from wide.schema import read_json, typed

SUMS = "wide_sha256.json"
"""Beside the weights of a full checkpoint or an export: the sha256 of each of their files."""
_INDEX = "model.safetensors.index.json"
# Hashed in some ten seconds; `wide inspect` checks larger ones, too.
_MOST_WHEN_LOADED = 8 * 2**30


def sha256_of(file: Path) -> str:
    """Return the sha256 of a file, in hexadecimal; raises AdapterError if it cannot be read."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise AdapterError(f"{file} is missing: what it belongs to is incomplete ({error.strerror})") from error


def write_sums(folder: Path) -> None:
    """Write the sha256 of a checkpoint's weights beside them."""
    files = progress(sorted(folder.glob("*.safetensors")), title="sha256 of weights", unit="file")
    found = {file.name: sha256_of(file) for file in files}
    (folder / SUMS).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def check_sums(folder: Path, *, however_large: bool = False) -> list[str]:
    """Compare the weights of a checkpoint with their sha256, and return the files that were compared.

    A folder without sums is not checked, nor are more than 8 GiB unless `however_large`. Raises AdapterError if a file
    is missing or another one than was written, or the index of the files is damaged.
    """
    if (folder / _INDEX).is_file():
        index = typed(dict[str, Any], read_json(folder / _INDEX), f"{folder / _INDEX}:")
        for key, kind in (("metadata", dict[str, Any]), ("weight_map", dict[str, str])):
            typed(kind, index.get(key), f"{folder / _INDEX}: {key}")
    sums = folder / SUMS
    if not sums.is_file():
        return []
    try:
        wanted = json.loads(sums.read_text(encoding="utf-8"))
        files = {folder / name: str(value) for name, value in wanted.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise AdapterError(f"{sums} is damaged ({error}); copy it again, or export it anew") from error
    size = sum(file.stat().st_size for file in files if file.is_file())
    if size > _MOST_WHEN_LOADED and not however_large:
        return []
    for file, value in progress(files.items(), title="checking weights", unit="file"):
        seen = sha256_of(file)
        if seen != value:
            raise AdapterError(
                f"{file} is damaged: its sha256 is {seen[:12]}…, wanted {value[:12]}… (if you changed it on purpose, "
                f"remove {SUMS}); copy it again, or export it anew"
            )
    return [file.name for file in files]
