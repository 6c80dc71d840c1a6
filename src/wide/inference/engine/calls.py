"""The three kinds of calls that the engine runs: prompts, steps of decoding, and steps of continuous batching."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wide.inference.engine.batching import PagedView
from wide.inference.engine.engine_cache import EngineCache
from wide.inference.engine.generation import is_trusted
from wide.inference.engine.inputs import kept_rows, unexpected_rows
from wide.inference.engine.memory import Memory, has_graph
from wide.inference.engine.options import ForwardOptions
from wide.models.router import RoutingControl

Answer = tuple[Tensor, EngineCache | None]
"""Logits [B, kept, V], and the cache of the call."""
_OTHER_MODEL = "a cache from before the model was changed"


class Masked(Exception):  # noqa: N818
    """A call that the engine does not take; its message is the reason, empty where there is nothing to say."""


def prompt(
    memory: Memory,
    control: RoutingControl,
    x: Tensor,
    past: int,
    padding: Tensor | None,
    cache: EngineCache | None,
    kept: int | Tensor,
) -> Tensor:
    """Return the logits [B, kept, V] that are wanted of several tokens a sequence, and keep their keys and values.

    Args:
        x: Tokens [B, T] behind their left padding, or their embeddings [B, T, D].
        past: Tokens that the cache has of each sequence, padding included.
        padding: Left padding of each sequence, int64 [B]; None without.
        cache: Takes the keys and values; None = they are not kept.
        kept: `logits_to_keep`.

    Raises:
        Masked: If the masked model has to compute it.
    """
    if past and cache is not None and cache.slot is not None and cache.slot.decoder is not memory.decoder:
        raise Masked(_OTHER_MODEL)
    if past + x.shape[1] > memory.decoder.max_length:
        raise Masked(f"a text of more than {memory.decoder.max_length} tokens")
    if control.observed is not None and padding is not None:
        raise Masked("capture_routing with left padding")
    memory.claim()
    memory.follow()
    decoder, (batch, length), run = memory.decoder, x.shape[:2], _options(control)
    if padding is not None and length > 1 and not past:
        # The engine pads on the right: each row begins with its first real token.
        places = (torch.arange(length, device=x.device) + padding[:, None]).clamp(max=length - 1)
        x = x.gather(1, places) if x.dim() == 2 else x.take_along_dim(places[..., None], 1)
    lengths = torch.full((batch,), past + length, dtype=torch.int32, device=x.device)
    if padding is not None:
        lengths -= padding.to(torch.int32)
    slot = None if cache is None else memory.room(cache, batch, past + length)
    is_plain = x.dim() == 2 and isinstance(kept, int) and kept == 1 and run.record is None
    if past:
        # The reference would read all of the memory.
        has_kernel = decoder.tables[0].backend != "torch"
        is_plain = is_plain and has_kernel and slot is not None and batch == 1 and padding is None
    if is_plain and has_graph(x, None if slot is None else decoder.widest):
        # A call that keeps nothing borrows memory of all layers, for the sake of its graph.
        lent = memory.free(batch, length) if slot is None else slot
        replayed = lent.prompt(x, lengths, routed=run.routed, pool=memory.pool, past=past)
        if replayed is not None:
            # The caller may keep what the next prompt overwrites.
            return replayed.clone()[:, None]
    keys = decoder.new_cache(batch, length, kept=False) if slot is None else slot.cache
    if padding is not None and past:
        # Sequences that end at different places run one after the other.
        rows = kept_rows(1, length, kept, None, x.device)
        pasts = [past - places for places in padding.tolist()]
        parts = [decoder.prompt(x[row, None], keys.row(row), run, past=each) for row, each in enumerate(pasts)]
        return torch.stack([decoder.logits(part, run, rows) for part in parts])
    residual = decoder.prompt(x, keys, run, past=past, lengths=lengths)
    _note(control, run, x)
    return decoder.logits(residual, run, kept_rows(batch, length, kept, padding, x.device)).unflatten(0, (batch, -1))


def step(memory: Memory, control: RoutingControl, ids: Tensor, cache: EngineCache, given: Mapping[str, Any]) -> Tensor:
    """Return the logits [B, 1, V] after one more token [B, 1] a sequence; the cache grows by it.

    Args:
        cache: Holds at least a token of each sequence.
        given: Arguments of the call, whose masks and positions are compared unless `generate` made them.

    Raises:
        Masked: If the masked model has to compute it.
    """
    slot, decoder = cache.slot, memory.decoder
    if slot.decoder is not decoder:
        raise Masked(_OTHER_MODEL)
    if ids.shape[0] != slot.cache.batch:
        raise Masked("another number of sequences than the cache holds")
    if cache.tokens >= decoder.max_length:
        raise Masked(f"a text of more than {decoder.max_length} tokens")
    trusted, grows = is_trusted(cache), cache.tokens >= slot.cache.room
    if trusted and not grows and control.observed is None:
        memory.join()
    else:
        memory.claim()
    if grows:
        slot = memory.grow(cache, cache.tokens + 1)
    unexpected = None if trusted else unexpected_rows(given, slot.cache.lengths + 1)
    if isinstance(unexpected, str):
        raise Masked(unexpected)
    memory.follow()
    run = _options(control)
    if run.record is not None:
        logits = decoder.step(ids[:, 0], slot.cache, run)
        _note(control, run, ids)
    else:
        begun = memory.take(slot, ids[:, 0], routed=run.routed)
        if cache.has_begun:
            # After one wrong guess, or one call of another text in between, nothing more is guessed.
            cache.has_begun, cache.is_greedy = False, begun is not None
        logits = slot.step(ids[:, 0], routed=run.routed, pool=memory.pool) if begun is None else begun
    cache.tokens += 1
    # The caller may keep what the next step overwrites.
    logits = logits.clone() if unexpected is None else logits.masked_fill(unexpected[:, None], torch.nan)
    # `generate` will most likely ask for the step behind this one.
    if trusted and cache.is_greedy and cache.tokens < min(cache.room or 0, slot.cache.room):
        cache.has_begun = memory.begin(slot, routed=run.routed)
    return logits[:, None]


def paged_step(memory: Memory, control: RoutingControl, ids: Tensor, given: Mapping[str, Any]) -> Answer:
    """Return the logits [1, kept, V] of a step of continuous batching, which transformers may be capturing.

    Args:
        ids: Tokens of all requests, [1, Q].

    Raises:
        Masked: If the masked model has to compute it.
    """
    if not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        memory.claim()
        memory.follow()
    view = PagedView(given)
    if view.longest > memory.decoder.max_length:
        raise Masked(f"a batch that has room for more than {memory.decoder.max_length} tokens a request")
    run, kept = ForwardOptions(routed=control.enabled), given.get("logits_to_keep")
    stream = memory.decoder.forward(ids, view, run)
    return memory.decoder.logits(stream, run, kept.long() if isinstance(kept, Tensor) else None)[None], None


def _options(control: RoutingControl) -> ForwardOptions:
    return ForwardOptions(routed=control.enabled, record=None if control.observed is None else [])


def _note(control: RoutingControl, run: ForwardOptions, x: Tensor) -> None:
    """Give the masks [B * T, N_G] of a forward to who observes it."""
    if control.observed is not None and run.record is not None and run.routed:
        for layer, masks in zip(control.observed, run.record, strict=False):
            layer.attention, layer.ffn = (None if mask is None else mask.view(*x.shape[:2], -1) for mask in masks)
            layer.attention_margin = layer.ffn_margin = None
