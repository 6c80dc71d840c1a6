"""One long stream of token ids with its document starts, in memory or in a memory-mapped cache folder."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wide.data.documents import Document
from wide.data.progress import steps
from wide.data.tokenizer import document_tokens
from wide.errors import DataError
from wide.writing import naming, unfinished_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXTS_PER_CALL = 64
_TOKENS, _STARTS, _FACTS = "tokens.uint32", "starts.int64", "facts.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStream:
    """Documents as one stream of ids, uint32 `[L]`, and the places where they begin, int64, ascending."""

    tokens: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.int64]
    largest_id: int


def stream_in_memory(
    documents: Iterable[Document], tokenizer: "PreTrainedTokenizerBase", max_tokens: int | None = None
) -> TokenStream:
    """Return documents as a stream held in memory; none is read after `max_tokens` tokens."""
    pieces = [np.empty(0, dtype=np.uint32), *_tokenized(documents, tokenizer, max_tokens)]
    tokens = np.concatenate(pieces)
    starts = np.cumsum([len(piece) for piece in pieces[:-1]], dtype=np.int64)
    return TokenStream(tokens=tokens, starts=starts, largest_id=int(tokens.max(initial=0)))


def stream_on_disk(
    documents: Iterable[Document], tokenizer: "PreTrainedTokenizerBase", folder: Path, max_tokens: int | None = None
) -> TokenStream:
    """Return documents as a stream mapped from `folder`, which is built first where it does not exist.

    No document is read after `max_tokens` tokens.

    The folder appears under its name only when it is complete, so a crash leaves nothing that looks finished, and
    several processes may build it at once: the first one to finish wins. Raises DataError if the folder exists and its
    content does not fit what it says of itself.
    """
    if not folder.exists():
        try:
            with unfinished_folder(folder) as unfinished:
                _write(_tokenized(documents, tokenizer, max_tokens), unfinished, folder)
                unfinished.rename(folder)
        except OSError:
            # Another process may have been quicker; its folder holds the same stream.
            if not folder.exists():
                raise
    return _open(folder)


def _write(pieces: Iterable[npt.NDArray[np.uint32]], folder: Path, name: Path) -> None:
    """Write into a folder that will have a name; errors of reading the text are not about it."""
    starts, length, largest = [], 0, 0
    file = (folder / _TOKENS).open("wb")
    try:
        for ids in pieces:
            starts.append(length)
            length += len(ids)
            largest = max(largest, int(ids.max(initial=0)))
            with naming(name):
                file.write(ids.tobytes())
        with naming(name):
            file.flush()
            os.fsync(file.fileno())
    finally:
        with naming(name):
            file.close()
    with naming(name):
        np.array(starts, dtype=np.int64).tofile(folder / _STARTS)
        facts = {"tokens": length, "documents": len(starts), "largest_id": largest}
        (folder / _FACTS).write_text(json.dumps(facts) + "\n")


def _tokenized(
    documents: Iterable[Document], tokenizer: "PreTrainedTokenizerBase", max_tokens: int | None
) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield the ids of each document, tokenised a few documents at a time."""
    remaining, total = iter(documents), 0
    with steps("tokenising", unit="token") as told:
        while (max_tokens is None or total < max_tokens) and (batch := list(islice(remaining, _TEXTS_PER_CALL))):
            for ids in document_tokens(tokenizer, [document.text for document in batch]):
                total += len(ids)
                yield np.asarray(ids, dtype=np.uint32)
            told(total, max_tokens)


def _open(folder: Path) -> TokenStream:
    try:
        facts: dict[str, Any] = json.loads((folder / _FACTS).read_text())
        sizes = {_TOKENS: 4 * facts["tokens"], _STARTS: 8 * facts["documents"]}
        damaged = [name for name, size in sizes.items() if (folder / name).stat().st_size != size]
        largest_id = int(facts["largest_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the token cache {folder} is incomplete ({error}); delete the folder") from error
    if damaged:
        raise DataError(f"the token cache {folder} is damaged ({damaged[0]} has a wrong size); delete the folder")
    if not facts["tokens"]:
        return TokenStream(tokens=np.empty(0, np.uint32), starts=np.empty(0, np.int64), largest_id=0)
    return TokenStream(
        tokens=np.memmap(folder / _TOKENS, dtype=np.uint32, mode="r"),
        starts=np.fromfile(folder / _STARTS, dtype=np.int64),
        largest_id=largest_id,
    )
