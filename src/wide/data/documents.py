"""Documents, the rule that holds some out, and how local files are read: plain or compressed (.gz, .zst)."""

import csv
import glob
import gzip
import hashlib
import io
import json
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from wide.data.tokenizer import chat_text, require_characters
from wide.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COMPRESSIONS = (".gz", ".zst")
TEXT_TYPES = (".txt", ".md", ".csv", ".tsv", ".json", ".jsonl", ".parquet")
_TEXT, _CHAT = "text", "messages"
_LONGEST_CELL = 1 << 30
# That hold a token at the very most, in prose of any language and any tokenizer in use.
_CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text, never blank; its name never changes, because the split depends on it.

    Raises DataError if the text holds half of a character.
    """

    name: str
    text: str

    def __post_init__(self) -> None:
        require_characters(self.text, self.name)


def texts_of(data: Any) -> list[str]:
    """Return texts or documents as texts; raises DataError for anything else, or if they hold anything else."""
    items = list(data) if isinstance(data, Iterable) and not isinstance(data, Mapping) else [data]
    for item in items:
        if not isinstance(item, str | Document):
            raise DataError(f"data holds {type(item).__name__}, not text; give texts, packed blocks or a source")
    return [item.text if isinstance(item, Document) else item for item in items]


def first_documents(documents: Iterable[Document], tokens: int) -> list[Document]:
    """Return the first documents, as many as hold so many tokens at the very least, whatever the tokenizer."""
    kept, characters = [], 0
    for document in documents:
        kept.append(document)
        characters += len(document.text)
        if characters >= tokens * _CHARACTERS_PER_TOKEN:
            break
    return kept


def is_held_out(name: str) -> bool:
    """Return whether the document of this name is kept from training (one in ten, by a hash of the name)."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10 == 0


