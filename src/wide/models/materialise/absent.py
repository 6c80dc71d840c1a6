"""What stands where a half-layer was: modules that add nothing (or the bias that is all of it) and cost nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class AbsentAttention(nn.Module):
    """Stands where an attention was.

    Args:
        layer_index: Its place in the cache.
        counts_tokens: Whether the model asks this layer of the cache how many tokens it holds; one number per token
            is then kept there.
        bias: What a pruned attention still adds, `[D]`; None for nothing.
    """

    def __init__(self, layer_index: int, *, counts_tokens: bool, bias: Tensor | None = None) -> None:
        """Hold the bias, if any, as a parameter."""
        super().__init__()
        self.layer_idx = layer_index
        self.counts_tokens = counts_tokens
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(
        self, hidden_states: Tensor, *_args: Any, past_key_values: Any = None, **_kwargs: Any
    ) -> tuple[Tensor, None]:
        """Return what is added to the residual stream, `[]` or `[D]`, and no attention weights."""
        if self.counts_tokens and past_key_values is not None:
            numbers = hidden_states[..., :1].unsqueeze(1)
            past_key_values.update(numbers, numbers, self.layer_idx)
        return _constant(hidden_states, self.bias), None


class AbsentFeedForward(nn.Module):
    """Stands where an FFN was.

    Args:
        bias: What a pruned FFN still adds, `[D]`; None for nothing.
    """

    def __init__(self, bias: Tensor | None = None) -> None:
        """Hold the bias, if any, as a parameter."""
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return what is added to the residual stream, `[]` or `[D]`."""
        return _constant(hidden_states, self.bias)


def _constant(hidden_states: Tensor, bias: Tensor | None) -> Tensor:
    return torch.zeros((), dtype=hidden_states.dtype, device=hidden_states.device) if bias is None else bias


def counting_layers(layer_types: Sequence[str] | None) -> set[int]:
    """Return the layers of a cache that are asked for its length: the first one, and the first of every kind.

    Args:
        layer_types: The kind of each layer's attention, where a configuration lists it.
    """
    kinds = list(layer_types or ())
    return {0} | {kinds.index(kind) for kind in kinds}
