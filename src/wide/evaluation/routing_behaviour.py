"""How a model routes text: by group, from group to group and token to token, under rounding, and token by token."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBatch, TokenBlocks
from wide.data.tokenizer import load_tokenizer
from wide.errors import EvaluationError
from wide.evaluation.inference import HALVES, masks_of, watch_routing
from wide.models.attach import attachment
from wide.models.router import EXECUTE, SKIP, Router
from wide.records import Record
from wide.routing import Routing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_LAG = 16
"""Furthest token that a decision is compared with, in tokens."""
MAX_DISTANCE = 32
"""Furthest neighbours whose correlation is averaged, in groups."""
MAX_BINS = 128
"""Most rates kept of one sublayer; of more groups, neighbours are averaged."""
MAX_MATRIX_GROUPS = 32
"""Most groups whose correlation matrix is kept; of more, evenly spaced ones."""
MAX_SAMPLE_TOKENS = 160
"""Most tokens of the sample."""
_RATE_DIGITS, _PHI_DIGITS = 4, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfBehaviour:
    """Routing of one sublayer.

    Args:
        layer: Decoder layer, from 0.
        half: 'attention' or 'ffn'.
        num_groups: Groups of the sublayer, N_G.
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
        shares: By kind, 'attention' or 'ffn': for each token the share of groups that each layer executes, in [0, 1];
            None in layers where that sublayer is not routed.
    """

    tokens: tuple[str, ...]
    shares: dict[str, tuple[tuple[float | None, ...], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingBehaviour:
    """Routing of a model on some text.

    Args:
        halves: One entry per routed sublayer, first layer first, attention before FFN.
        sample: The beginning of the text.
        flips: By kind, the share of decisions that change when hidden states are rounded to bfloat16 before the
            router reads them, layer by layer; empty for models that run in bfloat16.
        tokens: Tokens that were counted.
    """

    halves: tuple[HalfBehaviour, ...]
    sample: Sample
    flips: dict[str, float]
    tokens: int

    def of(self, half: str) -> list[HalfBehaviour]:
        """Return the entries of one kind, 'attention' or 'ffn', first layer first."""
        return [entry for entry in self.halves if entry.half == half]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """How two binary variables went together, for several pairs of variables at once.

    Args:
        total: Observations of each pair, float64.
        first: Of those, the first variable was True.
        second: Of those, the second variable was True.
        both: Of those, both were True.
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
    """Sums over the masks of one sublayer, on their device, exact.

    Args:
        num_groups: Groups of the sublayer, N_G.
        device: Of the masks.
    """

    def __init__(self, num_groups: int, device: torch.device) -> None:
        """Start at zero."""
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._together = torch.zeros(num_groups, num_groups, dtype=torch.int64, device=device)
        self._lags = torch.zeros(MAX_LAG, 3, num_groups, dtype=torch.int64, device=device)
        self._pairs = torch.zeros(MAX_LAG, dtype=torch.int64, device=device)

    def add(self, mask: Tensor, valid: Tensor) -> None:
        """Count one forward.

        Args:
            mask: bool `[B, T, N_G]`.
            valid: bool `[B, T]`, False for padding.
        """
        executed = mask & valid.unsqueeze(-1)
        flat = executed.flatten(0, 1).float()
        # Sums of zeros and ones are exact in float32 up to 2^24 tokens of one forward.
        self._together += (flat.t() @ flat).round().long()
        self._tokens += valid.sum()
        for lag in range(1, min(MAX_LAG, mask.shape[1] - 1) + 1):
            known = valid[:, lag:] & valid[:, :-lag]
            earlier, later = executed[:, :-lag] & known.unsqueeze(-1), executed[:, lag:] & known.unsqueeze(-1)
            sums = [part.sum((0, 1)) for part in (earlier, later, earlier & later)]
            self._lags[lag - 1] += torch.stack(sums)
            self._pairs[lag - 1] += known.sum()

    def rates(self) -> Tensor:
        """Return the share of tokens that execute each group, float64 `[N_G]` on the CPU."""
        return self._together.diagonal().cpu().double() / int(self._tokens)

    def between_groups(self) -> Pairs:
        """Return how each two groups go together in a token, `[N_G, N_G]`."""
        together = self._together.cpu().double()
        single = together.diagonal()
        total = torch.full_like(together, int(self._tokens))
        return Pairs(
            total=total,
            first=single[:, None].expand_as(together),
            second=single.expand_as(together),
            both=together,
        )

    def between_tokens(self) -> Pairs:
        """Return how a group's decisions at 1 to `MAX_LAG` tokens' distance go together, `[lags seen, N_G]`."""
        pairs = self._pairs.cpu().double()
        sums = self._lags.cpu().double()[pairs > 0]
        total = pairs[pairs > 0].unsqueeze(-1).expand(-1, sums.shape[-1])
        return Pairs(total=total, first=sums[:, 0], second=sums[:, 1], both=sums[:, 2])


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
        EvaluationError: If no sublayer is routed by token, or there is no token to count.
        DataError: If the data are of another kind, or do not fit the model.

    Source: paper, section 4.4 (routing behaviour).
    """
    if not attachment(model).routers():
        raise EvaluationError("this model has no routers, so there is no routing by token to look at")
    reader = tokenizer or load_tokenizer(model)
    counters: dict[tuple[int, str], HalfCounter] = {}
    samples: list[Sample] = []
    tokens = 0

    def look(batch: TokenBatch, routing: Routing) -> None:
        nonlocal tokens
        for layer, half, mask in masks_of(routing):
            if (layer, half) not in counters:
                counters[layer, half] = HalfCounter(mask.shape[-1], mask.device)
            counters[layer, half].add(mask, batch.valid)
        rounding.add(batch.valid)
        tokens += int(batch.valid.sum())
        if not samples and bool(batch.valid[0].any()):
            samples.append(_sample(batch, routing, reader))

    rounding = _Rounding()
    with ExitStack() as hooks:
        for router in attachment(model).routers():
            hooks.callback(router.register_forward_hook(rounding).remove)
        watch_routing(
            model,
            data,
            look,
            tokenizer=reader,
            sequence_length=sequence_length,
            batch_size=batch_size,
            max_blocks=max_blocks,
        )
    if not samples:
        raise EvaluationError("there is no token to count routing on; give batches with tokens")
    halves = tuple(_half(*key, counter) for key, counter in counters.items())
    return RoutingBehaviour(halves=halves, sample=samples[0], flips=rounding.shares(), tokens=tokens)


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
        rates = [_rates(getattr(layer, half), places) for layer in routing]
        if any(getattr(layer, half) is not None for layer in routing):
            shares[half] = tuple(zip(*rates, strict=True))
    return Sample(tokens=tuple(token_texts(batch.input_ids[0, places].tolist(), tokenizer)), shares=shares)


def _rates(mask: Tensor | None, places: Tensor) -> list[Any]:
    return [None] * len(places) if mask is None else mask[0][places].double().mean(-1).tolist()


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
    """Counts the decisions of forwards that rounding hidden states to bfloat16 would change."""

    def __init__(self) -> None:
        # Of the latest forward: kind, flipped decisions of each token `[B, T]`, and groups of the sublayer.
        self._latest: list[tuple[str, Tensor, int]] = []
        self._flipped: dict[str, Tensor] = {}
        self._decisions: dict[str, Tensor] = {}

    def __call__(self, router: nn.Module, args: tuple[Any, ...], _output: Tensor) -> None:
        assert isinstance(router, Router)
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


def mean_by_distance(matrix: Tensor) -> list[float | None]:
    """Return the mean of a square matrix's entries at |i - j| = 1, 2, ... up to `MAX_DISTANCE`.

    Args:
        matrix: `[N_G, N_G]`, NaN where not defined.

    Returns:
        One value per distance, None where no entry is defined.
    """
    last = min(MAX_DISTANCE, matrix.shape[0] - 1)
    return [mean_of_defined(matrix.diagonal(distance)) for distance in range(1, last + 1)]


def mean_of_defined(values: Tensor) -> float | None:
    """Return the mean of what is not NaN, None if nothing is left."""
    defined = values[~values.isnan()]
    return float(defined.mean()) if defined.numel() else None


def behaviour_records(subject: str, found: RoutingBehaviour, where: str) -> Iterator[Record]:
    """Yield the records of a model's routing: figures as numbers, series and tables as compact JSON of bounded size.

    Correlation matrices are kept of two layers of attention and FFN each, the one that skips least and the one that
    skips most.

    Args:
        subject: What was measured.
        found: How it routes.
        where: Name of the text.
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
            rates = {"groups": entry.num_groups, "shares": _rounded(entry.by_group, _RATE_DIGITS)}
            yield record(f"{half}.by_group", rates, layer=entry.layer)
        for name in ("same_as_previous", "same_by_chance"):
            (mean,) = _mean_series([[getattr(entry, name)] for entry in entries])
            if mean is not None:
                yield record(f"{half}.{name}", mean, "share")
        for name in ("token_correlation", "group_correlation"):
            series = _mean_series([getattr(entry, name) for entry in entries])
            yield record(f"{half}.{name}", _rounded(series, _PHI_DIGITS))
        ordered = sorted(entries, key=lambda entry: entry.execute_rate)
        for chosen in [ordered[-1], ordered[0]][: len(ordered)]:
            matrix = {"groups": chosen.matrix_groups, "phi": [_rounded(row, _PHI_DIGITS) for row in chosen.matrix]}
            yield record(f"{half}.group_matrix", matrix, layer=chosen.layer)
    for half, share in found.flips.items():
        yield record(f"{half}.flips_bfloat16", share, "share")
    percent = {
        half: [[None if share is None else round(100 * share) for share in row] for row in rows]
        for half, rows in found.sample.shares.items()
    }
    words = f"beginning of the text, {len(found.sample.tokens)} tokens; percent of groups by token and layer"
    yield record("sample", {"tokens": found.sample.tokens} | percent, where=words)


def _mean_series(series: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the mean over layers at each place; layers may be of different lengths."""
    means: list[float | None] = []
    for place in range(max(map(len, series))):
        values = [value for row in series if place < len(row) and (value := row[place]) is not None]
        means.append(sum(values) / len(values) if values else None)
    return means


def _rounded(values: Sequence[float | None], digits: int) -> list[float | None]:
    return [None if value is None else round(value, digits) for value in values]
