"""Documents, the rule that holds some out, and how local files are read: plain or compressed (.gz, .zst)."""

import glob
import gzip
import hashlib
import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wide.data.local_names import without_hub
from wide.errors import DataError, MissingExtraError

_CHUNK_BYTES = 1 << 20
_COMPRESSIONS = (".gz", ".zst")
TEXT_TYPES = (".txt", ".md", ".json", ".jsonl", ".parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text.

    Args:
        name: Says where it comes from; stable, because the split depends on it.
        text: The text, never blank.
    """

    name: str
    text: str


def is_held_out(name: str) -> bool:
    """Return whether the document of this name is kept from training (one in ten, by a hash of the name)."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10 == 0


def find_files(source: str | Path) -> list[Path]:
    """Return the files that a path, folder or glob pattern stands for, ordered by name.

    A folder stands for all files of a readable type below it.

    Raises:
        DataError: If nothing is there, or no file has a type that can be read.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and file_type(p) in TEXT_TYPES)
        if not found:
            raise DataError(f"the folder {path} holds no file of a type that can be read: {', '.join(TEXT_TYPES)}")
        return found
    if path.exists():
        paths = [path]
    else:
        paths = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
    if not paths:
        name = str(source)
        raise DataError(f"there is no file, folder or match for {name!r}; check the path{without_hub(name)}")
    for found_path in paths:
        if file_type(found_path) not in TEXT_TYPES:
            raise DataError(
                f"{found_path} has the type {found_path.suffix or '(none)'!r}; types that can be read: "
                f"{', '.join(TEXT_TYPES)}, each also with {' or '.join(_COMPRESSIONS)}"
            )
    return paths


def file_type(path: Path) -> str:
    """Return the suffix that names the content, compression taken off, in lower case."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSIONS else suffix


def read_file(path: Path, text_field: str) -> Iterator[Document]:
    """Yield the documents of one file, without blank ones.

    Text and Markdown files are one document each; of the others, `text_field` of each row is one.

    Raises:
        DataError: If the file is damaged, not UTF-8, or has no such field.

    Warns:
        UserWarning: If rows hold null instead of text; says how many were left out.
    """
    rows = _READERS[file_type(path)](path, text_field)
    return documents_of_rows(rows, path.name, where=str(path), text_field=text_field)


def documents_of_rows(
    rows: Iterable[tuple[int, str | None]], name: str, *, where: str, text_field: str
) -> Iterator[Document]:
    """Yield the documents of numbered texts, without blank ones; row 0 is the whole of its source.

    Warns:
        UserWarning: If rows hold null instead of text; whoever reads only the first rows is told of those.
    """
    nulls = 0
    try:
        for position, text in rows:
            if text is None:
                nulls += 1
            elif text.strip():
                yield Document(name=f"{name}:{position}" if position else name, text=text)
    finally:
        if nulls:
            found = "1 row that holds" if nulls == 1 else f"{nulls} rows that hold"
            warnings.warn(f"{where}: {found} null in the field {text_field!r}, left out", stacklevel=2)


def _read_text(path: Path, _text_field: str) -> Iterator[tuple[int, str]]:
    yield 0, _decode(b"".join(_chunks(path)), str(path))


def read_json_lines(path: Path) -> Iterator[tuple[int, object]]:
    """Yield line number and value of each line that is not blank.

    Raises:
        DataError: If the file is damaged, not UTF-8 or not JSON.
    """
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            text = _decode(line, where)
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                raise DataError(f"{where} is not valid JSON: {error}") from error
            yield number, value


def _read_json_lines(path: Path, text_field: str) -> Iterator[tuple[int, str | None]]:
    for number, row in read_json_lines(path):
        yield number, _field(row, text_field, f"{path}, line {number}")


def _read_json(path: Path, text_field: str) -> Iterator[tuple[int, str | None]]:
    text = _decode(b"".join(_chunks(path)), str(path))
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        # Many data sets call JSON lines .json.
        if error.msg != "Extra data":
            raise DataError(f"{path} is not valid JSON: {error}") from error
        yield from _read_json_lines(path, text_field)
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        yield number, _field(row, text_field, f"{path}, item {number}")


def _read_parquet(path: Path, text_field: str) -> Iterator[tuple[int, str | None]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError(f"reading {path} needs pyarrow: pip install 'wide[data]'") from error
    compressed = path.suffix.lower() in _COMPRESSIONS
    try:
        file = pq.ParquetFile(pa.BufferReader(b"".join(_chunks(path))) if compressed else path)
        if text_field not in file.schema_arrow.names:
            raise _missing_field(text_field, file.schema_arrow.names, str(path))
        number = 0
        for batch in file.iter_batches(columns=[text_field]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield number, _field({text_field: value}, text_field, f"{path}, row {number}")
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


_READERS: dict[str, Callable[[Path, str], Iterator[tuple[int, str | None]]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}


def field_text(row: dict[str, Any], text_field: str, where: str) -> str | None:
    """Return the text of one row; None where it holds null, as rows of public data sets do.

    Raises:
        DataError: If the row has no such field (the message names those it has) or the value is not text.
    """
    if text_field not in row:
        raise _missing_field(text_field, list(row), where)
    value = row[text_field]
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where}: the field {text_field!r} holds {type(value).__name__}, text was wanted")
    return value


def _field(row: object, text_field: str, where: str) -> str | None:
    if isinstance(row, str):
        return row
    if not isinstance(row, dict):
        raise DataError(f"{where} is {type(row).__name__}; an object with the field {text_field!r} was wanted")
    return field_text(row, text_field, where)


def _missing_field(text_field: str, seen: list[str], where: str) -> DataError:
    return DataError(
        f"{where} has no field {text_field!r}; fields seen: {sorted(seen)}; choose one with --text_field (in Python, "
        "text_field=)"
    )


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 (byte {data[error.start]:#04x} at offset {error.start}); convert it to UTF-8"
        ) from error


def _lines(path: Path) -> Iterator[bytes]:
    rest = b""
    for chunk in _chunks(path):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in pieces."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".zst":
            yield from _zstd_chunks(path)
            return
        with gzip.open(path) if suffix == ".gz" else path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is truncated or damaged: {error}; fetch it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError(f"reading {path} needs zstandard: pip install 'wide[data]'") from error
    # The library's stream reader takes a truncated file for a complete one, so frames are followed by hand.
    frame, inside = zstandard.ZstdDecompressor().decompressobj(), False
    try:
        with path.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                while data:
                    yield frame.decompress(data)
                    inside, data = not frame.eof, frame.unused_data if frame.eof else b""
                    if frame.eof:
                        frame = zstandard.ZstdDecompressor().decompressobj()
    except zstandard.ZstdError as error:
        raise DataError(f"{path} is not valid zstd: {error}; fetch it again") from error
    if inside:
        raise DataError(f"{path} is truncated: its last zstd frame does not end; fetch it again")
