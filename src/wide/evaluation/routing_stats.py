"""How a model routes text: which groups execute, layer by layer, and what the first tokens of the text execute."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from wide.data.batches import TokenBatch, TokenBlocks, blocks_of_texts, load_blocks
from wide.data.progress import progress
from wide.data.tokenizer import check_vocabulary, load_tokenizer, longest_input
from wide.errors import DataError, EvaluationError
from wide.evaluation.inference import HALVES, masks_of, model_device
from wide.models.cost import SkipCounter, Sparsity
from wide.models.observe import judging, observe
from wide.records import Record
from wide.routing import Routing

MAX_BINS = 128
"""Most rates of one sublayer in a record; of more groups, neighbours are averaged."""
MAX_SAMPLE_TOKENS = 160
"""Most tokens of the sample."""
_RATE_DIGITS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfStats:
    """Routing of one sublayer, shares in [0, 1].

    Args:
        half: 'attention' or 'ffn'.
        execute_rate: Share of (token, group) pairs that execute.
        by_group: Share of tokens that execute each group, N_G values.
    """

    layer: int
    half: str
    execute_rate: float
    by_group: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingStats:
    """Routing of a model on some text.

    Args:
        halves: One entry per routed sublayer, first layer first, attention before FFN.
        sample: Ids of the first real tokens of the text.
        sample_shares: By kind, 'attention' or 'ffn': for each token of the sample the share of groups that each layer
            executes; None in layers where that sublayer is not routed.
    """

    halves: tuple[HalfStats, ...]
    sparsity: Sparsity
    tokens: int
    sample: tuple[int, ...]
    sample_shares: dict[str, tuple[tuple[float | None, ...], ...]]

    def __repr__(self) -> str:
        """Return the rates by layer: what a notebook shows."""
        rates = {half: " ".join(f"{1 - entry.execute_rate:.0%}" for entry in self.of(half)) for half in HALVES}
        layers = "".join(f"\n  {half}: {found}" for half, found in rates.items() if found)
        return f"RoutingStats of {self.tokens} tokens, {self.sparsity.mean:.1%} of the groups skipped; by layer{layers}"

    def of(self, half: str) -> list[HalfStats]:
        """Return the entries of one kind, 'attention' or 'ffn', first layer first."""
        return [entry for entry in self.halves if entry.half == half]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


def routing_stats(
    model: nn.Module,
    data: TokenBlocks | Iterable[TokenBatch] | Sequence[str] | str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sequence_length: int = 1024,
    split: str | None = None,
    batch_size: int = 8,
    max_blocks: int | None = None,
) -> RoutingStats:
    """Return how a model routes some text.

    Args:
        model: An attached model; runs in evaluation mode (decisions by threshold).
        data: A source as in `load_documents`, texts, packed blocks, or batches of one sequence length.
        tokenizer: For a source and for texts; None loads the one of the folder or name that the model came from.
        sequence_length: Tokens in a block, for a source and for texts; no more than the model can take are used.
        split: Of the source, see `load_documents`.
        batch_size: Blocks per forward, for everything but batches.
        max_blocks: Use only so many blocks, for everything but batches.

    Raises:
        NotAttachedError: If the model carries no plan.
        DataError: If the data are of another kind, cannot be read, are too short, or do not fit the model.
        EvaluationError: If there is no token to count.

    Source: paper, section 4.4 (routing behaviour).
    """
    skips, tokens = SkipCounter(model), 0
    # Tokens that execute each group, int64 `[N_G]`.
    executed: dict[tuple[int, str], Tensor] = {}
    sample: tuple[tuple[int, ...], dict[str, Any]] | None = None
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
            model(input_ids=moved.input_ids, attention_mask=moved.attention_mask(), use_cache=False)
            skips.add(routing, moved.valid)
            for layer, half, mask in masks_of(routing):
                counts = (mask & moved.valid.unsqueeze(-1)).sum((0, 1))
                executed[layer, half] = executed[layer, half] + counts if (layer, half) in executed else counts
            tokens += int(moved.valid.sum())
            if sample is None and bool(moved.valid[0].any()):
                sample = _sample(moved, routing)
    if sample is None:
        raise EvaluationError("there is no token to count routing on; give text that is longer than one block")
    rates = {key: (counts.cpu().double() / tokens).tolist() for key, counts in executed.items()}
    return RoutingStats(
        halves=tuple(
            HalfStats(layer=layer, half=half, execute_rate=fmean(by_group), by_group=tuple(by_group))
            for (layer, half), by_group in rates.items()
        ),
        sparsity=skips.result(),
        tokens=tokens,
        sample=sample[0],
        sample_shares=sample[1],
    )


def _sample(batch: TokenBatch, routing: Routing) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the first real tokens of the first sequence, and what they executed."""
    places = batch.valid[0].nonzero().flatten()[:MAX_SAMPLE_TOKENS]
    shares = {}
    for half in HALVES:
        masks = [getattr(layer, half) for layer in routing]
        rates = [[None] * len(places) if mask is None else mask[0][places].double().mean(-1).tolist() for mask in masks]
        if any(mask is not None for mask in masks):
            shares[half] = tuple(zip(*rates, strict=True))
    return tuple(batch.input_ids[0, places].tolist()), shares


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what each token adds to the text.

    Returns:
        As many texts as ids, which join to the whole; a character of several tokens belongs to its last one.
    """
    pieces, shown = [], 0
    for end in range(1, len(ids) + 1):
        decoded = str(tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False))
        # A character that is not complete yet shows as the replacement sign.
        whole = decoded.rstrip("\N{REPLACEMENT CHARACTER}") if end < len(ids) else decoded
        pieces.append(whole[shown:])
        shown = max(shown, len(whole))
    return pieces


def routing_records(
    subject: str, found: RoutingStats, where: str, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Record]:
    """Yield the records of a model's routing: rates of groups and the sample, as compact JSON of bounded size."""
    text = f"{where}, {found.tokens} tokens"

    def record(metric: str, value: Any, unit: str = "json", *, layer: int | None = None, where: str = text) -> Record:
        return Record(subject=subject, metric=f"routing.{metric}", value=value, unit=unit, where=where, layer=layer)

    yield record("tokens", found.tokens, "token")
    for half in HALVES:
        for entry in found.of(half):
            parts = torch.tensor(entry.by_group, dtype=torch.float64).tensor_split(min(len(entry.by_group), MAX_BINS))
            shares = [round(float(part.mean()), _RATE_DIGITS) for part in parts]
            yield record(f"{half}.by_group", {"groups": len(entry.by_group), "shares": shares}, layer=entry.layer)
    percent = {
        half: [[None if share is None else round(100 * share) for share in row] for row in rows]
        for half, rows in found.sample_shares.items()
    }
    words = f"beginning of the text, {len(found.sample)} tokens; percent of groups by token and layer"
    yield record("sample", {"tokens": token_texts(found.sample, tokenizer)} | percent, where=words)
