"""Tokens that skip a layer leave nothing behind in it: no later token sees their keys and values (D-LLM).

What a token sees is `sum_j p_j g_j v_j / sum_j p_j g_j`, with p the attention over all keys and g the gate of each:
softmax over the executing tokens alone, with a gradient that reaches the gates. Values carry their gate as one more
channel, so that every attention function computes numerator and denominator in one pass, without a mask of T x T
entries. In any kind of cache the values of evicted tokens, and only theirs, are zero, which is how later tokens know
them. At a head size of 256 the channel makes values wider than the memory-saving kernels of CUDA take, so long
sequences cost more there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wide.errors import UnsupportedModelError
from wide.models.gates import Gate, Pending, StaticGate, cache_name, cache_of, gate_heads
from wide.models.router import Router, RoutingControl

# Keeps the quotient finite where all attention falls on evicted tokens (D-LLM's own constant).
_EPSILON = 1e-6
# One channel is needed; attention kernels take multiples of eight.
_EXTRA_CHANNELS = 8


class EvictingGate(Gate):
    """Keeps the values of skipping tokens out of one attention, whose router has one group, and out of its cache."""

    def __init__(self, source: Router | StaticGate) -> None:
        super().__init__(source)
        self._gates_cache = Pending()

    def gate_cache(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Let the cache of the coming forward receive gated values (a pre-hook, after the router's)."""
        cache, mask = cache_of(kwargs), self.mask.value
        self._gates_cache.value = cache is not None and mask is not None
        if cache is None or mask is None:
            return None
        return args, kwargs | {cache_name(kwargs): _GatedCache(cache, mask.unsqueeze(1))}

    def attend(
        self, function: Callable[..., Any], module: nn.Module, heads: tuple[Tensor, ...], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Return what the attention function gives where evicted tokens cannot be seen, zero where they skip.

        Cached values are zero where they were evicted. The attention weights are also of keys that are evicted. Raises
        UnsupportedModelError if the attention has sinks, or a cache that this does not know of.
        """
        mask, (query, key, value) = self.mask.take(), heads
        if mask is None:
            return super().attend(function, module, heads, *args, **kwargs)
        if kwargs.get("s_aux") is not None:
            raise UnsupportedModelError(f"layer {self.layer_index}: attention with sinks cannot evict keys and values")
        if key.shape[2] == mask.shape[1]:
            # The router's own mask, which has a gradient in training.
            gate = mask.unsqueeze(1).to(value.dtype).expand(-1, value.shape[1], -1, -1)
            value = value * gate
        elif self._gates_cache.value:
            gate = (value != 0).any(-1, keepdim=True).to(value.dtype)
        else:
            raise UnsupportedModelError(
                f"layer {self.layer_index}: {type(module).__name__} did not get its cache by name, so "
                "evicted tokens cannot be kept out of it"
            )
        width = value.shape[-1]
        if kwargs.get("scaling") is None:
            kwargs["scaling"] = query.shape[-1] ** -0.5
        widened = torch.cat([value, gate, gate.new_zeros(*gate.shape[:-1], _EXTRA_CHANNELS - 1)], dim=-1)
        query, key = (functional.pad(tensor, (0, _EXTRA_CHANNELS)) for tensor in (query, key))
        output, weights = function(module, query, key, widened, *args, **kwargs)
        seen = output[..., width : width + 1].float() + _EPSILON
        return gate_heads((output[..., :width].float() / seen).to(value.dtype), mask), weights


def note_first_tokens(
    control: RoutingControl, count: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Note which tokens of a decoder's coming forward are a sequence's first `count` (a pre-hook but for those two).

    Padding on the left does not count.
    """
    tokens = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs["inputs_embeds"] if tokens is None else tokens
    batch, length = tokens.shape[:2]
    valid, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    is_2d = isinstance(valid, Tensor) and valid.dim() == 2
    # Packed sequences, as of continuous batching, and masks made for a static cache come with positions.
    if is_2d or positions is None:
        cache = cache_of(kwargs)
        past = 0 if cache is None else int(cache.get_seq_length())
        counted: Any = valid if is_2d else tokens.new_ones(batch, past + length)
        positions = counted.to(torch.int64).cumsum(-1)[:, past : past + length] - 1
    control.first = positions < count


class _GatedCache:
    """A cache that receives the values of one layer times their gates `[B, 1, T, 1]`; all else is the cache's own."""

    def __init__(self, cache: Any, gate: Tensor) -> None:
        self._cache = cache
        self._gate = gate

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Values that are zero without an eviction, as behind an embedding of zeros, become the least number.
        least = torch.finfo(value.dtype).tiny
        value = value.masked_fill((value == 0).all(-1, keepdim=True), least) * self._gate.to(value.dtype)
        return self._cache.update(key, value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
