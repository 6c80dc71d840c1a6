"""Calibrated thresholds: one set of routers serves several budgets through a threshold on their margins.

A group executes where its margin (execute logit minus skip logit) is at least the threshold; 0 is the paper's argmax.
Because skipping in one layer changes what the next ones read, a threshold's sparsity is measured with that threshold
in force, point by point, instead of being read off the margins of a single pass.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBatch
from wide.data.progress import progress
from wide.errors import ConfigError, NotAttachedError
from wide.models.attach import attachment
from wide.models.cost import Measure, half_weights
from wide.models.having import having
from wide.models.observe import forward_without_head, judging, observe
from wide.models.router import ALWAYS
from wide.models.sharding import as_first_has_it
from wide.routing import Routing
from wide.schema import require

DEFAULT_POINTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# The upper 17 bits of a float32 order the margins with 8 bits of mantissa, so that memory does not grow with tokens.
_SHIFT = 15
_POINTS_BETWEEN = 3
_BALANCING_PASSES = 3
_NUM_BINS = 1 << (32 - _SHIFT)


class MarginHistogram:
    """Margins of all decisions by weight in a measure of sparsity, in bounded memory; `agree` waits for the device."""

    def __init__(self, model: nn.Module, measure: Measure) -> None:
        self._routers = attachment(model).routers()
        weights = half_weights(model, measure)
        self._weights = [weight / router.num_groups for weight, router in zip(weights, self._routers, strict=True)]
        self._mass = torch.zeros(_NUM_BINS, dtype=torch.float64, device=next(model.parameters()).device)
        self._skipped = self._mass.new_zeros(())
        self._tokens = self._mass.new_zeros(())

    def add(self, routing: Routing, valid: Tensor) -> None:
        """Count the margins of one forward at the tokens that are not padding; `valid` is bool `[B, T]`."""
        for router, weight in zip(self._routers, self._weights, strict=True):
            layer = routing[router.layer_index]
            margin, mask = getattr(layer, f"{router.half_layer}_margin"), getattr(layer, router.half_layer).bool()
            # Whatever their margins are, the first tokens of a sequence may execute always.
            margin = margin.masked_fill(mask & (margin < router.threshold), math.inf)
            counted = valid.to(mask.device).unsqueeze(-1).expand_as(mask)
            bins = torch.zeros(_NUM_BINS, dtype=torch.int64, device=mask.device)
            bins.scatter_add_(0, _bins(margin).flatten(), counted.long().flatten())
            self._mass += weight * bins.to(self._mass.device).double()
            self._skipped += weight * (~mask & counted).sum().to(self._mass.device).double()
        self._tokens += valid.sum()

    def agree(self, model: nn.Module) -> None:
        """Take what the first of the processes counted that share a model."""
        found = as_first_has_it(model, torch.cat([self._mass, torch.stack([self._skipped, self._tokens])])).cpu()
        self._mass, self._skipped, self._tokens = found[:-2], found[-2], found[-1]

    @property
    def sparsity(self) -> float:
        """Skipped share of the decisions that were actually taken."""
        # Where everything is skipped, a sum of rounded weights may exceed 1, which no adapter admits.
        return min(float(self._skipped) / max(float(self._tokens), 1), 1.0)

    def threshold(self, sparsity: float) -> float:
        """Return the margin below which this weight of decisions lies, by linear interpolation inside a bin."""
        mass = self._mass / max(float(self._tokens), 1)
        below = mass.cumsum(0)
        index = int(torch.searchsorted(below, torch.tensor(sparsity, dtype=torch.float64)))
        if index >= _NUM_BINS:
            index = int(mass.nonzero().max())
        inside = (sparsity - float(below[index] - mass[index])) / max(float(mass[index]), 1e-300)
        low, high = _edge(index), _edge(index + 1)
        return low + min(max(inside, 0.0), 1.0) * (high - low)


def calibrate_thresholds(
    model: nn.Module,
    batches: Iterable[TokenBatch],
    *,
    measure: Measure = "mean",
    sparsities: Sequence[float] = DEFAULT_POINTS,
) -> list[tuple[float, float]]:
    """Measure which threshold gives which sparsity, note it in the attachment and return it.

    Each wanted point, in (0, 1), costs one pass over the batches; its threshold is guessed from the margins of its
    neighbour's pass, and what is stored is the sparsity that was then measured, as `half_weights` counts it. Between
    two measured points the table is filled from the margins of both; argmax is always one of its points. Pairs are
    (sparsity, threshold), both strictly ascending. The thresholds in force are put back. Raises NotAttachedError if the
    model carries no routers, and ConfigError if there is no batch, or a sparsity lies outside (0, 1).
    """
    kept = list(batches)
    wrong = [value for value in sparsities if not 0.0 < value < 1.0]
    if not kept or wrong:
        raise ConfigError(
            f"calibrated thresholds need calibration batches ({len(kept)} given) and sparsities in (0, 1), not {wrong}"
        )

    (start,) = _measure(model, kept, 0.0, measure)
    passes = [(0.0, start)]
    above = sorted(s for s in sparsities if start.sparsity < s)
    below = sorted((s for s in sparsities if s < start.sparsity), reverse=True)
    for side in (above, below):
        nearest = start
        for wanted in side:
            threshold = nearest.threshold(wanted)
            (nearest,) = _measure(model, kept, threshold, measure)
            passes.append((threshold, nearest))
    table = _ascending(_table(sorted(passes, key=lambda one: one[0])))
    attachment(model).thresholds_by_sparsity = table
    return table


def measure_sparsity(
    model: nn.Module, batches: Iterable[TokenBatch], threshold: float | Sequence[float], *, measure: Measure = "mean"
) -> float:
    """Return the sparsity that a threshold, of all routers or of each, gives on calibration text.

    The thresholds in force are put back.
    """
    (found,) = _measure(model, list(batches), threshold, measure)
    return found.sparsity


def balanced_thresholds(
    model: nn.Module, batches: Iterable[TokenBatch], sparsity: float, *, tolerance: float
) -> list[float]:
    """Return a threshold for each router, one for attention and one for FFN, so that both kinds skip the same share.

    A threshold of one kind changes what the other reads, so both are measured with both in force, up to three times;
    those that are within the tolerance stay, at first at 0, the paper's argmax. The thresholds in force are put back.
    """
    kept = list(batches)
    kinds: tuple[Measure, ...] = ("attention", "ffn")
    routers = attachment(model).routers()
    chosen: dict[str, float] = dict.fromkeys(kinds, 0.0)
    for _ in range(_BALANCING_PASSES):
        thresholds = [chosen[router.half_layer] for router in routers]
        found = dict(zip(kinds, _measure(model, kept, thresholds, *kinds), strict=True))
        missed = [kind for kind in kinds if abs(found[kind].sparsity - sparsity) > tolerance]
        if not missed:
            break
        chosen |= {kind: found[kind].threshold(sparsity) for kind in missed}
    return [chosen[router.half_layer] for router in routers]


def set_sparsity(model: nn.Module, sparsity: float | None = None, *, threshold: float | None = None) -> float:
    """Set the threshold of all routers and return it; where attention and FFN had their own, they lose them.

    Threads share thresholds. A forward that runs meanwhile in another thread decides each sublayer by the old threshold
    or by the new one; forwards that begin afterwards use the new one.

    Args:
        sparsity: Wanted sparsity in the measure of the stored thresholds; 0 runs every group.
        threshold: A margin in logits instead of a sparsity; 0 is the paper's argmax.

    Raises:
        NotAttachedError: If the model carries no plan, or one without routers.
        ConfigError: If both or neither value are given, no thresholds are stored, or the sparsity lies outside of what
            they reach.
    """
    state = attachment(model)
    _require_routers(model)
    if (sparsity is None) == (threshold is None):
        raise ConfigError("give either a sparsity or a threshold")
    if threshold is None:
        assert sparsity is not None
        threshold = threshold_of(state.thresholds_by_sparsity, sparsity)
    require(Real, threshold, "threshold", "a number")
    if math.isnan(threshold):
        raise ConfigError("threshold must be a number, got nan")
    for router in state.routers():
        router.threshold = float(threshold)
    return float(threshold)


def forget_thresholds(model: nn.Module) -> None:
    """Take argmax, and drop what was calibrated: it is not of the routers as they will be."""
    set_sparsity(model, threshold=0.0)
    attachment(model).thresholds_by_sparsity = []


def threshold_of(table: Sequence[tuple[float, float]], sparsity: float) -> float:
    """Return the threshold that gives a sparsity by a table of (sparsity, threshold); 0 runs every group.

    Raises ConfigError if the table is empty, or the sparsity lies outside of what it reaches.
    """
    require(Real, sparsity, "sparsity", "a number in [0, 1)")
    if not 0.0 <= sparsity < 1.0:
        raise ConfigError(f"sparsity must lie in [0, 1), got {sparsity}; 0.5 skips half of the work")
    if sparsity == 0.0:
        return -math.inf
    if not table:
        raise ConfigError("no calibrated thresholds in this adapter; leave --sparsity out, or pass threshold=")
    # The ends may miss a round number by the noise of the calibration.
    low, high = table[0][0] - 0.01, table[-1][0] + 0.01
    if not low <= sparsity <= high:
        raise ConfigError(
            f"sparsity {sparsity:g} lies outside what this adapter is calibrated for, {table[0][0]:.3f} to "
            f"{table[-1][0]:.3f} (and 0, which is dense); choose one inside"
        )
    for (s0, t0), (s1, t1) in pairwise(table):
        if s0 <= sparsity <= s1:
            return t0 + (sparsity - s0) / (s1 - s0) * (t1 - t0)
    return table[0][1] if sparsity < table[0][0] else table[-1][1]


def _measure(
    model: nn.Module, batches: Sequence[TokenBatch], threshold: float | Sequence[float], *measures: Measure
) -> list[MarginHistogram]:
    """Return the margins under a threshold of all routers, or of each; the thresholds in force are put back."""
    _require_routers(model)
    histograms = [MarginHistogram(model, measure) for measure in measures]
    device, routers = next(model.parameters()).device, attachment(model).routers()
    thresholds = threshold if isinstance(threshold, Sequence) else [threshold] * len(routers)
    with ExitStack() as stack, judging(model), observe(model) as routing:
        for router, each in zip(routers, thresholds, strict=True):
            stack.enter_context(having(router, threshold=each))
        for batch in progress(batches, title="calibrating thresholds", unit="batch"):
            moved = batch.to(device)
            forward_without_head(model, moved.input_ids, moved.attention_mask())
            for histogram in histograms:
                histogram.add(routing, moved.valid)
    for histogram in histograms:
        histogram.agree(model)
    return histograms


def _require_routers(model: nn.Module) -> None:
    if not attachment(model).plan.is_routed:
        raise NotAttachedError("the plan has no routers: its sparsity is fixed (wide.models.cost.static_sparsity)")


def _bins(margin: Tensor) -> Tensor:
    """Return the bin of each margin; bins are ordered as the numbers are."""
    bits = margin.float().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered >> _SHIFT).long() + _NUM_BINS // 2


def _edge(index: int) -> float:
    """Return the smallest margin of a bin, the inverse of `_bins`."""
    ordered = torch.tensor((index - _NUM_BINS // 2) << _SHIFT).clamp(-(2**31), 2**31 - 1).to(torch.int32)
    value = float((ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32))
    return value if math.isfinite(value) else math.copysign(torch.finfo(torch.float32).max, index - _NUM_BINS // 2)


def _table(passes: Sequence[tuple[float, MarginHistogram]]) -> list[tuple[float, float]]:
    """Return the measured points and, between each two, points that follow the density of the margins at both."""
    table = [(found.sparsity, threshold) for threshold, found in passes]
    for (_, low), (_, high) in pairwise(passes):
        for step in range(1, _POINTS_BETWEEN + 1):
            share = step / (_POINTS_BETWEEN + 1)
            sparsity = low.sparsity + share * (high.sparsity - low.sparsity)
            ends = low.threshold(sparsity), high.threshold(sparsity)
            table.append((sparsity, max(ends) if max(ends) > ALWAYS else (1 - share) * ends[0] + share * ends[1]))
    return [point for point in table if point[1] <= ALWAYS]  # No threshold skips what always executes.


def _ascending(table: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points by threshold, without those that break the order; the argmax point always stays."""
    by_threshold = sorted(table, key=lambda point: point[1])
    argmax = next(point for point in by_threshold if point[1] == 0.0)
    kept = [argmax]
    for point in by_threshold:
        if point[1] > kept[-1][1] and point[0] > kept[-1][0]:
            kept.append(point)
    for point in reversed(by_threshold):
        if point[1] < kept[0][1] and point[0] < kept[0][0]:
            kept.insert(0, point)
    return kept
