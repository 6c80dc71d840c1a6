"""The three kinds of calls that the engine runs: prompts, steps of decoding, and steps of continuous batching.

Each raises `Masked` if the masked model has to compute it.
"""

import operator
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from wide.errors import ShapeError
from wide.inference.engine.batching import ARGUMENTS, PagedView, is_paged_step
from wide.inference.engine.cache import EngineCache
from wide.inference.engine.generation import REASON, is_trusted
from wide.inference.engine.inputs import KNOWN, kept_rows, read_padding, unexpected_rows
from wide.inference.engine.layer import ForwardOptions
from wide.inference.engine.memory import Memory, has_graph
from wide.models.gates import cache_of

Kind = Literal["prompt", "step", "paged"]
Answer = tuple[Tensor, EngineCache | None]
"""Logits [B, kept, V], and the cache of the call."""
_KNOWN_PAGED = KNOWN | ARGUMENTS
_OTHER_MODEL = "a cache from before the model was changed"


class Masked(Exception):  # noqa: N818
    """A call that the engine does not take; its message is the reason, empty where there is nothing to say."""


def read_call(given: Mapping[str, Any], config: Any) -> tuple[Kind, Tensor, EngineCache | None]:
    """Return which call a forward's arguments are, their tokens [B, T] or embeddings [B, T, D], and their cache."""
    ids = given.get("input_ids")
    x = given.get("inputs_embeds") if ids is None else ids
    if not isinstance(x, Tensor) or not x.numel() or (ids is not None and given.get("inputs_embeds") is not None):
        raise Masked
    is_paged = ids is not None and is_paged_step(given)
    if not is_paged and x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Masked("a call that is captured in a CUDA graph")
    if peek_interpreter_stack() is not None or torch._C._is_tracing():
        raise Masked("a call inside a transform of torch.func or a trace")
    if torch.is_autocast_enabled(x.device.type):
        raise Masked("autocast")
    for name, value in given.items():
        if name not in (_KNOWN_PAGED if is_paged else KNOWN) and value is not None and value is not False:
            raise Masked(f"the argument {name}=")
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(config, name, False):
            raise Masked(f"{name}=")
    if is_paged:
        return "paged", x, None
    cache = cache_of(given)
    if cache is None:
        return "prompt", x, None
    if not isinstance(cache, EngineCache):
        own = f"a {type(cache).__name__} that is not the engine's (a cache of the caller's own)"
        raise Masked(getattr(cache, REASON, own))
    if cache.slot is None and cache.get_seq_length():
        raise Masked(cache.left_for)
    if cache.tokens and given.get("attention_mask") is None and not is_trusted(cache):
        require_hidden(cache, None)
    is_step = cache.slot is not None and cache.tokens and ids is not None and x.shape[1] == 1
    return "step" if is_step else "prompt", x, cache


def prompt(
    memory: Memory, x: Tensor, cache: EngineCache | None, run: ForwardOptions, given: Mapping[str, Any], config: Any
) -> Answer:
    """Return the logits [B, kept, V] that are wanted after tokens [B, T] or embeddings [B, T, D], and their cache.

    Without a cache a new one is made if keys are to be kept.
    """
    past = 0 if cache is None or cache.slot is None else cache.tokens
    keeps = given.get("use_cache")
    if cache is None and (getattr(config, "use_cache", True) if keeps is None else keeps):
        cache = EngineCache(config)
    padding = read_padding(given, x, past, reads_positions=not is_trusted(cache), has_cache=cache is not None)
    if isinstance(padding, str):
        raise Masked(padding)
    places = None if padding is None else padding.tolist()
    if cache is not None and past and cache.padding != places:
        require_hidden(cache, given.get("attention_mask"))
        raise Masked("another left padding than that of the tokens before")
    if cache is not None:
        cache.padding = places
    try:
        logits = _prompt(memory, x, past, padding, places, cache, run, given.get("logits_to_keep", 0))
    except BaseException:
        # What was begun must not be taken for a prompt, nor for tokens of an earlier one.
        if cache is not None and not past:
            cache.slot = None
        elif cache is not None:
            cache.slot.cache.lengths.copy_(past - torch.tensor(places or 0, device=x.device))
        raise
    if cache is not None:
        cache.tokens = past + x.shape[1]
    return logits, cache


