"""How a model routes text: by group and position, from group to group and token to token, under rounding."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import zip_longest
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
from wide.evaluation.inference import HALVES, masks_of
from wide.models.attach import attachment
from wide.models.cost import SkipCounter, Sparsity
from wide.models.observe import judging, model_device, observe
from wide.models.router import EXECUTE, SKIP, Router
from wide.records import Record
from wide.routing import Routing

MAX_LAG = 16
"""Furthest token that a decision is compared with, in tokens."""
MAX_DISTANCE = 32
"""Furthest neighbours whose correlation is averaged, in groups."""
MAX_BINS = 128
"""Most rates of one sublayer in a record; of more groups, neighbours are averaged."""
MAX_MATRIX_GROUPS = 32
"""Most groups whose correlation matrix is kept; of more, evenly spaced ones."""
MAX_SAMPLE_TOKENS = 160
"""Most tokens of the sample."""
_RATE_DIGITS, _PHI_DIGITS = 4, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfStats:
    """Routing of one sublayer, shares in [0, 1].

    Args:
        half: 'attention' or 'ffn'.
        execute_rate: Share of (token, group) pairs that execute.
        by_group: Share of tokens that execute each group, N_G values.
        by_position: Share of groups that the tokens at each position of a sequence execute, T values.
        by_count: Share of tokens that execute exactly 0, 1, ..., N_G groups, N_G + 1 values.
        same_as_previous: Share of decisions equal to the previous token's; None without neighbours.
        same_by_chance: The same, were successive tokens independent at the groups' rates.
        token_correlation: Phi coefficient of a group's decisions 1, 2, ... tokens apart, mean over groups; None where
            no group's decisions vary.
        group_correlation: Phi coefficient of groups 1, 2, ... apart in the same token, mean over pairs.
        matrix_groups: Which groups `matrix` is of.
        matrix: Phi coefficients of each two of those groups in the same token.
    """

    layer: int
    half: str
    execute_rate: float
    by_group: tuple[float, ...]
    by_position: tuple[float, ...]
    by_count: tuple[float, ...]
    same_as_previous: float | None
    same_by_chance: float | None
    token_correlation: tuple[float | None, ...]
    group_correlation: tuple[float | None, ...]
    matrix_groups: tuple[int, ...]
    matrix: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingStats:
    """Routing of a model on some text.

    Args:
        halves: One entry per routed sublayer, first layer first, attention before FFN.
        sample: Ids of the first real tokens of the text.
        sample_shares: By kind, 'attention' or 'ffn': for each token of the sample the share of groups that each layer
            executes; None in layers where that sublayer is not routed.
        flips: By kind, the share of decisions that change when hidden states are rounded to bfloat16 before the
            router reads them, layer by layer; empty for models that run in bfloat16.
    """

    halves: tuple[HalfStats, ...]
    sparsity: Sparsity
    tokens: int
    sample: tuple[int, ...]
    sample_shares: dict[str, tuple[tuple[float | None, ...], ...]]
    flips: dict[str, float]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """How two binary variables went together, for several pairs of variables at once.

    Of all observations, float64, those in which the first, the second, or both were True.
    """

    total: Tensor
    first: Tensor
    second: Tensor
    both: Tensor

    def phi(self) -> Tensor:
        """Return the phi coefficients in [-1, 1], NaN where a variable never changes."""
        covariance = self.total * self.both - self.first * self.second
        spread = self.first * (self.total - self.first) * self.second * (self.total - self.second)
        return torch.where(spread > 0, covariance / spread.clamp(min=1).sqrt(), torch.nan)

    def same(self) -> Tensor:
        """Return the share of observations in which the two are equal."""
        return (self.total - self.first - self.second + 2 * self.both) / self.total

    def same_by_chance(self) -> Tensor:
        """Return the share that would be equal if the two were independent, at the same rates."""
        first, second = self.first / self.total, self.second / self.total
        return first * second + (1 - first) * (1 - second)


class HalfCounter:
    """Sums over the masks of one sublayer, on their device, exact; `positions` is the largest T."""

    def __init__(self, positions: int, num_groups: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._seen, self._by_position = zeros(positions), zeros(positions)
        self._by_count = zeros(num_groups + 1)
        self._together = zeros(num_groups, num_groups)
        self._lags, self._pairs = zeros(MAX_LAG, 3, num_groups), zeros(MAX_LAG)

    def add(self, mask: Tensor, valid: Tensor) -> None:
        """Count a forward's mask, bool `[B, T, N_G]`; `valid`, bool `[B, T]`, is False for padding."""
        executed, length = mask & valid.unsqueeze(-1), mask.shape[1]
        flat, per_token = executed.flatten(0, 1).float(), executed.sum(-1)
        # Sums of zeros and ones are exact in float32 up to 2^24 tokens of one forward.
        self._together += (flat.t() @ flat).round().long()
        self._seen[:length] += valid.sum(0)
        self._by_position[:length] += per_token.sum(0)
        self._by_count.index_add_(0, per_token.flatten(), valid.flatten().long())
        for lag in range(1, min(MAX_LAG, length - 1) + 1):
            known = valid[:, lag:] & valid[:, :-lag]
            earlier, later = executed[:, :-lag] & known.unsqueeze(-1), executed[:, lag:] & known.unsqueeze(-1)
            self._lags[lag - 1] += torch.stack([part.sum((0, 1)) for part in (earlier, later, earlier & later)])
            self._pairs[lag - 1] += known.sum()

    def rates(self) -> Tensor:
        """Return the share of tokens that execute each group, float64 `[N_G]` on the CPU."""
        return self._together.diagonal().cpu().double() / int(self._seen.sum())

    def between_groups(self) -> Pairs:
        """Return how each two groups go together in a token, `[N_G, N_G]`."""
        together = self._together.cpu().double()
        single, total = together.diagonal().expand_as(together), torch.full_like(together, int(self._seen.sum()))
        return Pairs(total=total, first=single.T, second=single, both=together)

    def between_tokens(self) -> Pairs:
        """Return how a group's decisions at 1 to `MAX_LAG` tokens' distance go together, `[lags seen, N_G]`."""
        pairs = self._pairs.cpu().double()
        sums = self._lags.cpu().double()[pairs > 0]
        total = pairs[pairs > 0].unsqueeze(-1).expand(-1, sums.shape[-1])
        return Pairs(total=total, first=sums[:, 0], second=sums[:, 1], both=sums[:, 2])

    def stats(self, layer: int, half: str) -> HalfStats:
        """Return everything as numbers (waits for the device)."""
        rates, groups, lags = self.rates(), self.between_groups().phi(), self.between_tokens()
        num_groups, seen, counts = len(rates), self._seen.double(), self._by_count.double()
        chosen = (
            torch.linspace(0, num_groups - 1, min(num_groups, MAX_MATRIX_GROUPS), dtype=torch.float64).round().long()
        )
        same, by_chance = (next(iter(_numbers(each().mean(1))), None) for each in (lags.same, lags.same_by_chance))
        return HalfStats(
            layer=layer,
            half=half,
            execute_rate=float(rates.mean()),
            by_group=tuple(rates.tolist()),
            by_position=tuple((self._by_position / (seen.clamp(min=1) * num_groups)).tolist()),
            by_count=tuple((counts / counts.sum()).tolist()),
            same_as_previous=same,
            same_by_chance=by_chance,
            token_correlation=_numbers(lags.phi().nanmean(1)),
            group_correlation=mean_by_distance(groups),
            matrix_groups=tuple(chosen.tolist()),
            matrix=tuple(_numbers(row) for row in groups[chosen][:, chosen]),
        )


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
    skips, rounding, tokens = SkipCounter(model), _Rounding(), 0
    counters: dict[tuple[int, str], HalfCounter] = {}
    sample: tuple[tuple[int, ...], dict[str, Any]] | None = None
    length = min(sequence_length, longest_input(model) or sequence_length)
    if isinstance(data, str | Path):
        data = load_blocks(data, load_tokenizer(model, tokenizer), sequence_length=length, split=split)
    elif isinstance(data, list | tuple) and any(isinstance(item, str) for item in data):
        data = blocks_of_texts(data, load_tokenizer(model, tokenizer), sequence_length=length, shorten=True)
    if isinstance(data, TokenBlocks):
        check_vocabulary(data.largest_id, model)
        data = data.in_order(batch_size, max_blocks=max_blocks)
    batches: Iterable[Any] = data
    with ExitStack() as inside:
        for router in attachment(model).routers():
            inside.enter_context(router.register_forward_hook(rounding))
        inside.enter_context(judging(model))
        routing = inside.enter_context(observe(model))
        for batch in progress(batches, title="routing", unit="batch"):
            if not isinstance(batch, TokenBatch):
                raise DataError(f"data holds {type(batch).__name__}; wanted texts, token batches, blocks or a source")
            moved = batch.to(model_device(model))
            model(input_ids=moved.input_ids, attention_mask=moved.attention_mask(), use_cache=False)
            skips.add(routing, moved.valid)
            rounding.add(moved.valid)
            for layer, half, mask in masks_of(routing):
                if (layer, half) not in counters:
                    counters[layer, half] = HalfCounter(mask.shape[1], mask.shape[2], mask.device)
                counters[layer, half].add(mask, moved.valid)
            tokens += int(moved.valid.sum())
            if sample is None and bool(moved.valid[0].any()):
                sample = _sample(moved, routing)
    if sample is None:
        raise EvaluationError("there is no token to count routing on; give text that is longer than one block")
    return RoutingStats(
        halves=tuple(counter.stats(*key) for key, counter in counters.items()),
        sparsity=skips.result(),
        tokens=tokens,
        sample=sample[0],
        sample_shares=sample[1],
        flips=rounding.shares(),
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
    """Return what each token adds to the text; a character of several tokens belongs to its last one."""
    pieces, shown = [], 0
    for end in range(1, len(ids) + 1):
        decoded = str(tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False))
        # A character that is not complete yet shows as the replacement sign.
        whole = decoded.rstrip("\N{REPLACEMENT CHARACTER}") if end < len(ids) else decoded
        pieces.append(whole[shown:])
        shown = max(shown, len(whole))
    return pieces


