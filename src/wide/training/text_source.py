"""What `data=` may be, turned into batches by step."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from wide.data.batches import BatchSource, TokenBatch, TokenBlocks, load_blocks
from wide.data.documents import Document
from wide.data.token_stream import stream_in_memory
from wide.data.tokenizer import check_vocabulary, load_tokenizer
from wide.errors import DataError
from wide.records import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainingData = str | Path | Sequence[str] | BatchSource


class ShiftedSource:
    """A source that begins later, so that a second stage goes on where the first one stopped.

    Args:
        source: The source.
        samples: Blocks to leave out, rounded up to whole batches.
    """

    def __init__(self, source: BatchSource, samples: int) -> None:
        """Read nothing yet."""
        self._source, self._samples = source, samples

    def batch_at(self, step: int, *, batch_size: int, rank: int = 0, world: int = 1) -> TokenBatch:
        """Return a rank's share of the global batch of a step, see `BatchSource.batch_at`."""
        skipped = -(-self._samples // batch_size)
        return self._source.batch_at(step + skipped, batch_size=batch_size, rank=rank, world=world)


def batch_source(
    data: TrainingData,
    model: nn.Module,
    *,
    tokenizer: "PreTrainedTokenizerBase | None",
    sequence_length: int,
    seed: int,
) -> BatchSource:
    """Return batches by step of whatever the caller gave as data.

    Args:
        data: Name or path of a source (`wide.data.corpus`), texts, or packed blocks, which keep their own length and
            order.
        model: Whose tokenizer and vocabulary count.
        tokenizer: None loads the one that lies beside the model.
        sequence_length: Tokens per block.
        seed: Of the order of the blocks.

    Raises:
        DataError: If there is too little text, no tokenizer, or its ids do not fit the model.
    """
    if isinstance(data, str | Path):
        source: BatchSource = load_blocks(
            data, tokenizer or load_tokenizer(model), sequence_length=sequence_length, seed=seed
        )
    elif hasattr(data, "batch_at"):
        source = data
    else:
        documents = [Document(name=f"text:{i}", text=text) for i, text in enumerate(data) if text.strip()]
        if not documents:
            raise DataError("data holds no text; give texts, a path, or the name of a source such as 'python-docs'")
        stream = stream_in_memory(documents, tokenizer or load_tokenizer(model))
        source = TokenBlocks(stream, sequence_length, seed=seed)
    if isinstance(source, TokenBlocks):
        check_vocabulary(source.largest_id, model)
    return source


def describe_source(source: BatchSource) -> dict[str, Any]:
    """Return JSON-ready facts by which a run recognises its data."""
    if not isinstance(source, TokenBlocks):
        return {"kind": type(source).__name__, "sequence_length": getattr(source, "sequence_length", None)}
    ends = source.batch([0, len(source) - 1]).input_ids.numpy().tobytes()
    facts = {"blocks": len(source), "sequence_length": source.sequence_length}
    return facts | {"fingerprint": fingerprint([facts, hashlib.sha256(ends).hexdigest()])}
