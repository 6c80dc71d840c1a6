"""Packed blocks of tokens and the batches made of them: deterministic, shardable, resumable from the step alone.

Documents follow each other without padding, and blocks are cut from the stream at multiples of the sequence length.
Attention may cross a document boundary inside a block, as usual in packing; labels do not: the first token of a
document (its BOS) is never a target.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wide.data.corpus import is_streamed, load_documents, read_split, source_fingerprint
from wide.data.documents import Document
from wide.data.token_stream import TokenStream, stream_in_memory, stream_on_disk
from wide.data.tokenizer import block_start, tokenizer_fingerprint
from wide.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""Label of a token that is no target (the value that PyTorch's cross-entropy ignores)."""


class TokenBatch(NamedTuple):
    """One batch of blocks.

    Args:
        input_ids: Token ids, int64 `[B, T]`.
        labels: The same ids at the same positions (models shift them), `IGNORED` where a document starts, int64
            `[B, T]`.
        valid: True for tokens, False for padding, bool `[B, T]`.
    """

    input_ids: Tensor
    labels: Tensor
    valid: Tensor

    def to(self, device: torch.device | str) -> "TokenBatch":
        """Return the batch on another device."""
        return TokenBatch(*(part.to(device, non_blocking=True) for part in self))

    def split(self, size: int) -> "list[TokenBatch]":
        """Return the batch in pieces of at most `size` sequences."""
        return [TokenBatch(*pieces) for pieces in zip(*(part.split(size) for part in self), strict=True)]

    @staticmethod
    def joined(pieces: "Sequence[TokenBatch]") -> "TokenBatch":
        """Return pieces of one length as a batch."""
        return TokenBatch(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))

    def attention_mask(self) -> Tensor | None:
        """Return the mask of padding for a model, int64 `[B, T]`; None without padding, for the fast kernels' sake.

        On a GPU this waits for the device.
        """
        return None if bool(self.valid.all()) else self.valid.long()


class BatchSource(Protocol):
    """What training reads: any step's batch, for any rank."""

    def batch_at(self, step: int, *, batch_size: int, rank: int = 0, world: int = 1) -> TokenBatch:
        """Return the share of a rank, in [0, world), of the global batch of a step, from 0."""
        ...


def block_indices(
    num_blocks: int, seed: int, step: int, *, batch_size: int, rank: int = 0, world: int = 1
) -> list[int]:
    """Return the blocks of a rank's share of a step (`BatchSource.batch_at`); each epoch has a permutation of its own.

    Raises ConfigError if the batch cannot be shared equally or the rank does not exist.
    """
    if batch_size % world or not 0 <= rank < world:
        raise ConfigError(
            f"a batch of {batch_size} cannot be shared by rank {rank} of {world}; "
            "batch_size must be a multiple of the number of ranks"
        )
    share = batch_size // world
    first = step * batch_size + rank * share
    positions = [divmod(sample, num_blocks) for sample in range(first, first + share)]
    return [int(_permutation(num_blocks, seed, epoch)[place]) for epoch, place in positions]


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(size)