class _Rounding:
    """Counts the decisions of forwards that rounding hidden states to bfloat16 would change."""

    def __init__(self) -> None:
        # Of the latest forward: kind, flipped decisions of each token `[B, T]`, and groups of the sublayer.
        self._latest: list[tuple[str, Tensor, int]] = []
        self._flipped: dict[str, Tensor] = {}
        self._decisions: dict[str, Tensor] = {}

    def __call__(self, router: Router, args: tuple[Any, ...], _output: Tensor) -> None:
        hidden: Tensor = args[0]
        if hidden.dtype != torch.bfloat16:
            # Not compared with the output, which may have been forced.
            own, rounded = (_decisions(router, each) for each in (hidden, hidden.to(torch.bfloat16)))
            self._latest.append((router.half_layer, (rounded != own).sum(-1), router.num_groups))

    def add(self, valid: Tensor) -> None:
        """Count the latest forward at tokens that are no padding, bool `[B, T]`."""
        for half, flipped, groups in self._latest:
            self._flipped[half] = self._flipped.get(half, 0) + (flipped * valid).sum()
            self._decisions[half] = self._decisions.get(half, 0) + valid.sum() * groups
        self._latest.clear()

    def shares(self) -> dict[str, float]:
        return {half: int(self._flipped[half]) / int(self._decisions[half]) for half in self._flipped}


