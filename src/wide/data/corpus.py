"""Documents from a named source: Python's own documentation, local files, or a Hugging Face data set."""

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from wide.data.documents import (
    TEXT_TYPES,
    Document,
    documents_of_rows,
    field_text,
    file_type,
    find_files,
    is_held_out,
    read_file,
)
from wide.data.local_names import is_path
from wide.data.python_docs import python_docs
from wide.errors import ConfigError, DataError, EmptySplitError, MissingExtraError

PYTHON_DOCS = "python-docs"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


def load_documents(
    source: str | Path,
    *,
    split: str | None = None,
    text_field: str = "text",
    max_documents: int | None = None,
) -> Iterator[Document]:
    """Yield the documents of a source, in an order that never changes.

    Args:
        source: 'python-docs'; a local file, folder or glob pattern (.txt .md .json .jsonl .parquet, also .gz and
            .zst); or the name of a Hugging Face data set, with its configuration after a colon
            (`Salesforce/wikitext:wikitext-2-raw-v1`), which is streamed.
        split: For 'python-docs' and files, 'train' or 'heldout' (one document in ten, by a hash of its name); None
            means 'train' of 'python-docs', all documents of files, and 'train' of a data set.
        text_field: Field that holds the text, where rows have fields.
        max_documents: Stop after so many.

    Raises:
        ConfigError: If `max_documents` is less than 1.
        DataError: If the source is missing, empty, damaged or of a wrong type.
        EmptySplitError: If it has documents, and none of them falls into the split.
    """
    if max_documents is not None and max_documents < 1:
        raise ConfigError(f"max_documents must be at least 1, got {max_documents}; leave it out to read everything")
    count = 0
    for document in islice(_documents(source, split, text_field), max_documents):
        count += 1
        yield document
    if not count:
        if split is not None and _is_local(source):
            _refuse_empty_split(source, split, text_field)
        raise DataError(f"{str(source)!r} (split {split or 'all'}) holds no text; name another source or split")


def source_fingerprint(source: str | Path, *, split: str | None = None, text_field: str = "text") -> str:
    """Return a hash that changes when the text behind a source may have changed (files: path, size, time)."""
    parts = [str(source), str(split), text_field]
    if source == PYTHON_DOCS:
        parts.append(sys.version)
    elif _is_local(source):
        for path in find_files(source):
            facts = path.stat()
            parts.append(f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _documents(source: str | Path, split: str | None, text_field: str) -> Iterator[Document]:
    if source == PYTHON_DOCS:
        return _of_split(iter(python_docs()), split or "train")
    if _is_local(source):
        documents = (document for path in find_files(source) for document in read_file(path, text_field))
        return _of_split(documents, split)
    return _hub_documents(str(source), split or "train", text_field)


def _of_split(documents: Iterator[Document], split: str | None) -> Iterator[Document]:
    if split is None:
        return documents
    if split not in ("train", "heldout"):
        raise DataError(f"there is no split {split!r} here; choose 'train' or 'heldout'")
    return (document for document in documents if is_held_out(document.name) == (split == "heldout"))


def _refuse_empty_split(source: str | Path, split: str, text_field: str) -> None:
    count = sum(1 for _ in _documents(source, None, text_field))
    if count:
        have, none = ("is 1 document", "it does not fall") if count == 1 else (f"are {count} documents", "none falls")
        raise EmptySplitError(
            f"in {str(source)!r} there {have}, and {none} into the split {split!r}: text is split by whole documents, "
            "about one in ten of which is held out, by a hash of its name; a .txt or .md file is one document, and of "
            "a .jsonl or .parquet file each row is one, so give several files, or rows"
        )


def _is_local(source: str | Path) -> bool:
    if isinstance(source, Path) or Path(source).expanduser().exists():
        return True
    looks_local = is_path(source, "dataset") or any(sign in source for sign in "*?[")
    return looks_local or file_type(Path(source)) in TEXT_TYPES or not _HUB_NAME.fullmatch(source)


def _hub_documents(source: str, split: str, text_field: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(f"the data set {source!r} needs datasets: pip install 'wide[data]'") from error
    name, _, configuration = source.partition(":")
    # Streaming asks the hub for every file; without a network only a data set that is cached whole can be read.
    offline = bool(datasets.config.HF_HUB_OFFLINE) or os.environ.get("HF_DATASETS_OFFLINE", "0") not in ("0", "")

    def texts() -> Iterator[tuple[int, str | None]]:
        try:
            rows = datasets.load_dataset(name, configuration or None, split=split, streaming=not offline)
            for number, row in enumerate(rows, start=1):
                yield number, field_text(row, text_field, f"{source}, row {number}")
        except DataError:
            raise
        # The errors of the network stack are an open set, and each means the same to the caller.
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            state = "offline mode is on and the data set is not cached" if offline else reason
            raise DataError(
                f"{source!r} is no local path, and its split {split!r} cannot be loaded as a Hugging Face data set: "
                f"{state}; check the name (name:configuration) and the network, or name a local file"
            ) from error

    return documents_of_rows(texts(), source, where=source, text_field=text_field)
