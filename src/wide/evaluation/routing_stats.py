"""Who executes what on real text: rates per layer, group and position."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBatch
from wide.errors import EvaluationError
from wide.evaluation.inference import RoutedText, masks_of, watch_routing
from wide.models.cost import SkipCounter, Sparsity
from wide.routing import Routing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfStats:
    """Routing of one sublayer, shares in [0, 1].

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


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingStats:
    """Routing of a model on some text.

    Args:
        halves: One entry per routed sublayer, first layer first, attention before FFN.
        sparsity: The summary over all of them.
        tokens: Tokens that were counted.
    """

    halves: tuple[HalfStats, ...]
    sparsity: Sparsity
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


class _HalfCounter:
    """Sums of one sublayer's masks, on the device."""

    def __init__(self, mask: Tensor) -> None:
        _, positions, groups = mask.shape
        self._by_group = torch.zeros(groups, dtype=torch.int64, device=mask.device)
        self._by_position = torch.zeros(positions, dtype=torch.int64, device=mask.device)
        self._by_count = torch.zeros(groups + 1, dtype=torch.int64, device=mask.device)

    def add(self, mask: Tensor, valid: Tensor) -> None:
        executed = mask & valid.unsqueeze(-1)
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
    data: RoutedText,
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
    counters: dict[tuple[int, str], _HalfCounter] = {}
    seen: list[Tensor] = []

    def look(batch: TokenBatch, routing: Routing) -> None:
        skips.add(routing, batch.valid)
        seen.append(batch.valid.sum(0))
        for layer, half, mask in masks_of(routing):
            if (layer, half) not in counters:
                counters[layer, half] = _HalfCounter(mask)
            counters[layer, half].add(mask, batch.valid)

    watch_routing(
        model,
        data,
        look,
        tokenizer=tokenizer,
        sequence_length=sequence_length,
        batch_size=batch_size,
        max_blocks=max_blocks,
        split=split,
    )
    by_position = torch.stack(seen).sum(0) if seen else torch.zeros(0)
    tokens = int(by_position.sum())
    if not tokens:
        raise EvaluationError("there is no token to count routing on; give text that is longer than one block")
    halves = tuple(counter.stats(*key, by_position) for key, counter in counters.items())
    return RoutingStats(halves=halves, sparsity=skips.result(), tokens=tokens)
