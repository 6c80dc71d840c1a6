"""What rows that zero single weights share: the pattern, the count, and the walk over layers and matrices."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBlocks
from wide.data.progress import progress
from wide.errors import ConfigError, ShapeError
from wide.methods.calibration import windows
from wide.methods.edited_weights import EditedWeights
from wide.methods.layer_runner import LayerRunner
from wide.methods.method import Decision, Effort, feed_forward
from wide.models.block_spec import BlockSpec
from wide.models.discovery import discover
from wide.models.observe import judging
from wide.plan import Dense, LayerPlan, Plan


@dataclass(frozen=True, slots=True)
class SemiStructured:
    """`keep` weights of every `of` consecutive inputs are kept, as sparse tensor cores want it."""

    keep: int
    of: int

    @property
    def prune(self) -> int:
        """Weights pruned of every `of`."""
        return self.of - self.keep


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Calibration text of a method.

    Args:
        num_windows: Windows of text.
        window_length: Tokens in a window.
        batch_size: Windows in a micro-batch.
        seed: Of the choice of windows.
    """

    num_windows: int
    window_length: int
    batch_size: int
    seed: int


class Statistic(Protocol):
    """What a method measures on the inputs of a matrix."""

    def add(self, inputs: Tensor) -> None:
        """Add tokens `[..., C]`."""
        ...


def parse_pattern(text: str, sparsity: float) -> SemiStructured | None:
    """Return the pattern that a setting names, None for 'unstructured'.

    Args:
        text: 'unstructured' or 'N:M' with 0 < N < M.
        sparsity: The target, which an N:M pattern fixes at 1 - N/M.

    Raises:
        ConfigError: If the text is neither, or the target is another one than the pattern's.
    """
    if text == "unstructured":
        return None
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or not 0 < int(found[1]) < int(found[2]):
        raise ConfigError(f"pattern must be 'unstructured' or 'N:M' with 0 < N < M such as '2:4', got {text!r}")
    pattern = SemiStructured(int(found[1]), int(found[2]))
    if abs(pattern.prune / pattern.of - sparsity) > 1e-9:
        raise ConfigError(
            f"pattern {text!r} prunes {pattern.prune / pattern.of:g} of the weights, the target is {sparsity:g}; set "
            "the target to that, or the pattern to 'unstructured'"
        )
    return pattern


def count_of(share: float, number: int) -> int:
    """Return how many of `number` weights a share is, rounded down, blind to the last digit of the share."""
    return int(share * number + 1e-6)


def lowest(scores: Tensor, count: int) -> Tensor:
    """Return True for the `count` lowest entries along the last dimension, exactly, the first of equals first.

    Args:
        scores: `[..., C]`.
        count: In [0, C].
    """
    order = scores.argsort(dim=-1, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def lowest_of_pattern(scores: Tensor, pattern: SemiStructured) -> Tensor:
    """Return True for the lowest entries of every run of consecutive entries, as many as the pattern prunes.

    Args:
        scores: `[..., C]`, C a multiple of `pattern.of`.
        pattern: How many of how many are kept.
    """
    runs = scores.unflatten(-1, (-1, pattern.of))
    return lowest(runs, pattern.prune).flatten(-2)


def prune_matrices(
    model: nn.Module,
    blocks: TokenBlocks,
    *,
    title: str,
    sample: Sample,
    pattern: SemiStructured | None,
    statistic: Callable[[nn.Linear], Statistic],
    prune: Callable[[Tensor, Statistic], Tensor],
) -> Decision:
    """Prune all matrices of all decoder layers, layer after layer, each on the outputs of the pruned ones before it.

    Args:
        model: The model; its weights are as before on return.
        blocks: Calibration text.
        title: Name of the row, for the progress bar.
        sample: How much of the text.
        pattern: For the check of the widths.
        statistic: Makes what observes the inputs of a matrix; matrices that read the same input share it.
        prune: From a weight, float32 `[out, in]`, and what was observed to the weight with zeros.

    Returns:
        A decision whose plan is dense and whose weights hold the zeros.

    Raises:
        UnsupportedModelError: If a projection is no plain linear layer.
        ShapeError: If a width is no multiple of the pattern.
    """
    specs = discover(model)
    ids = windows(blocks, count=sample.num_windows, length=sample.window_length, seed=sample.seed)
    with judging(model), EditedWeights(model) as weights:
        groups = [_matrices(weights, spec, pattern) for spec in specs]
        runner = LayerRunner(model, specs, ids, batch_size=sample.batch_size)
        for spec in progress(specs, title=f"{title}: layers", total=len(specs), unit="layer"):
            statistics = [statistic(linears[0]) for linears in groups[spec.index]]
            runner.observe(spec.index, {g[0]: seen.add for g, seen in zip(groups[spec.index], statistics, strict=True)})
            for linears, seen in zip(groups[spec.index], statistics, strict=True):
                for linear in linears:
                    weights.set(linear, prune(linear.weight.detach().float(), seen))
            runner.advance(spec.index)
        replaced = weights.replaced()
    zeros = sum(int((weight == 0).sum()) for weight in replaced.values())
    return Decision(
        plan=dense_plan(len(specs)),
        weights=replaced,
        # One pass observes the layer as it is, one carries the pruned layer's outputs on.
        effort=Effort(tokens_forward=2 * ids.numel()),
        notes={"zeros": zeros, "zero_share": zeros / sum(weight.numel() for weight in replaced.values())},
        deviations=("calibrated on the benchmark's corpus, the original on C4",),
    )


def dense_plan(num_layers: int) -> Plan:
    """Return the plan that leaves every half-layer as it is."""
    return Plan(tuple(LayerPlan(attention=Dense(), ffn=Dense()) for _ in range(num_layers)))


def _matrices(weights: EditedWeights, spec: BlockSpec, pattern: SemiStructured | None) -> list[list[nn.Linear]]:
    """Return the matrices of a layer, those that read the same input together."""
    attention, ffn = spec.attention, feed_forward(spec)
    groups: list[list[nn.Module | None]] = [
        [attention.query, attention.key, attention.value],
        [attention.output],
        [ffn.gate, ffn.up],
        [ffn.down],
    ]
    where = f"layer {spec.index}: a projection"
    linears = [[weights.linear(module, where) for module in group if module is not None] for group in groups]
    for first in (group[0] for group in linears):
        if pattern is not None and first.in_features % pattern.of:
            raise ShapeError(
                f"layer {spec.index}: {first.in_features} inputs are no multiple of {pattern.of}, so the pattern "
                f"{pattern.keep}:{pattern.of} does not fit; use 'unstructured'"
            )
    return linears
