"""Copies of every output projection at several sparsities, made on inputs that already carry the error of pruning.

Source: Týr-the-Pruner, section on the supernet with accumulated errors.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wide.data.progress import progress
from wide.methods.allocation import Range
from wide.methods.catalogue import TyrConfig
from wide.methods.edited_weights import EditedWeights
from wide.methods.layer_runner import LayerRunner
from wide.methods.method import feed_forward
from wide.methods.second_order import GramAccumulator
from wide.methods.unit_pruning import UnitPruner
from wide.models.block_spec import BlockSpec

Kind = Literal["attention", "ffn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """The output projection of a half-layer, whose input channels are pruned in units.

    Args:
        layer: Index of the decoder layer.
        kind: Which half.
        linear: o_proj or down_proj.
        unit_size: Channels in a unit: a query head, or one FFN channel.
    """

    layer: int
    kind: Kind
    linear: nn.Linear
    unit_size: int

    @property
    def num_units(self) -> int:
        """Heads or channels."""
        return self.linear.in_features // self.unit_size


def projections(specs: Sequence[BlockSpec], weights: EditedWeights) -> list[Projection]:
    """Return the output projections of all layers, attention before FFN.

    Raises:
        UnsupportedModelError: If one is no plain linear layer.
    """
    found = []
    for spec in specs:
        halves: tuple[tuple[Kind, nn.Module, int], ...] = (
            ("attention", spec.attention.output, spec.attention.head_dim),
            ("ffn", feed_forward(spec).down, 1),
        )
        for kind, module, unit_size in halves:
            linear = weights.linear(module, f"layer {spec.index}: the output projection of the {kind}")
            found.append(Projection(layer=spec.index, kind=kind, linear=linear, unit_size=unit_size))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """The numbers of removed units at which a projection has copies: `expected + level * step`.

    Args:
        expected: Removed units at level 0.
        step: Units between neighbouring levels.
        allowed: The levels that exist, 0 among them.
    """

    expected: int
    step: int
    allowed: Range

    @classmethod
    def around(cls, expected: int, *, step: int, num_units: int, per_side: int, kind: Kind) -> "Levels":
        """Return up to `per_side` levels on each side of `expected`, as far as units last."""
        lowest = -min(per_side, expected // step)
        highest = min(per_side, (num_units - expected) // step)
        return cls(expected=expected, step=step, allowed=Range(kind=kind, lowest=lowest, highest=highest))

    def all(self) -> range:
        """Return the levels, ascending."""
        return range(self.allowed.lowest, self.allowed.highest + 1)

    def removed(self, level: int) -> int:
        """Return how many units are removed at a level."""
        return self.expected + level * self.step


class Copies:
    """Pruned weights by (projection, level), in CPU memory or in a temporary folder that goes with the `with` block.

    Args:
        folder: Where the temporary folder is made; None keeps the copies in memory.
    """

    def __init__(self, folder: str | None) -> None:
        """Make the folder."""
        self._memory: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._folder = None if folder is None else tempfile.TemporaryDirectory(dir=folder)

    def __enter__(self) -> "Copies":
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Drop the copies."""
        self._memory.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def put(self, projection: int, level: int, weight: Tensor, kept: Tensor) -> None:
        """Keep a copy.

        Args:
            projection: Its index.
            level: Its level.
            weight: `[out, in]`.
            kept: Bool `[units]`.
        """
        tensors = {"weight": weight.cpu(), "kept": kept.cpu()}
        if self._folder is None:
            self._memory[projection, level] = tensors
        else:
            save_file(tensors, self._path(projection, level))

    def get(self, projection: int, level: int) -> tuple[Tensor, Tensor]:
        """Return (weight, kept) on the CPU."""
        held = self._memory.get((projection, level))
        tensors = load_file(self._path(projection, level)) if held is None else held
        return tensors["weight"], tensors["kept"]

    def _path(self, projection: int, level: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"{projection}.{level}.safetensors"


def fill(
    copies: Copies,
    runner: LayerRunner,
    targets: Sequence[Projection],
    levels: Sequence[Levels],
    weights: EditedWeights,
    settings: TyrConfig,
) -> int:
    """Make the copies of all projections, layer after layer; the weights of the model are dense before and after.

    The two projections of a layer do not see each other's pruning, those of later layers do.

    Args:
        copies: Receives them.
        runner: At the first layer; used up.
        targets: Output projections, attention and FFN of each layer in order.
        levels: Of each projection.
        weights: Edits the model.
        settings: Of the method.

    Returns:
        Tokens that went through all layers.
    """
    passes = 0
    for spec in progress(runner.specs, title="tyr: layers", total=len(runner.specs), unit="layer"):
        own = {index: target for index, target in enumerate(targets) if target.layer == spec.index}
        grams = {
            index: GramAccumulator(target.linear.in_features, device=target.linear.weight.device)
            for index, target in own.items()
        }
        runner.observe(spec.index, {target.linear: grams[index].add for index, target in own.items()})
        for index, target in own.items():
            _prune_at_all_levels(copies, index, target, levels[index], grams.pop(index).matrix, settings)
        passes = 1 + _propagate(copies, runner, own, {index: levels[index] for index in own}, weights, settings)
    weights.restore()
    return passes * runner.num_tokens


def _prune_at_all_levels(
    copies: Copies, index: int, target: Projection, levels: Levels, gram: Tensor, settings: TyrConfig
) -> None:
    pruner = UnitPruner(target.linear.weight, gram, unit_size=target.unit_size, damping=settings.damping)
    rounds = settings.attention_rounds if target.kind == "attention" else settings.ffn_rounds
    for level in levels.all():
        copies.put(index, level, *pruner.prune(levels.removed(level), rounds=rounds, score=settings.score))


def _propagate(
    copies: Copies,
    runner: LayerRunner,
    own: Mapping[int, Projection],
    levels: Mapping[int, Levels],
    weights: EditedWeights,
    settings: TyrConfig,
) -> int:
    """Carry the outputs of a layer's copies on to the next layer; return how often the layer was run."""
    layer = next(iter(own.values())).layer
    if settings.propagation == "expected":
        for index, target in own.items():
            weights.set(target.linear, copies.get(index, 0)[0])
        runner.advance(layer)
        return 1
    span = range(min(min(of.all()) for of in levels.values()), max(max(of.all()) for of in levels.values()) + 1)
    sums = [torch.zeros_like(hidden, dtype=torch.float32) for hidden in runner.inputs]
    total = 0.0
    for level in span:
        share = 0.0
        for index, target in own.items():
            nearest = min(max(level, levels[index].allowed.lowest), levels[index].allowed.highest)
            weights.set(target.linear, copies.get(index, nearest)[0])
            share += (1.0 - levels[index].removed(nearest) / target.num_units) / len(own)
        total += share
        for batch, accumulated in enumerate(sums):
            accumulated.add_(runner.call(layer, batch).float(), alpha=share)
    for batch, accumulated in enumerate(sums):
        runner.inputs[batch] = (accumulated / total).to(runner.inputs[batch].dtype)
    return len(span)
