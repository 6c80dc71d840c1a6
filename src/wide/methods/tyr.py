"""Týr-the-Pruner: local second-order pruning at several sparsities, and a search for how to spread them over layers.

Each iteration starts from the dense weights: every attention and FFN output projection is pruned to nine levels around
its expected sparsity, on inputs that carry the error of the layers before it; an evolutionary search then picks a level
for each, with the totals of heads and of channels held. The levels found are expected in the next iteration, whose
levels lie half as far apart.

Source: Li et al., "Týr-the-Pruner: Structural Pruning LLMs via Global Sparsity Distribution Optimization", NeurIPS
2025.
"""

import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from wide.data.batches import TokenBlocks
from wide.errors import ConfigError
from wide.grouping import Grouping
from wide.methods.allocation import Allocation, Evolution, evolve
from wide.methods.calibration import windows
from wide.methods.catalogue import TyrConfig
from wide.methods.edited_weights import EditedWeights
from wide.methods.layer_runner import LayerRunner
from wide.methods.method import Decision, Effort, Target, width_share
from wide.methods.supernet import Copies, Levels, Projection, fill, projections
from wide.methods.topk_divergence import TopKDivergence
from wide.models.discovery import discover
from wide.models.observe import judging
from wide.plan import Dense, Half, Kept, LayerPlan, Plan, Skipped

_DEVIATIONS = (
    "calibrated on the benchmark's corpus, the original on FineWeb-Edu",
    "numbers of heads and channels that do not divide are spread over layers so that the totals are exact; the "
    "original rounds up what each layer removes",
    "levels that would leave [0, 1] do not exist; the original clips them",
)


def decide(model: nn.Module, blocks: TokenBlocks, target: Target, settings: TyrConfig) -> Decision:
    """Decide which heads and channels go in which layer, and what the output projections become.

    Raises:
        UnsupportedModelError: If an output projection is no plain linear layer, or a layer has no FFN to prune.
        ConfigError: If the target cannot be reached, or a window does not fit the calibration text.
    """
    specs = discover(model)
    share = width_share(specs, target)
    if share == 0.0:
        return Decision(plan=Plan(tuple(LayerPlan(attention=Dense(), ffn=Dense()) for _ in specs)))
    ids = windows(blocks, count=settings.num_windows, length=settings.window_length, seed=settings.seed)
    effort = Effort()
    with judging(model), EditedWeights(model) as weights, Copies(settings.copies_folder) as copies:
        targets = projections(specs, weights)
        divergence = TopKDivergence(
            model, _search_windows(blocks, settings), top_k=settings.top_k, batch_size=settings.search_batch_size
        )
        expected = initial_budget(targets, share)
        notes: list[dict[str, Any]] = []
        for iteration in range(settings.iterations):
            levels = levels_of(targets, expected, iteration, settings)
            runner = LayerRunner(model, specs, ids, batch_size=settings.batch_size)
            effort.tokens_forward += fill(copies, runner, targets, levels, weights, settings)
            found = _search(model, targets, levels, copies, weights, divergence, settings, iteration)
            expected = [of.removed(level) for of, level in zip(levels, found.best, strict=True)]
            notes.append({"removed": list(expected), "divergence": list(found.history)})
        effort.tokens_forward += divergence.tokens
        return _decision(targets, expected, found.best, copies, weights, effort, {"iterations": notes})


def initial_budget(targets: Sequence[Projection], share: float) -> list[int]:
    """Return the units that each projection starts without: the same share everywhere, exact in total for each kind."""
    seen = {"attention": 0, "ffn": 0}
    budget = []
    for projection in targets:
        before = seen[projection.kind]
        seen[projection.kind] += projection.num_units
        budget.append(int(share * seen[projection.kind] + 0.5) - int(share * before + 0.5))
    return budget