def _prompt(
    memory: Memory,
    x: Tensor,
    past: int,
    padding: Tensor | None,
    places: list[int] | None,
    cache: EngineCache | None,
    run: ForwardOptions,
    kept: int | Tensor,
) -> Tensor:
    """Return the logits [B, kept, V] that are wanted, and keep keys and values behind `past` of each sequence.

    What `past` counts and `x` holds includes the left padding, int64 [B] or None; `places` is the same on the host.
    """
    if past and cache is not None and cache.slot is not None and cache.slot.decoder is not memory.decoder:
        raise Masked(_OTHER_MODEL)
    if past + x.shape[1] > memory.decoder.max_length:
        raise Masked(f"a text of more than {memory.decoder.max_length} tokens")
    if run.record is not None and padding is not None:
        raise Masked("capture_routing with left padding")
    memory.claim()
    decoder, (batch, length) = memory.decoder, x.shape[:2]
    if padding is not None and length > 1 and not past:
        # The engine pads on the right: each row begins with its first real token.
        at = (torch.arange(length, device=x.device) + padding[:, None]).clamp(max=length - 1)
        x = x.gather(1, at) if x.dim() == 2 else x.take_along_dim(at[..., None], 1)
    lengths = torch.full((batch,), past + length, dtype=torch.int32, device=x.device)
    if padding is not None:
        lengths -= padding.to(torch.int32)
    slot = None if cache is None else memory.room(cache, batch, past + length)
    is_plain = x.dim() == 2 and isinstance(kept, int) and kept == 1 and run.record is None
    if past:
        # The reference would read all of the memory.
        is_plain = is_plain and decoder.tables[0].backend != "torch" and batch == 1 and padding is None
    if is_plain and has_graph(x, None if slot is None else decoder.widest):
        # A call that keeps nothing borrows memory of all layers, for the sake of its graph.
        lent = memory.free(batch, length) if slot is None else slot
        replayed = lent.prompt(x, lengths, routed=run.routed, pool=memory.pool, past=past)
        if replayed is not None:
            # The caller may keep what the next prompt overwrites.
            return replayed.clone()[:, None]
    keys = decoder.new_cache(batch, length, kept=False) if slot is None else slot.cache
    if places is not None and past:
        # Sequences that end at different places run one after the other.
        rows = kept_rows(1, length, kept, None, x.device)
        pasts = [past - each for each in places]
        parts = [decoder.prompt(x[row, None], keys.row(row), run, past=each) for row, each in enumerate(pasts)]
        return torch.stack([decoder.logits(part, run, rows) for part in parts])
    residual = decoder.prompt(x, keys, run, past=past, lengths=lengths)
    return decoder.logits(residual, run, kept_rows(batch, length, kept, padding, x.device)).unflatten(0, (batch, -1))


def require_hidden(cache: EngineCache, mask: Any) -> None:
    """Raise ShapeError if a mask (None shows all) shows left padding of the prompt: the engine kept no keys of it."""
    if not cache.get_seq_length():
        cache.padding = None
    before = cache.padding or []
    if not any(before) or (mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2)):
        return
    now = [0] * len(before) if mask is None else (mask.cumsum(-1) == 0).sum(-1).tolist()
    # Sequences may have changed places since, or been repeated.
    if len(now) == len(before) and any(map(operator.lt, sorted(now), sorted(before))):
        raise ShapeError(
            f"the attention mask hides {now} tokens on the left, and before it hid {before}, of which wide.optimize "
            "keeps no keys; hide them again, or begin with an empty cache"
        )


def step(memory: Memory, ids: Tensor, cache: EngineCache, run: ForwardOptions, given: Mapping[str, Any]) -> Tensor:
    """Return the logits [B, kept, V] after one token [B, 1] more a sequence; the cache, not empty, grows by it.

    Masks and positions that are given are compared unless `generate` made them.
    """
    slot, decoder = cache.slot, memory.decoder
    if slot.decoder is not decoder:
        raise Masked(_OTHER_MODEL)
    if ids.shape[0] != slot.cache.batch:
        raise Masked("another number of sequences than the cache holds")
    if cache.tokens >= decoder.max_length:
        raise Masked(f"a text of more than {decoder.max_length} tokens")
    trusted, grows = is_trusted(cache), cache.tokens >= slot.cache.room
    (memory.join if trusted and not grows and run.record is None else memory.claim)()
    if grows:
        slot = memory.grow(cache, cache.tokens + 1)
    unexpected = None if trusted else unexpected_rows(given, slot.cache.lengths + 1, cache.padding)
    if isinstance(unexpected, str):
        raise Masked(unexpected)
    if run.record is not None:
        logits = decoder.step(ids[:, 0], slot.cache, run)
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
    kept = given.get("logits_to_keep")
    return logits[:, None][:, kept] if isinstance(kept, Tensor) else logits[:, None]


def paged_step(memory: Memory, ids: Tensor, run: ForwardOptions, given: Mapping[str, Any]) -> Tensor:
    """Return the logits [1, kept, V] after tokens [1, Q] of all requests; transformers may be capturing the step."""
    if not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        memory.claim()
    view = PagedView(given)
    if view.longest > memory.decoder.max_length:
        raise Masked(f"a batch that has room for more than {memory.decoder.max_length} tokens a request")
    kept = given.get("logits_to_keep")
    stream = memory.decoder.forward(ids, view, run)
    return memory.decoder.logits(stream, run, kept.long() if isinstance(kept, Tensor) else None)[None]
