"""Týr-the-Pruner: local second-order pruning at several sparsities, and a search for how to spread them over layers.

Each iteration starts from the dense weights: every attention and FFN output projection is pruned to nine levels around
its expected sparsity (`Supernet`); an evolutionary search (`evolve`, that of EvoPress) then picks a level for each,
with the totals of heads and of channels held, by the divergence from the dense model (`TopKDivergence`). The levels
found are expected in the next iteration, whose levels lie half as far apart.

Source: Li et al., "Týr-the-Pruner: Structural Pruning LLMs via Global Sparsity Distribution Optimization", 2025.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from wide.data.batches import TokenBlocks
from wide.data.progress import progress
from wide.errors import ConfigError
from wide.grouping import Grouping
from wide.methods.calibration import calibration_windows, windows
from wide.methods.catalogue import TyrConfig
from wide.methods.layer_runner import EditedWeights, LayerRunner
from wide.methods.method import Decision, Effort, Target, channels_share, width_share
from wide.methods.second_order import GramAccumulator, UnitPruner
from wide.models.block_spec import BlockSpec, feed_forward, plain_linear
from wide.models.discovery import discover
from wide.models.observe import judging
from wide.plan import Dense, Half, Kept, LayerPlan, Plan, Skipped, scale_name

_DEVIATIONS = (
    "calibrated on the benchmark's corpus, the original on FineWeb-Edu",
    "numbers of heads and channels that do not divide are spread over layers so that the totals are exact; the "
    "original rounds up what each layer removes",
)
_PROPAGATION = {
    "expected": "layers are fitted behind copies at the expected sparsity, as the released code is written for; as "
    "released it overwrites that sparsity with 0 and fits every layer behind unpruned ones (propagation dense), and "
    "the paper behind the mean of all copies (propagation mean)",
    "mean": "layers are fitted behind the mean of all copies (paper); the released code fits them behind unpruned ones",
    "dense": "layers are fitted behind unpruned ones, as the released code does; the paper behind the mean of all "
    "copies",
}
# Rows of logits that are turned to float32 at a time: 256 MiB for 8192 logits a row, forward and back.
_ROWS_PER_CHUNK = 4096

SublayerKind = Literal["attention", "ffn"]
Allocation = tuple[int, ...]
"""The level of every projection; the search starts at 0, and a level up in one pays for one down in another."""
Fitness = Callable[[Allocation, int, int], float]
"""(allocation, stage, generation) -> what is minimised; in the last stage it must not depend on the generation."""


def decide(model: nn.Module, blocks: TokenBlocks, target: Target, settings: TyrConfig) -> Decision:
    """Decide which heads and channels go in which layer, and what the output projections become.

    Raises UnsupportedModelError if an output projection is no plain linear layer, or a layer has no FFN to prune, and
    ConfigError if the target cannot be reached, or a window does not fit the calibration text.
    """
    specs = discover(model)
    share = width_share(specs, target)
    ids = calibration_windows(blocks, settings)
    effort = Effort()
    with judging(model), EditedWeights(model) as weights:
        supernet = Supernet(specs, weights, settings)
        judge = TopKDivergence(
            model, _search_windows(blocks, settings), top_k=settings.top_k, batch_size=settings.search_batch_size
        )
        expected = supernet.initial_budget(share)
        notes: list[dict[str, Any]] = []
        for iteration in range(settings.iterations):
            supernet.set_levels(expected, iteration)
            runner = LayerRunner(model, specs, ids, batch_size=settings.batch_size)
            title = f"tyr: layers, {iteration + 1} of {settings.iterations}"
            effort.tokens_forward += supernet.fill(runner, title=title)
            best, history = _search(model, supernet, judge, settings, iteration)
            removed = expected = supernet.removed(best)
            notes.append({"removed": removed, "divergence": history})
            if target.match == "linear_flops":
                kept = [supernet.copies[index, best[index]][1] for index in range(0, len(best), 2)]
                expected = supernet.with_channels(removed, channels_share(specs, target, kept))
        effort.tokens_forward += judge.tokens
        return _decision(supernet, best, effort, notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """The output projection of a sublayer, whose input channels are pruned in units: query heads, or FFN channels."""

    layer: int
    kind: SublayerKind
    linear: nn.Linear
    unit_size: int

    @property
    def num_units(self) -> int:
        """Heads or channels."""
        return self.linear.in_features // self.unit_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """The levels of a projection, and how many units it is without at each: `expected + level * step`.

    Levels are swapped within a `kind` only, so that the sum over each kind stays; `lowest` <= 0 <= `highest`.
    """

    kind: str
    lowest: int
    highest: int
    expected: int = 0
    step: int = 1

    @classmethod
    def around(cls, projection: Projection, expected: int, *, step: int, per_side: int) -> "Levels":
        """Return up to `per_side` levels on each side of `expected`, as far as units last."""
        lowest = -min(per_side, expected // step)
        highest = min(per_side, (projection.num_units - expected) // step)
        return cls(kind=projection.kind, lowest=lowest, highest=highest, expected=expected, step=step)

    def all(self) -> range:
        """Return the levels, ascending."""
        return range(self.lowest, self.highest + 1)

    def removed(self, level: int) -> int:
        """Return how many units are removed at a level."""
        return self.expected + level * self.step


def _scaled(numbers: Sequence[int], factor: float) -> list[int]:
    """Return whole numbers times a factor, rounded so that sums of the first ones are as exact as may be."""
    ends = [int(factor * end + 0.5) for end in accumulate(numbers, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


class Supernet:
    """Copies of every output projection at several sparsities.

    `projections` are those of all layers, attention before FFN, and `levels` theirs, once they are set. `copies` are
    (weight `[out, in]`, bool `[units]` of those kept) by (projection, level), on the CPU. `weights` edits the model,
    whose weights are dense between calls of `fill` and `load`.
    """

    def __init__(self, specs: Sequence[BlockSpec], weights: EditedWeights, settings: TyrConfig) -> None:
        self.weights, self.settings = weights, settings
        self.copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.levels: list[Levels] = []
        self.projections: list[Projection] = []
        for spec in specs:
            sublayers: tuple[tuple[SublayerKind, nn.Module, int], ...] = (
                ("attention", spec.attention.output, spec.attention.head_dim),
                ("ffn", feed_forward(spec).down, 1),
            )
            for kind, module, unit_size in sublayers:
                linear = plain_linear(module, spec.index)
                self.projections.append(Projection(layer=spec.index, kind=kind, linear=linear, unit_size=unit_size))

    def initial_budget(self, share: float) -> list[int]:
        """Return the units each projection starts without: the same share everywhere, exact in total for each kind."""
        heads, channels = (_scaled([p.num_units for p in self.projections[kind::2]], share) for kind in (0, 1))
        return [units for both in zip(heads, channels, strict=True) for units in both]

    def with_channels(self, removed: Sequence[int], share: float) -> list[int]:
        """Return the removed units with those of FFNs scaled, so that together they are a share of all channels."""
        total = sum(projection.num_units for projection in self.projections[1::2])
        found = [*removed]
        found[1::2] = _scaled(removed[1::2], share * total / max(sum(removed[1::2]), 1))
        return [min(units, projection.num_units) for units, projection in zip(found, self.projections, strict=True)]

    def set_levels(self, expected: Sequence[int], iteration: int) -> None:
        """Set the levels of an iteration, from 0, around the removed units expected; one step for all of a kind."""
        settings, steps = self.settings, {}
        for kind, least in (("attention", settings.min_head_step), ("ffn", settings.min_channel_step)):
            units = [projection.num_units for projection in self.projections if projection.kind == kind]
            steps[kind] = max(least, round(settings.first_step / 2**iteration * sum(units) / len(units)))
        self.levels = [
            Levels.around(projection, removed, step=steps[projection.kind], per_side=settings.levels_per_side)
            for projection, removed in zip(self.projections, expected, strict=True)
        ]

    def removed(self, allocation: Allocation) -> list[int]:
        """Return the removed units of every projection."""
        return [of.removed(level) for of, level in zip(self.levels, allocation, strict=True)]

    def load(self, index: int, level: int) -> None:
        """Put the copy of a projection at a level into the model."""
        self.weights.set(self.projections[index].linear, self.copies[index, level][0])

    def fill(self, runner: LayerRunner, title: str) -> int:
        """Make the copies of all projections, layer after layer; return how many tokens went through all layers.

        The two projections of a layer do not see each other's pruning; those of later layers see what `propagation`
        says.
        """
        passes = 0
        for spec in progress(runner.specs, title=title, unit="layer"):
            own = {i: p for i, p in enumerate(self.projections) if p.layer == spec.index}
            grams = {
                index: GramAccumulator(projection.linear.in_features, device=projection.linear.weight.device)
                for index, projection in own.items()
            }
            runner.observe(spec.index, {projection.linear: grams[index].add for index, projection in own.items()})
            for index, projection in own.items():
                self._prune_at_all_levels(index, projection, grams.pop(index).matrix)
            passes = 1 + self._propagate(runner, spec.index, own)
        self.weights.restore()
        return passes * runner.num_tokens

    def _prune_at_all_levels(self, index: int, projection: Projection, gram: Tensor) -> None:
        settings, linear = self.settings, projection.linear
        pruner = UnitPruner(linear.weight, gram, unit_size=projection.unit_size, damping=settings.damping)
        rounds = settings.attention_rounds if projection.kind == "attention" else settings.ffn_rounds
        for level in self.levels[index].all():
            weight, kept = pruner.prune(self.levels[index].removed(level), rounds=rounds)
            self.copies[index, level] = weight.cpu(), kept.cpu()

    def _propagate(self, runner: LayerRunner, layer: int, own: Mapping[int, Projection]) -> int:
        """Carry the outputs of a layer on to the next one; return how often the layer was run."""
        if self.settings.propagation != "mean":
            if self.settings.propagation == "expected":
                for index in own:
                    self.load(index, 0)
            runner.advance(layer)
            return 1
        levels = [self.levels[index] for index in own]
        span = range(min(of.lowest for of in levels), max(of.highest for of in levels) + 1)
        sums = [torch.zeros_like(hidden, dtype=torch.float32) for hidden in runner.inputs]
        total = 0.0
        for level in span:
            share = 0.0
            for index, projection in own.items():
                of = self.levels[index]
                nearest = min(max(level, of.lowest), of.highest)
                self.load(index, nearest)
                share += (1.0 - of.removed(nearest) / projection.num_units) / len(own)
            total += share
            for batch, accumulated in enumerate(sums):
                accumulated.add_(runner.call(layer, batch).float(), alpha=share)
        for batch, accumulated in enumerate(sums):
            runner.inputs[batch] = (accumulated / total).to(runner.inputs[batch].dtype)
        return len(span)


def evolve(
    modules: Sequence[Levels], fitness: Fitness, settings: TyrConfig, *, seed: int, title: str
) -> tuple[Allocation, list[float]]:
    """Search from the allocation of all zeros; return the best one, and its fitness after every generation.

    In each generation mutants of the one parent are judged stage by stage, fewer in each; in the last stage the parent
    joins, and the best becomes the parent, so that the fitness never increases. A fitness that is no number (a broken
    model) counts as infinite. Equal mutants are judged once.
    """
    generator = random.Random(seed)
    parent: Allocation = (0,) * len(modules)
    final = len(settings.survivors)
    known: dict[Allocation, float] = {}
    history: list[float] = []

    def judged(candidates: Sequence[Allocation], stage: int, generation: int) -> list[Allocation]:
        values = known if stage == final else {}
        for candidate in candidates:
            if candidate not in values:
                value = fitness(candidate, stage, generation)
                values[candidate] = math.inf if math.isnan(value) else value
        return sorted(candidates, key=lambda candidate: values[candidate])

    for generation in progress(range(settings.generations), title=title, unit="generation"):
        mutants = (mutant(parent, modules, settings.max_swaps, generator) for _ in range(settings.offspring))
        pool = list(dict.fromkeys(mutants))
        for stage, count in enumerate(settings.survivors):
            pool = judged(pool, stage, generation)[:count]
        parent = judged([parent, *pool], final, generation)[0]
        history.append(known[parent])
    return parent, history


def mutant(parent: Allocation, modules: Sequence[Levels], max_swaps: int, generator: random.Random) -> Allocation:
    """Return the parent after a few swaps, few ones more often; each raises one module and lowers another of its kind.

    Where nothing can be swapped, the parent itself is returned.
    """
    child = list(parent)
    for _ in range(min(generator.randint(1, max_swaps), generator.randint(1, max_swaps))):
        can_rise = [up for up, module in enumerate(modules) if child[up] < module.highest]
        can_fall = [down for down, module in enumerate(modules) if child[down] > module.lowest]
        partners = {up: [d for d in can_fall if d != up and modules[d].kind == modules[up].kind] for up in can_rise}
        possible = [up for up in can_rise if partners[up]]
        if not possible:
            break
        up = generator.choice(possible)
        child[up] += 1
        child[generator.choice(partners[up])] -= 1
    return tuple(child)


class TopKDivergence:
    """KL(dense || model) over the dense model's k largest logits of each token, renormalised over them.

    The logits of the dense model, for windows of text int64 `[N, T]`, are kept on its device. `tokens` counts what went
    through a model so far.

    Source: the fitness of Týr-the-Pruner's search.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, ids: Tensor, *, top_k: int, batch_size: int) -> None:
        self.ids = ids.to(next(model.parameters()).device)
        self._batch_size = batch_size
        self.tokens = 0
        values: list[Tensor] = []
        indices: list[Tensor] = []
        for rows in self.ids.split(batch_size):
            # The last token predicts nothing that is in the window.
            logits = self._logits(model, rows)[:, :-1]
            top = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
            values.append(top.values)
            indices.append(top.indices.int())
        self._values, self._indices = torch.cat(values), torch.cat(indices)

    def _logits(self, model: nn.Module, rows: Tensor) -> Tensor:
        self.tokens += rows.numel()
        return model(input_ids=rows, use_cache=False).logits

    @torch.no_grad()
    def of(self, model: nn.Module, rows: list[int] | None = None, length: int | None = None) -> float:
        """Return the divergence of the model with other weights, nats per token.

        `rows` are the windows to judge on, and `length` how many tokens of each count; None means all.
        """
        chosen = torch.tensor(range(len(self.ids)) if rows is None else rows, device=self.ids.device)
        length = self.ids.shape[1] if length is None else min(length, self.ids.shape[1])
        total = torch.zeros((), dtype=torch.float64, device=self.ids.device)
        for part in chosen.split(self._batch_size):
            logits = self._logits(model, self.ids[part, :length])[:, :-1].flatten(0, 1)
            values = self._values[part, : length - 1].flatten(0, 1)
            indices = self._indices[part, : length - 1].flatten(0, 1)
            for begin in range(0, len(logits), _ROWS_PER_CHUNK):
                rows_now = slice(begin, begin + _ROWS_PER_CHUNK)
                ours = logits[rows_now].gather(-1, indices[rows_now].long()).float().log_softmax(-1)
                wanted = values[rows_now].float().log_softmax(-1)
                total += functional.kl_div(ours, wanted, reduction="sum", log_target=True).double()
        return float(total / (len(chosen) * (length - 1)))


