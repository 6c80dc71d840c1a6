"""What `data=` may be, turned into batches by step."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from wide.config import StageConfig
from wide.data.batches import BatchSource, TokenBatch, TokenBlocks, blocks_of_texts, load_blocks
from wide.data.documents import texts_of
from wide.data.tokenizer import check_positions, check_vocabulary, load_tokenizer
from wide.records import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainingData = str | Path | Sequence[str] | BatchSource


class ShiftedSource:
    """A source without its first samples, rounded up to whole batches: a stage goes on where the first one stopped."""

    def __init__(self, source: BatchSource, samples: int) -> None:
        self._source, self._samples = source, samples

    def batch_at(self, step: int, *, batch_size: int, rank: int = 0, world: int = 1) -> TokenBatch:
        """Return a rank's share of the global batch of a step, see `BatchSource.batch_at`."""
        skipped = -(-self._samples // batch_size)
        return self._source.batch_at(step + skipped, batch_size=batch_size, rank=rank, world=world)


def batch_source(
    data: TrainingData, model: nn.Module, *, tokenizer: "PreTrainedTokenizerBase | None", stage: StageConfig
) -> BatchSource:
    """Return batches by step of whatever the caller gave as data.

    Args:
        data: Name or path of a source (`wide.data.corpus`), texts, or packed blocks, which keep their own length and
            order.
        tokenizer: None loads the one that lies beside the model.
        stage: Length of the blocks and their order; of what is streamed from a hub, two such stages' worth is read.

    Raises:
        DataError: If there is too little text, no tokenizer, or its ids do not fit the model.
        ConfigError: If text is to be cut into longer sequences than the model has positions for.
    """
    if hasattr(data, "batch_at"):
        source = cast(BatchSource, data)
    else:
        check_positions("sequence_length", stage.sequence_length, model)
        tokenizer = load_tokenizer(model, tokenizer)
        shape: dict[str, Any] = {"sequence_length": stage.sequence_length, "seed": stage.seed}
        if isinstance(data, str | Path):
            source = load_blocks(data, tokenizer, max_tokens=2 * stage.num_tokens, **shape)
        else:
            source = blocks_of_texts(texts_of(data), tokenizer, **shape)
    if isinstance(source, TokenBlocks):
        check_vocabulary(source.largest_id, model)
    return source


def read_batches(
    source: BatchSource, *, batch_size: int, micro_batch_size: int, tokens: int, step: int = 0, whole: bool = False
) -> list[TokenBatch]:
    """Return the sequences that training reads from a step on, in pieces of at most `micro_batch_size` sequences.

    The sequence that reaches so many tokens is the last one, whole; or with `whole` the last of its step.
    """
    pieces: list[TokenBatch] = []
    while tokens > 0:
        batch = source.batch_at(step, batch_size=batch_size)
        if not whole:
            batch = batch.split(-(-tokens // batch.input_ids.shape[1]))[0]
        pieces += batch.split(micro_batch_size)
        tokens -= batch.input_ids.numel()
        step += 1
    return pieces


def describe_source(source: BatchSource) -> dict[str, Any]:
    """Return JSON-ready facts by which a run recognises its data."""
    if not isinstance(source, TokenBlocks):
        return {"kind": type(source).__name__, "sequence_length": getattr(source, "sequence_length", None)}
    ends = source.batch([0, len(source) - 1]).input_ids.numpy().tobytes()
    facts = {"blocks": len(source), "sequence_length": source.sequence_length}
    return facts | {"fingerprint": fingerprint([facts, hashlib.sha256(ends).hexdigest()])}
