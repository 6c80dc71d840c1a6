"""Blocks of a source that does not fit: read from its beginning, packed on the way, never stored."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from wide.data.batches import IGNORED, TokenBatch, share_of_batch
from wide.data.documents import Document
from wide.data.token_stream import tokenize_documents
from wide.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Block = tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]


class StreamingBlocks:
    """Batches by step from a source that is read in its own order, again from the start when it ends.

    Resuming at a step skips what came before, which costs reading and tokenising it. Each rank reads everything and
    keeps its share.

    Args:
        open_documents: Returns the documents from the beginning, the same ones in the same order at each call.
        tokenizer: Of the model that will read the blocks.
        sequence_length: Tokens in a block, T.
    """

    def __init__(
        self,
        open_documents: Callable[[], Iterable[Document]],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        sequence_length: int,
    ) -> None:
        """Open nothing yet."""
        self.sequence_length = sequence_length
        self._open_documents = open_documents
        self._tokenizer = tokenizer
        self._blocks: Iterator[Block] = iter(())
        self._position: int | None = None

    def batch_at(self, step: int, *, batch_size: int, rank: int = 0, world: int = 1) -> TokenBatch:
        """Return a rank's share of the global batch of a step, see `BatchSource.batch_at`.

        Going forward continues the stream; going back reads it again from the start.

        Raises:
            DataError: If the whole source is too short for one block.
        """
        samples = share_of_batch(step, batch_size, rank, world)
        if self._position is None or samples.start < self._position:
            self._blocks, self._position = self._endless(), 0
        for _ in range(samples.start - self._position):
            next(self._blocks)
        blocks = [next(self._blocks) for _ in samples]
        self._position = samples.stop
        input_ids = torch.from_numpy(np.stack([ids for ids, _ in blocks]).astype(np.int64))
        is_start = torch.from_numpy(np.stack([starts for _, starts in blocks]))
        return TokenBatch(
            input_ids=input_ids,
            labels=input_ids.masked_fill(is_start, IGNORED),
            valid=torch.ones_like(is_start),
        )

    def _endless(self) -> Iterator[Block]:
        while True:
            num_blocks, seen = 0, 0
            ids, starts = np.empty(0, np.uint32), np.empty(0, np.bool_)
            for document in tokenize_documents(self._open_documents(), self._tokenizer):
                seen += len(document)
                ids = np.concatenate([ids, document])
                starts = np.concatenate([starts, np.arange(len(document)) == 0])
                whole = len(ids) - len(ids) % self.sequence_length
                for begin in range(0, whole, self.sequence_length):
                    num_blocks += 1
                    part = slice(begin, begin + self.sequence_length)
                    yield ids[part], starts[part]
                ids, starts = ids[whole:], starts[whole:]
            if not num_blocks:
                raise DataError(
                    f"the source has {seen} tokens, and one block needs {self.sequence_length}; "
                    "give more text or a smaller sequence length"
                )
