"""How a model routes text: by group, from group to group and token to token, under rounding, and token by token."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBatch, TokenBlocks
from wide.data.documents import Document
from wide.data.progress import progress
from wide.data.token_stream import stream_in_memory
from wide.data.tokenizer import check_vocabulary, load_tokenizer
from wide.errors import DataError, EvaluationError
from wide.evaluation.inference import longest_input, model_device
from wide.evaluation.routing_counts import HalfCounter, mean_by_distance, mean_of_defined
from wide.models.attach import attachment
from wide.models.observe import judging, observe
from wide.models.router import EXECUTE, SKIP, Router
from wide.routing import LayerRouting, Routing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HALVES = ("attention", "ffn")
MAX_BINS = 128
"""Most rates kept of one half-layer; of more groups, neighbours are averaged."""
MAX_MATRIX_GROUPS = 32
"""Most groups whose correlation matrix is kept; of more, evenly spaced ones."""
MAX_SAMPLE_TOKENS = 160
"""Most tokens of the sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfBehaviour:
    """Routing of one half-layer.

    Args:
        layer: Decoder layer, from 0.
        half: 'attention' or 'ffn'.
        num_groups: Groups of the half, N_G.
        execute_rate: Share of (token, group) pairs that execute.
        by_group: Share of tokens that execute each group; of more than `MAX_BINS` groups, means over neighbours.
        same_as_previous: Share of decisions equal to the previous token's.
        same_by_chance: The same, were successive tokens independent at the groups' rates.
        token_correlation: Phi coefficient of a group's decisions 1, 2, ... tokens apart, mean over groups; None where
            no group's decisions vary.
        group_correlation: Phi coefficient of groups 1, 2, ... apart in the same token, mean over pairs.
        matrix_groups: Which groups `matrix` is of.
        matrix: Phi coefficients of each two of those groups in the same token.
    """

    layer: int
    half: str
    num_groups: int
    execute_rate: float
    by_group: tuple[float, ...]
    same_as_previous: float | None
    same_by_chance: float | None
    token_correlation: tuple[float | None, ...]
    group_correlation: tuple[float | None, ...]
    matrix_groups: tuple[int, ...]
    matrix: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The routing of the beginning of the text, token by token.

    Args:
        tokens: Texts that join to the beginning of the text; empty for the first tokens of a split character.
        shares: By half, for each token the share of groups that each layer executes, in [0, 1]; None in layers whose
            half is not routed.
    """

    tokens: tuple[str, ...]
    shares: dict[str, tuple[tuple[float | None, ...], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingBehaviour:
    """Routing of a model on some text.

    Args:
        halves: One entry per routed half-layer, first layer first, attention before FFN.
        sample: The beginning of the text.
        flips: By half, the share of decisions that change when hidden states are rounded to bfloat16 before the
            router reads them, layer by layer; empty for models that run in bfloat16.
        tokens: Tokens that were counted.
    """

    halves: tuple[HalfBehaviour, ...]
    sample: Sample
    flips: dict[str, float]
    tokens: int

    def of(self, half: str) -> list[HalfBehaviour]:
        """Return the entries of one half, first layer first."""
        return [entry for entry in self.halves if entry.half == half]


def routing_behaviour(
    model: nn.Module,
    data: TokenBlocks | Iterable[TokenBatch] | Sequence[str],
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    sequence_length: int = 512,
    batch_size: int = 4,
    max_blocks: int | None = 16,
) -> RoutingBehaviour:
    """Return how a model routes some text.

    Args:
        model: An attached model; runs in evaluation mode (decisions by threshold).
        data: Texts, packed blocks, or batches.
        tokenizer: For texts, and for the words of the sample; None loads that of the model.
        sequence_length: Tokens in a block, for texts; no more than the model can take, or than there are, are used.
        batch_size: Blocks per forward, for texts or packed blocks.
        max_blocks: Use only so many blocks, for texts or packed blocks.

    Raises:
        NotAttachedError: If the model carries no plan.
        EvaluationError: If no half-layer is routed by token, or there is no token to count.
        DataError: If the data are of another kind, or do not fit the model.

    Source: paper, section 4.4 (routing behaviour).
    """
    if not attachment(model).routers():
        raise EvaluationError("this model has no routers, so there is no routing by token to look at")
    tokenizer = tokenizer or load_tokenizer(model)
    if isinstance(data, list | tuple) and any(isinstance(item, str) for item in data):
        data = _blocks(data, tokenizer, min(sequence_length, longest_input(model) or sequence_length))
    if isinstance(data, TokenBlocks):
        check_vocabulary(data.largest_id, model)
        data = data.in_order(batch_size, max_blocks=max_blocks)
    batches: Iterable[Any] = data
    counters: dict[tuple[int, str], HalfCounter] = {}
    sample: Sample | None = None
    tokens = 0
    with judging(model), observe(model) as routing, _rounding(model) as rounding:
        for batch in progress(batches, title="routing", unit="batch"):
            if not isinstance(batch, TokenBatch):
                raise DataError(f"data holds {type(batch).__name__}; wanted texts, token batches or packed blocks")
            moved = batch.to(model_device(model))
            rounding.valid = moved.valid
            model(input_ids=moved.input_ids, use_cache=False)
            _count(counters, routing, moved.valid)
            tokens += int(batch.valid.sum())
            if sample is None and bool(batch.valid[0].any()):
                sample = _sample(batch, routing, tokenizer)
    if sample is None:
        raise EvaluationError("there is no token to count routing on; give batches with tokens")
    ordered = sorted(counters, key=lambda key: (key[0], HALVES.index(key[1])))
    halves = tuple(_half(*key, counters[key]) for key in ordered)
    return RoutingBehaviour(halves=halves, sample=sample, flips=rounding.shares(), tokens=tokens)


def _blocks(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase", length: int) -> TokenBlocks:
    """Return the texts in blocks; a text too short for one is a block by itself."""
    documents = [Document(name=f"text:{i}", text=text) for i, text in enumerate(texts) if text.strip()]
    if not documents:
        raise EvaluationError("there is no token to count routing on; the texts are empty")
    stream = stream_in_memory(documents, tokenizer)
    return TokenBlocks(stream, min(length, len(stream.tokens)))


def _count(counters: dict[tuple[int, str], HalfCounter], routing: Routing, valid: Tensor) -> None:
    for layer, half, mask in _masks(routing):
        if (layer, half) not in counters:
            counters[layer, half] = HalfCounter(mask.shape[-1], mask.device)
        counters[layer, half].add(mask, valid)


def _masks(routing: Routing) -> Iterator[tuple[int, str, Tensor]]:
    for layer, found in enumerate(routing):
        for half in HALVES:
            mask = getattr(found, half)
            if mask is not None:
                yield layer, half, mask.bool()


def _half(layer: int, half: str, counter: HalfCounter) -> HalfBehaviour:
    rates, groups, lags = counter.rates(), counter.between_groups().phi(), counter.between_tokens()
    num_groups = len(rates)
    chosen = _spread(num_groups, MAX_MATRIX_GROUPS)
    matrix = groups[chosen][:, chosen]
    has_neighbours = len(lags.total) > 0
    return HalfBehaviour(
        layer=layer,
        half=half,
        num_groups=num_groups,
        execute_rate=float(rates.mean()),
        by_group=tuple(float(part.mean()) for part in torch.tensor_split(rates, min(num_groups, MAX_BINS))),
        same_as_previous=float(lags.same()[0].mean()) if has_neighbours else None,
        same_by_chance=float(lags.same_by_chance()[0].mean()) if has_neighbours else None,
        token_correlation=tuple(mean_of_defined(row) for row in lags.phi()),
        group_correlation=tuple(mean_by_distance(groups)),
        matrix_groups=tuple(chosen),
        matrix=tuple(tuple(_defined(value) for value in row) for row in matrix.tolist()),
    )


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the indices below `count`, evenly spaced, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def _defined(value: float) -> float | None:
    return None if value != value else value


def _sample(batch: TokenBatch, routing: Routing, tokenizer: "PreTrainedTokenizerBase") -> Sample:
    """Return the first real tokens of the first sequence with what they executed."""
    places = batch.valid[0].nonzero().flatten()[:MAX_SAMPLE_TOKENS]
    shares = {}
    for half in HALVES:
        layers = [_shares_of_tokens(found, half, places) for found in routing]
        if any(layer is not None for layer in layers):
            filled = [[None] * len(places) if layer is None else layer for layer in layers]
            shares[half] = tuple(zip(*filled, strict=True))
    return Sample(tokens=tuple(token_texts(batch.input_ids[0, places].tolist(), tokenizer)), shares=shares)


def _shares_of_tokens(found: LayerRouting, half: str, places: Tensor) -> list[Any] | None:
    mask = getattr(found, half)
    return None if mask is None else mask[0].cpu()[places].double().mean(-1).tolist()


def token_texts(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return what each token adds to the text.

    Args:
        ids: Of successive tokens.
        tokenizer: That made them.

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


class _Rounding:
    """Counts the decisions of the running forwards that rounding to bfloat16 would change."""

    def __init__(self) -> None:
        self.valid: Tensor | None = None
        self._flipped: dict[str, Tensor] = {}
        self._decisions: dict[str, Tensor] = {}

    def __call__(self, router: nn.Module, args: tuple[Any, ...], _output: Tensor) -> None:
        assert isinstance(router, Router)
        hidden: Tensor = args[0]
        if hidden.dtype == torch.bfloat16 or self.valid is None:
            return
        half = router.half_layer
        # Not compared with the output, which may have been forced.
        own, rounded = (_decisions(router, each) for each in (hidden, hidden.to(torch.bfloat16)))
        flipped = ((rounded != own) & self.valid.unsqueeze(-1)).sum()
        decisions = self.valid.sum() * router.num_groups
        self._flipped[half] = self._flipped[half] + flipped if half in self._flipped else flipped
        self._decisions[half] = self._decisions[half] + decisions if half in self._decisions else decisions

    def shares(self) -> dict[str, float]:
        return {half: int(self._flipped[half]) / int(self._decisions[half]) for half in self._flipped}


def _decisions(router: Router, hidden: Tensor) -> Tensor:
    logits = router.logits(hidden)
    return logits[..., EXECUTE] - logits[..., SKIP] >= router.threshold


@contextmanager
def _rounding(model: nn.Module) -> Iterator[_Rounding]:
    counted = _Rounding()
    with ExitStack() as hooks:
        for router in attachment(model).routers():
            hooks.callback(router.register_forward_hook(counted).remove)
        yield counted
