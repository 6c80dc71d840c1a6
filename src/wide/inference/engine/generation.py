"""`generate()` of an optimised model: it begins with the engine's cache, and its masks are read once."""

import functools
import inspect
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from transformers import DynamicCache, StaticCache

from wide.inference.engine.cache import EngineCache
from wide.models.gates import cache_name, cache_of

REASON = "wide_reason"
"""Attribute of a cache that runs masked: why, where `generate` made it."""
# Caches of the `generate` that this thread runs, whose masks and positions follow from those of the prompt.
_TRUSTED: ContextVar["weakref.WeakSet[EngineCache] | None"] = ContextVar("_TRUSTED", default=None)


def is_trusted(cache: EngineCache | None) -> bool:
    """Return whether a running `generate` made the masks and positions of this call, so that they need no check."""
    return cache is not None and cache in (_TRUSTED.get() or ())


def wrap_generation(model: Any, ended: Callable[[], None]) -> dict[str, Callable[..., Any]]:
    """Return what replaces a model's `generate` and what makes its cache; `ended` is called at the end."""
    prepare: Callable[..., Any] = model._prepare_cache_for_generation
    names = tuple(inspect.signature(prepare).parameters)
    generate: Callable[..., Any] = model.generate

    def prepare_cache(*args: Any, **kwargs: Any) -> Any:
        out = prepare(*args, **kwargs)
        named = dict(zip(names, args, strict=False)) | kwargs
        inputs: Any = named.get("model_kwargs")
        mode = getattr(named.get("generation_mode"), "value", named.get("generation_mode"))
        cache = cache_of(inputs) if isinstance(inputs, dict) else None
        is_default = type(cache) in (DynamicCache, StaticCache) and not getattr(cache, "_is_user_defined", False)
        if not is_default or getattr(cache, "offloading", False) or named["generation_config"].is_assistant:
            return out
        if mode not in ("greedy_search", "sample"):
            setattr(cache, REASON, str(mode).replace("_", " "))
            return out
        cache = EngineCache(model.config, named.get("max_cache_length"), is_greedy=mode == "greedy_search")
        inputs[cache_name(inputs)] = cache
        if (trusted := _TRUSTED.get()) is not None:
            trusted.add(cache)
        return out

    @functools.wraps(generate)
    def run(*args: Any, **kwargs: Any) -> Any:
        # It makes masks and positions itself unless it is told otherwise.
        is_plain = kwargs.get("custom_generate") is None and kwargs.get("position_ids") is None
        before = _TRUSTED.set(weakref.WeakSet() if is_plain else None)
        try:
            return generate(*args, **kwargs)
        finally:
            _TRUSTED.reset(before)
            ended()

    return {"generate": run, "_prepare_cache_for_generation": prepare_cache}