class TokenBlocks:
    """Blocks of T tokens of a stream, by index; what is left at its end is not used.

    The seed is of the order in which `batch_at` visits them; `split` is of the source that the text is, None if it is
    all of it; `first` is the token that begins each block (`block_start`). Raises DataError if the stream is too short
    for one block.
    """

    def __init__(
        self,
        stream: TokenStream,
        sequence_length: int,
        *,
        seed: int = 17,
        name: str | None = None,
        split: str | None = None,
        first: int | None = None,
    ) -> None:
        self.name, self.split, self.first = name, split, first
        self.sequence_length = sequence_length
        self.largest_id, self.seed = stream.largest_id, seed
        self._stream = stream
        if not len(self):
            raise DataError(
                f"the text has {len(stream.tokens)} tokens, and one block needs {sequence_length}; "
                "give more text or a smaller sequence length"
            )

    def __len__(self) -> int:
        return len(self._stream.tokens) // self.sequence_length

    @property
    def num_tokens(self) -> int:
        """Tokens in all blocks."""
        return len(self) * self.sequence_length

    def content_hash(self) -> str:
        """Return a hash of all tokens and document starts; it reads them once."""
        found = hashlib.sha256(np.ascontiguousarray(self._stream.tokens).data)
        found.update(np.ascontiguousarray(self._stream.starts).data)
        return found.hexdigest()[:16]

    def cut(self, sequence_length: int, *, seed: int) -> "TokenBlocks":
        """Return the same text in blocks of another length and order; nothing is copied."""
        return TokenBlocks(self._stream, sequence_length, seed=seed, name=self.name, split=self.split, first=self.first)

    def batch(self, indices: Sequence[int]) -> TokenBatch:
        """Return the blocks of these indices in [0, len) (else IndexError), in this order, on the CPU."""
        length, tokens, starts = self.sequence_length, self._stream.tokens, self._stream.starts
        input_ids = torch.empty(len(indices), length, dtype=torch.int64)
        is_start = torch.zeros(len(indices), length, dtype=torch.bool)
        for row, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"block {index} of {len(self)}")
            begin = index * length
            input_ids[row] = torch.from_numpy(tokens[begin : begin + length].astype(np.int64))
            low, high = np.searchsorted(starts, [begin, begin + length])
            is_start[row, torch.from_numpy(starts[low:high] - begin)] = True
        if self.first is not None:
            input_ids[:, 0] = self.first
        return TokenBatch(
            input_ids=input_ids, labels=input_ids.masked_fill(is_start, IGNORED), valid=torch.ones_like(is_start)
        )

    def batch_at(self, step: int, *, batch_size: int, rank: int = 0, world: int = 1) -> TokenBatch:
        """Return a rank's share of the global batch of a step, see `BatchSource.batch_at`."""
        return self.batch(block_indices(len(self), self.seed, step, batch_size=batch_size, rank=rank, world=world))

    def in_order(self, batch_size: int, *, max_blocks: int | None = None) -> Iterator[TokenBatch]:
        """Yield all blocks once in the order of the text; the last batch may be smaller."""
        count = len(self) if max_blocks is None else min(max_blocks, len(self))
        for begin in range(0, count, batch_size):
            yield self.batch(range(begin, min(begin + batch_size, count)))


def blocks_of_texts(
    texts: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    sequence_length: int,
    seed: int = 17,
    shorten: bool = False,
) -> TokenBlocks:
    """Return the packed blocks of texts that are in memory already; blank ones are left out.

    With `shorten`, texts too short for one block are a block by themselves. Raises DataError if there is no text, or
    too little for one block.
    """
    documents = [Document(name=f"text:{i}", text=text) for i, text in enumerate(texts) if text.strip()]
    if not documents:
        raise DataError("data holds no text; give texts, a path, or the name of a source such as 'python-docs'")
    stream = stream_in_memory(documents, tokenizer)
    length = min(sequence_length, len(stream.tokens)) if shorten else sequence_length
    return TokenBlocks(stream, length, seed=seed, first=block_start(tokenizer))


def load_blocks(
    source: str | Path,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    sequence_length: int,
    split: str | None = None,
    text_field: str = "text",
    max_documents: int | None = None,
    max_tokens: int | None = None,
    cache: Path | None = None,
    seed: int = 17,
) -> TokenBlocks:
    """Return the packed blocks of a source.

    Raises DataError if the source cannot be read or is too short for one block.

    Args:
        source: See `load_documents`, for `split` and `text_field`, too.
        max_tokens: Of a source that is streamed from a hub, read no document after so many tokens.
        cache: Folder of token caches; the ids are then built once, kept there and memory-mapped. None keeps them in
            memory.
        seed: Of the order in which `batch_at` visits the blocks.
    """
    documents = load_documents(
        source, split=split, text_field=text_field, max_documents=max_documents, tokenizer=tokenizer
    )
    max_tokens = max_tokens if is_streamed(source) else None
    if cache is None:
        stream = stream_in_memory(documents, tokenizer, max_tokens)
    else:
        facts = [
            source_fingerprint(source, split=split, text_field=text_field),
            tokenizer_fingerprint(tokenizer),
            str(max_documents),
            # What came later, where it says something: caches that are there are found again.
            *([f"chats: {tokenizer.chat_template}"] if tokenizer.chat_template else []),
            *([f"tokens: {max_tokens}"] if max_tokens is not None else []),
        ]
        key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
        stream = stream_on_disk(documents, tokenizer, cache / f"tokens-{key}", max_tokens)
    split = read_split(source, split)
    return TokenBlocks(stream, sequence_length, seed=seed, name=str(source), split=split, first=block_start(tokenizer))