def split_documents(documents: Iterable[Document], split: str) -> Iterator[Document]:
    """Yield the documents that are trained on, or those that are held out.

    One document in ten is held out. Of few documents that may be none, or all; then the last tenth of each is. Raises
    DataError if there is no such split.
    """
    if split not in ("train", "heldout"):
        raise DataError(f"there is no split {split!r} here; choose 'train' or 'heldout'")
    remaining, first, kinds = iter(documents), [], set()
    for document in remaining:
        first.append(document)
        kinds.add(is_held_out(document.name))
        if len(kinds) == 2:
            break
    for document in chain(first, remaining):
        if len(kinds) == 2:
            if is_held_out(document.name) == (split == "heldout"):
                yield document
            continue
        text = document.text
        tenth = len(text) * 9 // 10
        # Between two lines, where that does not cost much of the text.
        cut = text.rfind("\n", len(text) // 2, tenth) + 1 or tenth
        part = text[:cut] if split == "train" else text[cut:]
        if part.strip():
            yield Document(name=document.name, text=part)


def find_files(source: str | Path) -> list[Path]:
    """Return the files that a path, folder or glob pattern stands for, ordered by name.

    A folder stands for all files of a readable type below it that are not hidden. Raises DataError if nothing is there,
    or no file has a type that can be read.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        # Editors and notebooks keep copies in hidden places, which would be trained on and held out at once.
        files = [p for p in path.rglob("*") if p.is_file() and "/." not in f"/{p.relative_to(path).as_posix()}"]
        found = sorted(p for p in files if file_type(p) in TEXT_TYPES)
        if not found:
            seen = sorted({p.suffix or "(none)" for p in files})[:9]
            raise DataError(
                f"the folder {path} holds no file of a type that can be read ({', '.join(TEXT_TYPES)}) and is no data "
                f"set that save_to_disk wrote; types seen: {', '.join(seen) or 'none, it is empty'}"
            )
        return found
    if path.exists():
        paths = [path]
    else:
        paths = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
    if not paths:
        raise DataError(f"there is no file, folder or match for {str(source)!r}; check the path")
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


def documents_of_rows(
    rows: Iterable[tuple[int, object]],
    name: str,
    *,
    where: str,
    text_field: str,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> Iterator[Document]:
    """Yield the documents of numbered rows, without blank ones; row 0 is the whole of its source.

    Raises DataError if a row has no such field (the message names those it has), or neither a text nor a chat in it.

    Args:
        rows: Texts, or mappings with fields.
        name: What the documents are called, before their numbers.
        text_field: Field of a text, or of a chat: a list of messages with role and content. Rows without 'text' that
            have 'messages' are chats.

    Warns:
        UserWarning: If rows hold null instead of text; whoever reads only the first rows is told of those.
    """
    nulls = 0
    try:
        for position, row in rows:
            text = _row_text(row, text_field, f"{where}, row {position}", tokenizer)
            if text is None:
                nulls += 1
            elif text.strip():
                yield Document(name=f"{name}:{position}" if position else name, text=text)
    finally:
        if nulls:
            found = "1 row that holds" if nulls == 1 else f"{nulls} rows that hold"
            warnings.warn(f"{where}: {found} null in the field {text_field!r}, left out", stacklevel=2)


def _row_text(row: object, text_field: str, where: str, tokenizer: "PreTrainedTokenizerBase | None") -> str | None:
    if isinstance(row, str):
        return row
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is {type(row).__name__}; an object with the field {text_field!r} was wanted")
    if text_field == _TEXT and _TEXT not in row and _CHAT in row:
        text_field = _CHAT
    if text_field not in row:
        raise DataError(
            f"{where} has no field {text_field!r}; fields seen: {sorted(map(str, row))}; choose one with --text_field "
            "(in Python, text_field=)"
        )
    value = row[text_field]
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return chat_text(value, tokenizer, where) if value else ""
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"{where}: the field {text_field!r} holds {type(value).__name__}, text was wanted, or a list of messages"
        )
    return value


def file_rows(path: Path, text_field: str) -> Iterator[tuple[int, object]]:
    """Yield the numbered rows of a file, for `documents_of_rows`; a text or a Markdown file is row 0.

    Raises DataError if the file is damaged or not UTF-8.
    """
    kind = file_type(path)
    if kind == ".jsonl":
        yield from read_json_lines(path)
    elif kind == ".parquet":
        yield from enumerate(_parquet_rows(path, text_field), start=1)
    elif kind in (".csv", ".tsv"):
        yield from enumerate(_table_rows(path, "," if kind == ".csv" else "\t"), start=1)
    else:
        with _opened(path) as file:
            text = _decode(file.read(), str(path))
        yield from [(0, text)] if kind in (".txt", ".md") else _json_rows(path, text)


def read_json_lines(path: Path) -> Iterator[tuple[int, object]]:
    """Yield line number and value of each line that is not blank; raises DataError where one is not JSON in UTF-8."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    value = json.loads(_decode(line, where))
                except json.JSONDecodeError as error:
                    raise DataError(f"{where} is not valid JSON: {error}") from error
                yield number, value


def _json_rows(path: Path, text: str) -> Iterable[tuple[int, object]]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        # Many data sets call JSON lines .json.
        if error.msg == "Extra data":
            return read_json_lines(path)
        raise DataError(f"{path} is not valid JSON: {error}") from error
    return enumerate(rows if isinstance(rows, list) else [rows], start=1)


def _table_rows(path: Path, delimiter: str) -> Iterator[object]:
    csv.field_size_limit(_LONGEST_CELL)
    with _opened(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        try:
            for number, row in enumerate(csv.DictReader(lines, delimiter=delimiter, strict=True), start=1):
                if any(row.get(None, ())):  # type: ignore[call-overload]
                    raise csv.Error(f"row {number} has more cells than the header; put texts in quotes")
                yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read as {file_type(path)[1:].upper()} in UTF-8: {error}") from error


def _parquet_rows(path: Path, text_field: str) -> Iterator[object]:
    pa = _pyarrow(path)
    import pyarrow.parquet as pq

    with _opened(path) as file:
        try:
            table = pq.ParquetFile(pa.BufferReader(file.read()) if path.suffix.lower() in _COMPRESSIONS else file)
            # The other columns may be large.
            columns = [text_field] if text_field in table.schema_arrow.names else None
            for batch in table.iter_batches(columns=columns):
                yield from batch.to_pylist()
        except pa.ArrowException as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 (byte {data[error.start]:#04x} at offset {error.start}); convert it to UTF-8"
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for its decompressed bytes; one that is cut short is refused where it ends."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".zst":
            # The zstandard library takes a truncated file for a complete one.
            file: Any = io.BufferedReader(_pyarrow(path).input_stream(str(path), compression="zstd"))
        else:
            file = gzip.open(path) if suffix == ".gz" else path.open("rb")  # noqa: SIM115, closed below
        with file:
            yield file
    except (EOFError, zlib.error, OSError) as error:
        if suffix in _COMPRESSIONS:
            raise DataError(f"{path} is truncated or damaged: {error}; fetch it again") from error
        raise DataError(f"{path} cannot be read: {error}") from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingExtraError(f"reading {path} needs pyarrow: pip install 'wide[data]'") from error
    return pyarrow
