"""Documents from a named source: Python's own documentation, files, data sets on disk or of a hub, and mixtures."""

import glob
import hashlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wide.data.documents import (
    TEXT_TYPES,
    Document,
    documents_of_rows,
    file_rows,
    file_type,
    find_files,
    is_held_out,
    split_documents,
)
from wide.data.local_names import is_path, unreachable
from wide.data.python_docs import python_docs
from wide.errors import ConfigError, DataError, MissingExtraError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PYTHON_DOCS = "python-docs"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
# Files by which the datasets library knows what its save_to_disk wrote: several splits, or one set.
_DICT, _SET = "dataset_dict.json", "state.json"


def load_documents(
    source: str | Path,
    *,
    split: str | None = None,
    text_field: str = "text",
    max_documents: int | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> Iterator[Document]:
    """Yield the documents of a source, in an order that never changes.

    Raises ConfigError if `max_documents` is less than 1; DataError if the source is missing, empty, damaged or of a
    wrong type.

    Args:
        source: 'python-docs'; a local file, folder or glob pattern (.txt .md .csv .tsv .json .jsonl .parquet, also .gz
            and .zst); a folder that `save_to_disk` of Hugging Face's datasets wrote; the name of a Hugging Face data
            set, with its configuration after a colon (`Salesforce/wikitext:wikitext-2-raw-v1`), which is streamed; or a
            mixture of these, `NAME=SHARE,NAME=SHARE`, whose shares count characters and which ends with the first of
            its sources that does.
        split: 'train' or 'heldout' (one document in ten, by a hash of its name; of few documents the last tenth of
            each). A data set's own splits stand for these where it has them (held out is 'test', else 'validation'),
            and can be named. None means 'train' of 'python-docs' and of a data set, and all documents of files.
        text_field: Field that holds the text, or a chat's messages, where rows have fields; rows without 'text' that
            have 'messages' are chats.
        max_documents: Stop after so many.
        tokenizer: Whose template turns chats into text.
    """
    if max_documents is not None and max_documents < 1:
        raise ConfigError(f"max_documents must be at least 1, got {max_documents}; leave it out to read everything")
    count, most = 0, None if max_documents is None else min(max_documents, sys.maxsize)
    for document in islice(_documents(source, split, text_field, tokenizer), most):
        count += 1
        yield document
    if not count:
        raise DataError(f"{str(source)!r} (split {split or 'all'}) holds no text; name another source or split")


def require_found(source: str | Path) -> None:
    """Refuse text that can be read from nowhere, before seconds go into importing what would read it.

    Raises DataError if a file or folder is missing or of a wrong type, or the hub does not answer.
    """
    for name in mixture(source) or (source,):
        if not _is_local(name) and name != PYTHON_DOCS:
            _require_reached(str(name))
        elif name != PYTHON_DOCS and not _is_saved(Path(name).expanduser()):
            find_files(name)


def reads(source: str | Path, path: str | Path) -> bool:
    """Return whether a path lies in a folder that a source reads."""
    here = Path(path).resolve()
    return any(each.is_dir() and here.is_relative_to(each.resolve()) for each in places_read(source))


def places_read(source: str | Path) -> list[Path]:
    """Return the folders and files that a source, or the parts of a mixture, name, or that match its pattern."""
    found: list[Path] = []
    for path in (Path(name).expanduser() for name in mixture(source) or (source,) if _is_local(name)):
        found += [path] if path.exists() else filter(Path.is_file, map(Path, glob.glob(str(path), recursive=True)))
    return found


def is_same_source(recorded: str, source: str | Path) -> bool:
    """Return whether a source is the one whose name was recorded, perhaps in another working folder."""
    if recorded == str(source) or not _is_local(source):
        return recorded == str(source)
    here, there = Path(source).expanduser().resolve(), Path(recorded).expanduser()
    return here == there.resolve() or here.parts[-len(there.parts) :] == there.parts


def is_data_set(source: str | Path) -> bool:
    """Return whether a source is a Hugging Face data set with splits of its own, on a hub or on disk."""
    is_hub = source != PYTHON_DOCS and not mixture(source) and not _is_local(source)
    return is_hub or (Path(source).expanduser() / _DICT).is_file()


def read_split(source: str | Path, split: str | None) -> str | None:
    """Return the split that is read where none may be named: of what always has one, 'train'; None means all."""
    return "train" if split is None and (source == PYTHON_DOCS or is_data_set(source)) else split


def is_held_out_alike(recorded: str, source: str | Path, **reading: Any) -> bool | None:
    """Return whether the same is held out of the text that two sources share, no mixtures; None if they share none.

    One may have another name, hold the other or lie in it. What was recorded in another working folder and cannot be
    read now counts as not held out alike. `reading` is for `load_documents`.
    """
    if is_same_source(recorded, source) and Path(recorded).name == Path(source).name:
        return True
    theirs, ours = _names_of_files(recorded), _names_of_files(source)
    if shared := theirs.keys() & ours.keys():
        # The rule goes by names, and is another one where all names of a source are on one side.
        kinds = [_kinds_of_names(each, reading) for each in (recorded, source)]
        return all(theirs[file] == ours[file] for file in shared) and kinds[0] == kinds[1]
    is_elsewhere = not theirs and _is_local(recorded) and Path(recorded).parts
    return False if is_elsewhere and any(p.match(recorded) for f in ours for p in (f, *f.parents)) else None


def _names_of_files(source: str | Path) -> dict[Path, str]:
    """Return the local files that a source trains on, what `save_to_disk` wrote as one, and their documents' names."""
    folder = Path(source).expanduser()
    if _is_saved(folder):
        return {(folder / "train" if (folder / _DICT).is_file() else folder).resolve(): folder.name}
    with suppress(DataError):
        return {path.resolve(): path.name for path in find_files(source)} if _is_local(source) else {}
    return {}


def _kinds_of_names(source: str | Path, reading: Mapping[str, Any]) -> set[bool]:
    with suppress(DataError):
        parts = [load_documents(source, split=split, **reading) for split in ("train", "heldout")]
        return {is_held_out(next(part).name) for part in parts}
    return set()


def is_streamed(source: str | Path) -> bool:
    """Return whether a source, or a part of it, comes from a hub and may be larger than the disk."""
    names = mixture(source) or (source,)
    return any(name != PYTHON_DOCS and not _is_local(name) for name in names)


def mixture(source: str | Path) -> dict[str, float]:
    """Return the shares of a mixture by source, which sum up to 1; empty if it is none.

    Raises DataError if it looks like a mixture, and a share is no positive number or a source is named twice.
    """
    name = str(source)
    if isinstance(source, Path) or "=" not in name or glob.has_magic(name) or os.path.exists(Path(name).expanduser()):
        return {}
    parts = [part.strip().rpartition("=") for part in name.split(",")]
    try:
        shares = {part[0]: float(part[2]) for part in parts}
    except ValueError:
        shares = {}
    if len(shares) < len(parts) or not all(each and 0 < share < math.inf for each, share in shares.items()):
        raise DataError(
            f"{name!r} cannot be read as a mixture; wanted sources and positive shares, each source once, like "
            "texts/a.jsonl=0.7,texts/b=0.3"
        )
    return {each: share / sum(shares.values()) for each, share in shares.items()}


def source_fingerprint(source: str | Path, *, split: str | None = None, text_field: str = "text") -> str:
    """Return a hash that changes when the text behind a source may have changed (files: path, size, time)."""
    parts = [str(source), str(read_split(source, split)), text_field]
    shares = mixture(source)
    if shares:
        parts += [source_fingerprint(each, split=split, text_field=text_field) for each in shares]
    elif source == PYTHON_DOCS:
        parts.append(sys.version)
    elif _is_local(source):
        folder = Path(source).expanduser()
        saved = sorted(path for path in folder.rglob("*") if path.is_file()) if _is_saved(folder) else None
        for path in saved or find_files(source):
            facts = path.stat()
            parts.append(f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _documents(
    source: str | Path, split: str | None, text_field: str, tokenizer: "PreTrainedTokenizerBase | None"
) -> Iterator[Document]:
    shares = mixture(source)
    if shares:
        reading: dict[str, Any] = {"text_field": text_field, "tokenizer": tokenizer}
        for one, other in combinations(shares, 2) if split in ("train", "heldout") else ():
            if is_held_out_alike(one, other, **reading) is False:
                raise DataError(f"{one} and {other} share text, and hold out other parts of it; name that text once")
        return _mixed({name: _documents(name, split, **reading) for name in shares}, shares)
    split = read_split(source, split)
    if source == PYTHON_DOCS:
        return split_documents(python_docs(), split or "train")
    folder = Path(source).expanduser()
    read = partial(documents_of_rows, text_field=text_field, tokenizer=tokenizer)
    if _is_local(source) and not _is_saved(folder):
        found = (d for p in find_files(source) for d in read(file_rows(p, text_field), p.name, where=str(p)))
        return found if split is None else split_documents(found, split)
    rows, by_name = _rows(source, split)
    name = folder.name if _is_saved(folder) else str(source)
    documents = read(rows, name, where=str(source))
    return split_documents(documents, split) if by_name and split is not None else documents


def _mixed(parts: Mapping[str, Iterator[Document]], shares: Mapping[str, float]) -> Iterator[Document]:
    """Yield documents so that each part has given its share of the characters, until one of them ends."""
    given = dict.fromkeys(parts, 0)
    while True:
        name = min(parts, key=lambda name: given[name] / shares[name])
        document = next(parts[name], None)
        if document is None:
            return
        given[name] += len(document.text)
        yield document


def _is_local(source: str | Path) -> bool:
    if not str(source).strip():
        # An empty path would be the working folder.
        raise DataError("the name of a text is empty; wanted a file, a folder, a data set or 'python-docs'")
    try:
        if isinstance(source, Path) or Path(source).expanduser().exists():
            return True
    except OSError as error:
        raise DataError(f"{str(source)[:40]!r}... is no name ({error.strerror}); give texts as a list") from error
    looks_local = is_path(source) or any(sign in source for sign in "*?[")
    return looks_local or file_type(Path(source)) in TEXT_TYPES or not _HUB_NAME.fullmatch(source)


def _require_reached(source: str) -> None:
    from huggingface_hub import constants

    name = source.partition(":")[0]
    prepared = os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")
    if not Path(prepared, name.replace("/", "___").lower()).is_dir():
        silence = unreachable(name, "dataset")
        if silence is not None:
            raise DataError(silence)


def _is_saved(folder: Path) -> bool:
    return (folder / _DICT).is_file() or (folder / _SET).is_file()


def _rows(source: str | Path, split: str | None) -> tuple[Iterator[tuple[int, Any]], bool]:
    """Return the numbered rows of a data set's split, and whether names of documents still say which are held out."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(f"the data set {str(source)!r} needs datasets: pip install 'wide[data]'") from error
    folder = Path(source).expanduser()
    name, _, configuration = str(source).partition(":")
    # Streaming asks the hub for every file; without a network only a data set that is cached whole can be read.
    offline = bool(datasets.config.HF_HUB_OFFLINE) or os.environ.get("HF_DATASETS_OFFLINE", "0") not in ("0", "")

    def refused(error: Exception) -> DataError:
        reason = " ".join(str(error).split())[:300]
        if _is_saved(folder):
            return DataError(f"{folder} cannot be read as what save_to_disk wrote: {reason}")
        state = "offline mode is on and the data set is not cached" if offline else reason
        return DataError(
            f"{str(source)!r} is no local path and cannot be loaded as a Hugging Face data set: {state}; check the "
            "name (name:configuration) and the network, or name a local file"
        )

    if not _is_saved(folder):
        _require_reached(name)
    # The errors of files and of the network are an open set, and each means the same to the caller.
    try:
        if _is_saved(folder):
            found = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(name, configuration or None, streaming=not offline)
    except Exception as error:
        raise refused(error) from error
    splits = found if isinstance(found, dict) else {"train": found}
    own = next((each for each in ("test", "validation") if each in splits), None)
    wanted = {None: "train", "heldout": own or "train"}.get(split, split)
    if wanted not in splits:
        raise DataError(f"the data set {str(source)!r} has no split {wanted!r}; splits seen: {', '.join(splits)}")

    def rows() -> Iterator[tuple[int, Any]]:
        try:
            yield from enumerate(splits[wanted], start=1)
        except Exception as error:
            raise refused(error) from error

    return rows(), own is None and split in ("train", "heldout")
