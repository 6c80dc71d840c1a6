"""Wanda: zeros where weight magnitude times input norm is least within an output row; no update of what is kept.

Written over the machinery of this package; no pruning library is used. Source: Sun et al., "A Simple and Effective
Pruning Approach for Large Language Models", ICLR 2024.
"""

from typing import cast

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBlocks
from wide.methods.catalogue import WandaConfig
from wide.methods.method import Decision, Target
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


class InputEnergy:
    """Sums the squares of every input channel over all tokens, float64.

    Args:
        width: Channels, C.
        device: Where the sums lie.

    Attributes:
        squares: The sums so far, `[C]`.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        """Start at zero."""
        self.squares = torch.zeros(width, dtype=torch.float64, device=device)

    def add(self, inputs: Tensor) -> None:
        """Add tokens `[..., C]`."""
        self.squares += inputs.detach().flatten(0, -2).float().square().sum(0, dtype=torch.float64)


def prune_by_activation(
    weight: Tensor, squares: Tensor, sparsity: float, pattern: SemiStructured | None = None
) -> Tensor:
    """Return `weight` with zeros where |weight| * input norm is least.

    Args:
        weight: `[out, in]`.
        squares: Sum of squares of each input channel, `[in]`.
        sparsity: Share of each row that becomes zero, without a pattern.
        pattern: N of M consecutive inputs instead.
    """
    scores = weight.abs() * squares.sqrt().to(weight.dtype)
    if pattern is not None:
        return weight.masked_fill(lowest_of_pattern(scores, pattern), 0.0)
    return weight.masked_fill(lowest(scores, count_of(sparsity, weight.shape[1])), 0.0)


def decide(model: nn.Module, blocks: TokenBlocks, target: Target, settings: WandaConfig) -> Decision:
    """Decide which weights become zero; both measures of the target are the same here.

    Raises:
        UnsupportedModelError: If a projection is no plain linear layer.
        ConfigError: If the pattern and the target contradict.
        ShapeError: If a width is no multiple of the pattern.
    """
    if target.sparsity == 0.0:
        return Decision(plan=dense_plan(len(discover(model))))
    pattern = parse_pattern(settings.pattern, target.sparsity)

    def prune(weight: Tensor, seen: Statistic) -> Tensor:
        return prune_by_activation(weight, cast(InputEnergy, seen).squares, target.sparsity, pattern)

    return prune_matrices(
        model,
        blocks,
        title="wanda",
        sample=Sample(
            num_windows=settings.num_windows,
            window_length=settings.window_length,
            batch_size=settings.batch_size,
            seed=settings.seed,
        ),
        pattern=pattern,
        statistic=lambda linear: InputEnergy(linear.in_features, linear.weight.device),
        prune=prune,
    )
