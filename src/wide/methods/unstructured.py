"""Wanda and SparseGPT: single weights become zero, in any place or N of every M, layer after layer.

Wanda zeros what has the least magnitude times input norm in its output row and updates nothing; SparseGPT chooses by
second-order cost, column after column, and lets the rest of the row take over.

Sources: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", ICLR 2024; Frantar and
Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", ICML 2023.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBlocks
from wide.data.progress import progress
from wide.errors import ConfigError, ShapeError
from wide.methods.calibration import calibration_windows
from wide.methods.catalogue import Calibrated, SparseGPTConfig, WandaConfig
from wide.methods.layer_runner import EditedWeights, LayerRunner
from wide.methods.method import Decision, Effort, Target, dense_plan
from wide.methods.second_order import GramAccumulator, cholesky_factor, damped, inverse
from wide.models.block_spec import BlockSpec, feed_forward, plain_linear
from wide.models.discovery import discover
from wide.models.observe import judging


@dataclass(frozen=True, slots=True)
class SemiStructured:
    """`keep` weights of every `of` consecutive inputs are kept, as sparse tensor cores want it."""

    keep: int
    of: int

    @property
    def prune(self) -> int:
        """Weights pruned of every `of`."""
        return self.of - self.keep


def parse_pattern(text: str, sparsity: float) -> SemiStructured | None:
    """Return the pattern that a setting names ('N:M' with 0 < N < M), None for 'unstructured'.

    Raises ConfigError if the text is neither, or the target is not the 1 - N/M that the pattern fixes.
    """
    if text == "unstructured":
        return None
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or not 0 < int(found[1]) < int(found[2]):
        raise ConfigError(f"pattern must be 'unstructured' or 'N:M' with 0 < N < M such as '2:4', got {text!r}")
    pattern = SemiStructured(int(found[1]), int(found[2]))
    if abs(pattern.prune / pattern.of - sparsity) > 1e-9:
        raise ConfigError(f"pattern {text!r} needs a target of {pattern.prune / pattern.of:g}, not {sparsity:g}")
    return pattern


def count_of(share: float, number: int) -> int:
    """Return how many of `number` weights a share is, rounded down, blind to the last digit of the share."""
    return int(share * number + 1e-6)


def lowest(scores: Tensor, count: int) -> Tensor:
    """Return True for the `count` lowest entries along the last dimension of `[..., C]`, the first of equals first."""
    order = scores.argsort(dim=-1, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def lowest_of_pattern(scores: Tensor, pattern: SemiStructured) -> Tensor:
    """Return True for the lowest of every run of `pattern.of` entries of `[..., C]`, as many as the pattern prunes."""
    runs = scores.unflatten(-1, (-1, pattern.of))
    return lowest(runs, pattern.prune).flatten(-2)


class InputEnergy:
    """Sums the squares of every input channel over all tokens: `squares`, float64 `[C]`."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.squares = torch.zeros(width, dtype=torch.float64, device=device)

    def add(self, inputs: Tensor) -> None:
        """Add tokens `[..., C]`."""
        self.squares += inputs.detach().flatten(0, -2).float().square().sum(0, dtype=torch.float64)


def prune_by_activation(
    weight: Tensor, squares: Tensor, sparsity: float, pattern: SemiStructured | None = None
) -> Tensor:
    """Return `weight` `[out, in]` with zeros where |weight| * input norm is least.

    `squares` are the sums of squares of the input channels, `[in]`. A share `sparsity` of each row becomes zero, or
    what the pattern prunes of its consecutive inputs.
    """
    scores = weight.abs() * squares.sqrt().to(weight.dtype)
    if pattern is not None:
        return weight.masked_fill(lowest_of_pattern(scores, pattern), 0.0)
    return weight.masked_fill(lowest(scores, count_of(sparsity, weight.shape[1])), 0.0)


def prune_with_updates(
    weight: Tensor,
    gram: Tensor,
    sparsity: float,
    *,
    damping: float,
    block_size: int,
    pattern: SemiStructured | None = None,
) -> Tensor:
    """Return a weight with zeros, the kept entries of each row updated to make up for them.

    Args:
        weight: `[out, in]`, float32 or float64.
        gram: Sum or mean of `x^T x` over the inputs, `[in, in]`, in the same dtype.
        sparsity: Share of each block of columns that becomes zero, without a pattern.
        damping: Share of the mean diagonal added to the diagonal; ConfigError if the products stay singular despite it.
        block_size: Columns whose zeros are chosen together, and after which the error is passed on.
    """
    weight, gram = weight.clone(), gram.clone()
    dead = gram.diagonal() == 0
    gram.diagonal()[dead] = 1.0
    weight[:, dead] = 0.0
    upper = cholesky_factor(inverse(damped(gram, damping))).T
    pruned = torch.zeros_like(weight, dtype=torch.bool)
    for begin in range(0, weight.shape[1], block_size):
        block = slice(begin, min(begin + block_size, weight.shape[1]))
        if pattern is None:
            costs = (weight[:, block] / upper.diagonal()[block]).square()
            pruned[:, block] = lowest(costs.flatten(), count_of(sparsity, costs.numel())).view_as(costs)
        errors = _prune_columns(weight, pruned, upper, block, pattern)
        weight[:, block.stop :] -= errors @ upper[block, block.stop :]
    return weight