def levels_of(
    targets: Sequence[Projection], expected: Sequence[int], iteration: int, settings: TyrConfig
) -> list[Levels]:
    """Return the levels of each projection in an iteration, from 0; one step for all projections of a kind."""
    steps = {}
    for kind, least in (("attention", settings.min_head_step), ("ffn", settings.min_channel_step)):
        units = [projection.num_units for projection in targets if projection.kind == kind]
        steps[kind] = max(least, round(settings.first_step / 2**iteration * sum(units) / len(units)))
    return [
        Levels.around(
            removed,
            step=steps[projection.kind],
            num_units=projection.num_units,
            per_side=settings.levels_per_side,
            kind=projection.kind,
        )
        for projection, removed in zip(targets, expected, strict=True)
    ]


def _search_windows(blocks: TokenBlocks, settings: TyrConfig) -> Tensor:
    length, most = settings.search_window_length, settings.stage_tokens[-1]
    if most < max(settings.stage_tokens) or most < length:
        raise ConfigError(
            f"stage_tokens {settings.stage_tokens} must end with the largest number, and that must be at least one "
            f"window of search_window_length = {length} tokens"
        )
    # Another seed than calibration's, so that the search does not judge on the windows that were fitted.
    return windows(blocks, count=most // length, length=length, seed=settings.seed + 1)


def _search(
    model: nn.Module,
    targets: Sequence[Projection],
    levels: Sequence[Levels],
    copies: Copies,
    weights: EditedWeights,
    divergence: TopKDivergence,
    settings: TyrConfig,
    iteration: int,
) -> Evolution:
    loaded: dict[int, int] = {}

    def load(allocation: Allocation) -> None:
        for index, level in enumerate(allocation):
            if loaded.get(index) != level:
                weights.set(targets[index].linear, copies.get(index, level)[0])
                loaded[index] = level

    def fitness(allocation: Allocation, stage: int, generation: int) -> float:
        load(allocation)
        tokens, length = settings.stage_tokens[stage], settings.search_window_length
        if stage == len(settings.stage_tokens) - 1:
            return divergence.of(model)
        # Every mutant of a generation is judged on the same windows, those of another generation on others.
        draw = random.Random(f"{settings.seed}/{iteration}/{generation}/{stage}")
        rows = draw.sample(range(divergence.num_windows), max(1, tokens // length))
        return divergence.of(model, rows, min(tokens, length))

    try:
        return evolve(
            [of.allowed for of in levels],
            fitness,
            generations=settings.generations,
            offspring=settings.offspring,
            max_swaps=settings.max_swaps,
            survivors=settings.survivors,
            seed=settings.seed + iteration,
            title=f"tyr: search {iteration + 1} of {settings.iterations}",
        )
    finally:
        weights.restore()


def _decision(
    targets: Sequence[Projection],
    removed: Sequence[int],
    best: Allocation,
    copies: Copies,
    weights: EditedWeights,
    effort: Effort,
    notes: dict[str, Any],
) -> Decision:
    halves: list[Half] = []
    tensors: dict[str, Tensor] = {}
    replaced: dict[str, Tensor] = {}
    for index, projection in enumerate(targets):
        weight, kept = copies.get(index, best[index])
        if removed[index] == 0:
            halves.append(Dense())
        elif removed[index] == projection.num_units and projection.linear.bias is None:
            halves.append(Skipped())
        else:
            grouping = Grouping(projection.linear.in_features, projection.unit_size)
            halves.append(Kept(grouping=grouping, kept=int(kept.sum())))
            tensors[f"layers.{projection.layer}.{projection.kind}.scale"] = kept.float()
            replaced[weights.name(projection.linear)] = weight
    pairs = zip(halves[::2], halves[1::2], strict=True)
    return Decision(
        plan=Plan(tuple(LayerPlan(attention=attention, ffn=ffn) for attention, ffn in pairs)),
        tensors=tensors,
        weights=replaced,
        effort=effort,
        notes=notes,
        deviations=_DEVIATIONS,
    )
