"""SparseGPT: zeros chosen by their second-order cost, column after column, with the rest of the row taking over.

Written over the machinery of this package; no pruning library is used. Source: Frantar and Alistarh, "SparseGPT:
Massive Language Models Can Be Accurately Pruned in One-Shot", ICML 2023.
"""

from typing import cast

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBlocks
from wide.errors import ConfigError
from wide.methods.catalogue import SparseGPTConfig
from wide.methods.method import Decision, Target
from wide.methods.second_order import GramAccumulator, cholesky_factor, damped, inverse
from wide.methods.unstructured import (
    Sample,
    SemiStructured,
    Statistic,
    count_of,
    dense_plan,
    lowest,
    lowest_of_pattern,
    parse_pattern,
    prune_matrices,
)
from wide.models.discovery import discover


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
        damping: Share of the mean diagonal added to the diagonal.
        block_size: Columns whose zeros are chosen together, and after which the error is passed on.
        pattern: N of M consecutive inputs instead.

    Raises:
        ConfigError: If the inputs' products are singular despite the damping.
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


def decide(model: nn.Module, blocks: TokenBlocks, target: Target, settings: SparseGPTConfig) -> Decision:
    """Decide which weights become zero and what the others become; both measures of the target are the same here.

    Raises:
        UnsupportedModelError: If a projection is no plain linear layer.
        ConfigError: If the pattern contradicts the target or the block size.
        ShapeError: If a width is no multiple of the pattern.
    """
    if target.sparsity == 0.0:
        return Decision(plan=dense_plan(len(discover(model))))
    pattern = parse_pattern(settings.pattern, target.sparsity)
    if pattern is not None and settings.block_size != 1 and settings.block_size % pattern.of:
        raise ConfigError(
            f"block_size {settings.block_size} cuts runs of {pattern.of} inputs in two; choose a multiple of "
            f"{pattern.of}, or 1"
        )

    def prune(weight: Tensor, seen: Statistic) -> Tensor:
        products = cast(GramAccumulator, seen)
        return prune_with_updates(
            weight,
            products.matrix * (2.0 / products.rows),
            target.sparsity,
            damping=settings.damping,
            block_size=settings.block_size,
            pattern=pattern,
        )

    return prune_matrices(
        model,
        blocks,
        title="sparsegpt",
        sample=Sample(
            num_windows=settings.num_windows,
            window_length=settings.window_length,
            batch_size=settings.batch_size,
            seed=settings.seed,
        ),
        pattern=pattern,
        statistic=lambda linear: GramAccumulator(linear.in_features, device=linear.weight.device),
        prune=prune,
    )
