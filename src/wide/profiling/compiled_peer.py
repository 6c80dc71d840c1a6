"""A dense peer from elsewhere: the Hugging Face model itself, compiled, with a static cache, in a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Tensor]


def compiled_prefill(model: Any, ids: Tensor, mode: str) -> Call:
    """Return a call that computes the logits after the last token of a prompt."""
    torch._dynamo.reset()
    forward = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def call() -> Tensor:
        return forward(input_ids=ids, use_cache=False, logits_to_keep=1).logits  # type: ignore[no-any-return, no-untyped-call]

    call()
    return call


def compiled_step(model: Any, ids: Tensor, *, length: int, room: int, mode: str) -> Call:
    """Return a call that adds one token at place `length` of a static cache, always the same.

    Args:
        model: Dense.
        ids: The token of each sequence, [B, 1].
        length: Tokens cached before it.
        room: Places of the cache.
        mode: Of torch.compile.
    """
    from transformers import StaticCache

    torch._dynamo.reset()
    cache = StaticCache(config=model.config, max_cache_len=room)
    with torch.no_grad():
        # Allocates the layers' tensors.
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    counts = [layer.cumulative_length for layer in cache.layers]
    starts = [torch.full_like(count, length) for count in counts]
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    forward = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def call() -> Tensor:
        torch._foreach_copy_(counts, starts)
        return forward(input_ids=ids, past_key_values=cache, use_cache=True).logits  # type: ignore[no-any-return, no-untyped-call]

    call()
    return call