def _search_windows(blocks: TokenBlocks, settings: TyrConfig) -> Tensor:
    length, most = settings.search_window_length, settings.stage_tokens[-1]
    if most < max(settings.stage_tokens) or most < length:
        raise ConfigError(
            f"stage_tokens {settings.stage_tokens} must end with the largest number, and that must be at least one "
            f"window of search_window_length = {length} tokens"
        )
    # Another seed than calibration's, so that the search does not judge on the windows that were fitted.
    asked = ("stage_tokens", "search_window_length")
    return windows(blocks, count=most // length, length=length, seed=settings.seed + 1, settings=asked)


def _search(
    model: nn.Module, supernet: Supernet, judge: TopKDivergence, settings: TyrConfig, iteration: int
) -> tuple[Allocation, list[float]]:
    loaded: dict[int, int] = {}

    def fitness(allocation: Allocation, stage: int, generation: int) -> float:
        for index, level in enumerate(allocation):
            if loaded.get(index) != level:
                supernet.load(index, level)
                loaded[index] = level
        tokens, length = settings.stage_tokens[stage], settings.search_window_length
        if stage == len(settings.stage_tokens) - 1:
            return judge.of(model)
        # Every mutant of a generation is judged on the same windows, those of another generation on others.
        draw = random.Random(f"{settings.seed}/{iteration}/{generation}/{stage}")
        rows = draw.sample(range(len(judge.ids)), max(1, tokens // length))
        return judge.of(model, rows, min(tokens, length))

    try:
        title = f"tyr: search, {iteration + 1} of {settings.iterations}"
        return evolve(supernet.levels, fitness, settings, seed=settings.seed + iteration, title=title)
    finally:
        supernet.weights.restore()


def _decision(supernet: Supernet, best: Allocation, effort: Effort, notes: list[dict[str, Any]]) -> Decision:
    sublayers: list[Half] = []
    tensors: dict[str, Tensor] = {}
    replaced: dict[str, Tensor] = {}
    for index, (projection, removed) in enumerate(zip(supernet.projections, supernet.removed(best), strict=True)):
        weight, kept = supernet.copies[index, best[index]]
        if removed == 0:
            sublayers.append(Dense())
        elif removed == projection.num_units and projection.linear.bias is None:
            sublayers.append(Skipped())
        else:
            grouping = Grouping(projection.linear.in_features, projection.unit_size)
            sublayers.append(Kept(grouping=grouping, kept=int(kept.sum())))
            tensors[scale_name(projection.layer, projection.kind)] = kept.float()
            replaced[supernet.weights.name(projection.linear)] = weight
    pairs = zip(sublayers[::2], sublayers[1::2], strict=True)
    return Decision(
        plan=Plan(tuple(LayerPlan(attention=attention, ffn=ffn) for attention, ffn in pairs)),
        tensors=tensors,
        weights=replaced,
        effort=effort,
        notes={"iterations": notes},
        deviations=(*_DEVIATIONS, _PROPAGATION[supernet.settings.propagation]),
    )