def _decisions(router: Router, hidden: Tensor) -> Tensor:
    logits = router.logits(hidden)
    return logits[..., EXECUTE] - logits[..., SKIP] >= router.threshold


def mean_by_distance(matrix: Tensor) -> tuple[float | None, ...]:
    """Return the mean of `[N_G, N_G]` at each |i - j| from 1 to `MAX_DISTANCE`, NaN left out; None if all are."""
    last = min(MAX_DISTANCE, matrix.shape[0] - 1)
    means = [float(matrix.diagonal(distance).nanmean()) for distance in range(1, last + 1)]
    return _numbers(torch.tensor(means, dtype=matrix.dtype))


def _numbers(values: Tensor) -> tuple[float | None, ...]:
    """Return `[N]` as numbers, None for NaN."""
    return tuple(None if value != value else value for value in values.tolist())


def routing_records(
    subject: str, found: RoutingStats, where: str, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Record]:
    """Yield the records of a model's routing: figures as numbers, series and tables as compact JSON of bounded size.

    Correlation matrices are kept of two layers of attention and FFN each, the one that skips least and the one that
    skips most.
    """
    text = f"{where}, {found.tokens} tokens"

    def record(metric: str, value: Any, unit: str = "json", *, layer: int | None = None, where: str = text) -> Record:
        return Record(subject=subject, metric=f"routing.{metric}", value=value, unit=unit, where=where, layer=layer)

    yield record("tokens", found.tokens, "token")
    for half in HALVES:
        entries = found.of(half)
        if not entries:
            continue
        for entry in entries:
            for name in ("same_as_previous", "same_by_chance"):
                if (value := getattr(entry, name)) is not None:
                    yield record(f"{half}.{name}", value, "share", layer=entry.layer)
            parts = torch.tensor(entry.by_group, dtype=torch.float64).tensor_split(min(len(entry.by_group), MAX_BINS))
            shares = _rounded([float(part.mean()) for part in parts], _RATE_DIGITS)
            yield record(f"{half}.by_group", {"groups": len(entry.by_group), "shares": shares}, layer=entry.layer)
        for name in ("same_as_previous", "same_by_chance"):
            if (mean := _mean([getattr(entry, name) for entry in entries])) is not None:
                yield record(f"{half}.{name}", mean, "share")
        for name in ("token_correlation", "group_correlation"):
            # Layers may be of different lengths.
            series = [_mean(place) for place in zip_longest(*(getattr(entry, name) for entry in entries))]
            yield record(f"{half}.{name}", _rounded(series, _PHI_DIGITS))
        ordered = sorted(entries, key=lambda entry: entry.execute_rate)
        for chosen in [ordered[-1], ordered[0]][: len(ordered)]:
            matrix = {"groups": chosen.matrix_groups, "phi": [_rounded(row, _PHI_DIGITS) for row in chosen.matrix]}
            yield record(f"{half}.group_matrix", matrix, layer=chosen.layer)
    for half, share in found.flips.items():
        yield record(f"{half}.flips_bfloat16", share, "share")
    percent = {
        half: [[None if share is None else round(100 * share) for share in row] for row in rows]
        for half, rows in found.sample_shares.items()
    }
    words = f"beginning of the text, {len(found.sample)} tokens; percent of groups by token and layer"
    yield record("sample", {"tokens": token_texts(found.sample, tokenizer)} | percent, where=words)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _rounded(values: Sequence[float | None], digits: int) -> list[float | None]:
    return [None if value is None else round(value, digits) for value in values]