def _prune_columns(
    weight: Tensor, pruned: Tensor, upper: Tensor, block: slice, pattern: SemiStructured | None
) -> Tensor:
    """Prune the columns of a block in place; return the scaled error of each, `[out, columns of the block]`."""
    scale = upper.diagonal()
    errors = torch.zeros_like(weight[:, block])
    for column in range(block.start, block.stop):
        if pattern is not None and column % pattern.of == 0:
            run = slice(column, column + pattern.of)
            pruned[:, run] = lowest_of_pattern((weight[:, run] / scale[run]).square(), pattern)
        kept = weight[:, column].masked_fill(pruned[:, column], 0.0)
        error = (weight[:, column] - kept) / scale[column]
        weight[:, column] = kept
        weight[:, column + 1 : block.stop] -= torch.outer(error, upper[column, column + 1 : block.stop])
        errors[:, column - block.start] = error
    return errors


_Seen = TypeVar("_Seen", InputEnergy, GramAccumulator)


def decide_by_activation(model: nn.Module, blocks: TokenBlocks, target: Target, settings: WandaConfig) -> Decision:
    """Decide by Wanda which weights become zero; both measures of the target are the same here.

    Raises UnsupportedModelError if a projection is no plain linear layer, ConfigError if the pattern and the target
    contradict, and ShapeError if a width is no multiple of the pattern.
    """
    pattern = parse_pattern(settings.pattern, target.sparsity)

    def prune(weight: Tensor, seen: InputEnergy) -> Tensor:
        return prune_by_activation(weight, seen.squares, target.sparsity, pattern)

    return _prune_matrices(model, blocks, settings, pattern, InputEnergy, prune, title="wanda: layers")


def decide_with_updates(model: nn.Module, blocks: TokenBlocks, target: Target, settings: SparseGPTConfig) -> Decision:
    """Decide by SparseGPT which weights become zero and what the others become; errors are those of Wanda.

    Raises ConfigError, too, if the pattern contradicts the block size.
    """
    pattern = parse_pattern(settings.pattern, target.sparsity)
    if pattern is not None and settings.block_size != 1 and settings.block_size % pattern.of:
        raise ConfigError(f"block_size {settings.block_size} cuts runs; use a multiple of {pattern.of}, or 1")

    def prune(weight: Tensor, seen: GramAccumulator) -> Tensor:
        gram, size = seen.matrix * (2.0 / seen.rows), settings.block_size
        return prune_with_updates(
            weight, gram, target.sparsity, damping=settings.damping, block_size=size, pattern=pattern
        )

    return _prune_matrices(model, blocks, settings, pattern, GramAccumulator, prune, title="sparsegpt: layers")


def _prune_matrices(
    model: nn.Module,
    blocks: TokenBlocks,
    settings: Calibrated,
    pattern: SemiStructured | None,
    observe: Callable[..., _Seen],
    prune: Callable[[Tensor, _Seen], Tensor],
    *,
    title: str,
) -> Decision:
    """Prune all matrices of all decoder layers, layer after layer, each on the outputs of the pruned ones before it.

    `observe` makes what observes inputs of a width; matrices that read the same input share it. `prune` makes of a
    weight, float32 `[out, in]`, and what was observed the weight with zeros. The model's weights are as before on
    return.
    """
    specs = discover(model)
    ids = calibration_windows(blocks, settings)
    with judging(model), EditedWeights(model) as weights:
        groups = [_matrices(spec, pattern) for spec in specs]
        runner = LayerRunner(model, specs, ids, batch_size=settings.batch_size)
        for spec in progress(specs, title=title, unit="layer"):
            firsts = [linears[0] for linears in groups[spec.index]]
            statistics = [observe(first.in_features, device=first.weight.device) for first in firsts]
            runner.observe(spec.index, {first: seen.add for first, seen in zip(firsts, statistics, strict=True)})
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


def _matrices(spec: BlockSpec, pattern: SemiStructured | None) -> list[list[nn.Linear]]:
    attention, ffn = spec.attention, feed_forward(spec)
    groups: list[list[nn.Module | None]] = [
        [attention.query, attention.key, attention.value],
        [attention.output],
        [ffn.gate, ffn.up],
        [ffn.down],
    ]
    linears = [[plain_linear(module, spec.index) for module in group if module is not None] for group in groups]
    for first in (group[0] for group in linears):
        if pattern is not None and first.in_features % pattern.of:
            raise ShapeError(
                f"layer {spec.index}: {first.in_features} inputs are no multiple of {pattern.of}, so the pattern "
                f"{pattern.keep}:{pattern.of} does not fit; use 'unstructured'"
            )
    return linears
