"""Who executes what on real text: rates per layer, group and position, and how stable the routing is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBatch, TokenBlocks, blocks_of_texts, load_blocks
from wide.data.progress import progress
from wide.data.tokenizer import check_vocabulary, load_tokenizer
from wide.errors import DataError, EvaluationError
from wide.evaluation.inference import longest_input, model_device
from wide.models.cost import SkipCounter, Sparsity
from wide.models.observe import judging, observe
from wide.routing import Routing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HALVES = ("attention", "ffn")


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfStats:
    """Routing of one half-layer, shares in [0, 1].

    Args:
        layer: Index of the decoder layer, from 0.
        half: 'attention' or 'ffn'.
        execute_rate: Share of (token, group) pairs that execute.
        by_group: Share of tokens that execute each group, N_G values.
        by_position: Share of groups that the tokens at each position of a sequence execute, T values.
        by_count: Share of tokens that execute exactly 0, 1, ..., N_G groups, N_G + 1 values.
    """

    layer: int
    half: str
    execute_rate: float
    by_group: tuple[float, ...]
    by_position: tuple[float, ...]
    by_count: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "layer": self.layer,
            "half": self.half,
            "execute_rate": self.execute_rate,
            "by_group": list(self.by_group),
            "by_position": list(self.by_position),
            "by_count": list(self.by_count),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingStats:
    """Routing of a model on some text.

    Args:
        halves: One entry per routed half-layer, first layer first, attention before FFN.
        sparsity: The summary over all of them.
        tokens: Tokens that were counted.
    """

    halves: tuple[HalfStats, ...]
    sparsity: Sparsity
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "halves": [half.to_json() for half in self.halves],
            "sparsity": self.sparsity.to_json(),
            "tokens": self.tokens,
        }


class _HalfCounter:
    """Sums of one half-layer's masks, on the device."""

    def __init__(self, positions: int, groups: int, device: torch.device) -> None:
        self._by_group = torch.zeros(groups, dtype=torch.int64, device=device)
        self._by_position = torch.zeros(positions, dtype=torch.int64, device=device)
        self._by_count = torch.zeros(groups + 1, dtype=torch.int64, device=device)

    def add(self, mask: Tensor, valid: Tensor) -> None:
        executed = mask.bool() & valid.unsqueeze(-1)
        per_token = executed.sum(-1)
        self._by_group += executed.sum((0, 1))
        self._by_position[: mask.shape[1]] += per_token.sum(0)
        self._by_count.index_add_(0, per_token.flatten(), valid.flatten().long())

    def stats(self, layer: int, half: str, seen: Tensor) -> HalfStats:
        tokens, groups = int(seen.sum()), len(self._by_group)
        by_group = (self._by_group.double() / tokens).tolist()
        by_position = (self._by_position.double() / (seen.clamp(min=1) * groups)).tolist()
        return HalfStats(
            layer=layer,
            half=half,
            execute_rate=sum(by_group) / groups,
            by_group=tuple(by_group),
            by_position=tuple(by_position),
            by_count=tuple((self._by_count.double() / tokens).tolist()),
        )


def routing_stats(
    model: nn.Module,
    data: TokenBlocks | Iterable[TokenBatch] | Sequence[str] | str | Path,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    sequence_length: int = 1024,
    split: str | None = None,
    batch_size: int = 8,
    max_blocks: int | None = None,
) -> RoutingStats:
    """Return how a model routes some text.

    Args:
        model: An attached model; runs in evaluation mode (argmax routing).
        data: A source as in `load_documents`, texts, packed blocks, or batches of one sequence length.
        tokenizer: For a source; None loads the one of the folder or name that the model came from.
        sequence_length: Tokens in a block, for a source; no more than the model can take are used.
        split: Of the source, see `load_documents`.
        batch_size: Blocks per forward, for a source or packed blocks.
        max_blocks: Use only so many blocks, for a source or packed blocks.

    Raises:
        NotAttachedError: If the model carries no routers.
        DataError: If the source cannot be read, is too short, or does not fit the model.
        EvaluationError: If there is no token to count.
    """
    skips = SkipCounter(model)
    if isinstance(data, str | Path):
        length = min(sequence_length, longest_input(model) or sequence_length)
        data = load_blocks(data, tokenizer or load_tokenizer(model), sequence_length=length, split=split)
    elif isinstance(data, list | tuple) and any(isinstance(item, str) for item in data):
        length = min(sequence_length, longest_input(model) or sequence_length)
        data = blocks_of_texts(data, tokenizer or load_tokenizer(model), sequence_length=length)
    if isinstance(data, TokenBlocks):
        check_vocabulary(data.largest_id, model)
        data = data.in_order(batch_size, max_blocks=max_blocks)
    counters: dict[tuple[int, str], _HalfCounter] = {}
    seen: Tensor | None = None
    with judging(model), observe(model) as routing:
        for batch in progress(data, title="routing", unit="batch"):
            if not isinstance(batch, TokenBatch):
                raise DataError(f"data holds {type(batch).__name__}; wanted texts, token batches or a source")
            moved = batch.to(model_device(model))
            model(input_ids=moved.input_ids, use_cache=False)
            skips.add(routing, moved.valid)
            _add(counters, routing, moved.valid)
            seen = moved.valid.sum(0) if seen is None else seen + moved.valid.sum(0)
    if seen is None or not int(seen.sum()):
        raise EvaluationError("there is no token to count routing on; give text that is longer than one block")
    ordered = sorted(counters, key=lambda key: (key[0], _HALVES.index(key[1])))
    halves = tuple(counters[key].stats(*key, seen) for key in ordered)
    return RoutingStats(halves=halves, sparsity=skips.result(), tokens=int(seen.sum()))


def _add(counters: dict[tuple[int, str], _HalfCounter], routing: Routing, valid: Tensor) -> None:
    for index, layer in enumerate(routing):
        for half in _HALVES:
            mask = getattr(layer, half)
            if mask is None:
                continue
            key = (index, half)
            if key not in counters:
                counters[key] = _HalfCounter(mask.shape[1], mask.shape[2], mask.device)
            counters[key].add(mask, valid)


def flip_rate(before: Routing, after: Routing, valid: Tensor | None = None) -> float:
    """Return the share of (token, group) decisions that differ between two routings of the same text.

    Args:
        before: Masks `[B, T, N_G]` of every layer, for example of an earlier checkpoint.
        after: The same of a later one.
        valid: Bool `[B, T]`, False for padding; None counts every token.

    Raises:
        EvaluationError: If the two do not route the same halves in the same shapes.
    """
    if len(before) != len(after):
        raise EvaluationError(f"the routings have {len(before)} and {len(after)} layers; compare the same model")
    flipped, total = 0, 0
    for index, (old_layer, new_layer) in enumerate(zip(before, after, strict=True)):
        for half in _HALVES:
            old, new = getattr(old_layer, half), getattr(new_layer, half)
            if old is None and new is None:
                continue
            if old is None or new is None or old.shape != new.shape:
                raise EvaluationError(
                    f"layer {index}, {half}: masks {_shape(old)} and {_shape(new)} differ in shape; compare routings "
                    "of the same text and grouping"
                )
            counted = torch.ones_like(old[..., 0], dtype=torch.bool) if valid is None else valid
            flipped += int(((old.bool() != new.bool()) & counted.unsqueeze(-1)).sum())
            total += int(counted.sum()) * old.shape[-1]
    return flipped / total if total else 0.0


def _shape(mask: Tensor | None) -> str:
    return "none" if mask is None else str(list(mask.shape))
