"""Calls of Hugging Face models as they are or compiled, over a static cache, fit for CUDA graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Tensor]


def prefill_call(model: Any, ids: Tensor, mode: str | None) -> Call:
    """Return a call that computes the logits after the last token of a prompt.

    Args:
        model: A causal LM in evaluation mode.
        ids: Tokens, [B, T].
        mode: Of torch.compile; None runs the model as it is.
    """
    from transformers import DynamicCache

    forward = _forward(model, mode)

    @torch.no_grad()
    def call() -> Tensor:
        # Without a cache an uncompiled model looks for packed sequences, which a graph cannot capture.
        cache = None if mode else DynamicCache(config=model.config)
        options: Any = {"use_cache": cache is not None, "past_key_values": cache, "logits_to_keep": 1}
        return forward(input_ids=ids, **options).logits  # type: ignore[no-any-return]

    call()
    return call


def step_call(model: Any, ids: Tensor, *, length: int, room: int, mode: str | None) -> Call:
    """Return a call that adds one token at place `length` of a static cache, always the same.

    Args:
        model: A causal LM in evaluation mode; its layers may have different numbers of KV heads, or no attention.
        ids: The token of each sequence, [B, 1].
        length: Tokens cached before it.
        room: Places of the cache.
        mode: Of torch.compile; None runs the model as it is.
    """
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=room)
    with torch.no_grad():
        # Allocates the layers' tensors.
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    layers: list[Any] = [layer for layer in cache.layers if layer.is_initialized]
    for layer in layers:
        layer.keys.normal_()
        layer.values.normal_()
    counts = [layer.cumulative_length for layer in layers]
    starts = [torch.full_like(count, length) for count in counts]
    forward = _forward(model, mode)

    @torch.no_grad()
    def call() -> Tensor:
        torch._foreach_copy_(counts, starts)
        return forward(input_ids=ids, past_key_values=cache, use_cache=True).logits  # type: ignore[no-any-return]

    call()
    return call


def _forward(model: Any, mode: str | None) -> Callable[..., Any]:
    if mode is None:
        return model  # type: ignore[no-any-return]
    torch._dynamo.reset()
    return torch.compile(model, mode=mode, fullgraph=True, dynamic=False)  # type: ignore[no-any-return]
