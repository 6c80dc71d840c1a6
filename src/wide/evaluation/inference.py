"""Running a model for judgement: evaluation mode, no gradients, and what it skips on the way."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from wide.data.batches import TokenBatch, TokenBlocks, blocks_of_texts, load_blocks
from wide.data.progress import progress
from wide.data.tokenizer import check_vocabulary, load_tokenizer, longest_input
from wide.errors import DataError, EvaluationError
from wide.models.attach import attachment, is_attached
from wide.models.cost import SkipCounter, Sparsity
from wide.models.lora import without_lora
from wide.models.observe import bypass, judging, observe
from wide.routing import LayerRouting, Routing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HALVES = ("attention", "ffn")
RoutedText = TokenBlocks | Iterable[TokenBatch] | Sequence[str] | str | Path


@contextmanager
def dense(model: nn.Module) -> Iterator[None]:
    """Run the base model: no routing, nothing pruned, no LoRA that is not merged; others are left as they are."""
    if not is_attached(model):
        yield
        return
    with bypass(model), without_lora(model):
        yield


def has_merged_lora(model: nn.Module) -> bool:
    """Return whether LoRA was added to the weights for good, so that the base model is not at hand."""
    if not is_attached(model):
        return False
    state = attachment(model)
    return "recover" in state.provenance if state.lora is None else bool(state.lora.merged)


def model_device(model: nn.Module) -> torch.device:
    """Return where the model's inputs belong."""
    return next(model.parameters()).device


def masks_of(routing: Routing) -> Iterator[tuple[int, str, Tensor]]:
    """Yield layer, 'attention' or 'ffn', and bool mask `[B, T, N_G]` of each routed sublayer."""
    for layer, found in enumerate(routing):
        for half in HALVES:
            mask = getattr(found, half)
            if mask is not None:
                yield layer, half, mask.bool()


def watch_routing(
    model: nn.Module,
    data: RoutedText,
    look: Callable[[TokenBatch, Routing], None],
    *,
    tokenizer: "PreTrainedTokenizerBase | None",
    sequence_length: int,
    batch_size: int,
    max_blocks: int | None,
    split: str | None = None,
) -> None:
    """Run text through an attached model in evaluation mode.

    Args:
        model: An attached model.
        data: A source as in `load_documents`, texts, packed blocks, or batches.
        look: Called after each forward with its batch, on the model's device, and its routing.
        tokenizer: For a source and for texts; None loads that of the model.
        sequence_length: Tokens in a block, for a source and for texts; no more than the model can take are used.
        batch_size: Blocks per forward.
        max_blocks: Use only so many blocks.
        split: Of a source.

    Raises:
        DataError: If the data are of another kind, too short, or do not fit the model.
    """
    length = min(sequence_length, longest_input(model) or sequence_length)
    if isinstance(data, str | Path):
        data = load_blocks(data, tokenizer or load_tokenizer(model), sequence_length=length, split=split)
    elif isinstance(data, list | tuple) and any(isinstance(item, str) for item in data):
        data = blocks_of_texts(data, tokenizer or load_tokenizer(model), sequence_length=length, shorten=True)
    if isinstance(data, TokenBlocks):
        check_vocabulary(data.largest_id, model)
        data = data.in_order(batch_size, max_blocks=max_blocks)
    batches: Iterable[Any] = data
    with judging(model), observe(model) as routing:
        for batch in progress(batches, title="routing", unit="batch"):
            if not isinstance(batch, TokenBatch):
                raise DataError(f"data holds {type(batch).__name__}; wanted texts, token batches, blocks or a source")
            moved = batch.to(model_device(model))
            model(input_ids=moved.input_ids, use_cache=False)
            look(moved, routing)


class SkipMeter:
    """Counts what an attached model skips in the forwards inside a `with` block; nothing for a plain model.

    Args:
        model: Attached or not; None counts nothing.
    """

    def __init__(self, model: nn.Module | None) -> None:
        """Start at zero."""
        self._model = model
        self._counter = SkipCounter(model) if model is not None and is_attached(model) else None
        self._routing: list[LayerRouting] = []

    @contextmanager
    def watching(self) -> Iterator["SkipMeter"]:
        """Watch the forwards inside the block."""
        if self._counter is None or self._model is None:
            yield self
            return
        with observe(self._model) as self._routing:
            yield self

    def add(self, valid: Tensor) -> None:
        """Count the latest forward.

        Args:
            valid: Bool `[B, T]`, True for tokens that count.
        """
        if self._counter is not None:
            self._counter.add(self._routing, valid)

    def result(self) -> Sparsity | None:
        """Return the rates so far, None for a plain model (waits for the device)."""
        return None if self._counter is None else self._counter.result()


class RoutingTape(SkipMeter):
    """Counts what is skipped and keeps every decision on the host, eight to a byte, to compare two runs.

    Args:
        model: An attached model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Start empty."""
        super().__init__(model)
        self._bits: list[Any] = []
        self._decisions = 0

    def add(self, valid: Tensor) -> None:
        """Keep the latest forward's decisions on valid tokens, bool `[B, T]`."""
        super().add(valid)
        for _, _, mask in masks_of(self._routing):
            chosen = mask[valid]
            self._bits.append(np.packbits(chosen.cpu().numpy()))
            self._decisions += chosen.numel()

    def flip_rate(self, other: "RoutingTape") -> float:
        """Return the share of decisions that differ from those of another run over the same tokens.

        Raises:
            EvaluationError: If the two did not see the same number of decisions.
        """
        if [len(bits) for bits in self._bits] != [len(bits) for bits in other._bits]:
            raise EvaluationError("the two runs routed different tokens or groups; compare runs over the same text")
        pairs = zip(self._bits, other._bits, strict=True)
        flipped = sum(int(np.unpackbits(ours ^ theirs).sum()) for ours, theirs in pairs)
        return flipped / self._decisions if self._decisions else 0.0
