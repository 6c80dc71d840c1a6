"""Ways into a Hugging Face model that are timed: captured in CUDA graphs, compiled, and through its public doors.

Captured, no call waits for the host. The public doors, the forward and `generate()`, are timed by the wall clock: that
is what their callers get.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from wide.inference.tuning.timing import Timing, summary, time_interleaved
from wide.profiling.energy import EnergyCounter, joules

Call = Callable[[], Tensor]
SPARE_PLACES = 64
"""Room of a cache beyond the tokens that a measured step finds in it."""


def captured_race(
    models: Mapping[str, Any], what: str, ids: Tensor, length: int, *, quick: bool, energy: EnergyCounter | None
) -> list[dict[str, Any]]:
    """Return one record of each model, captured in a CUDA graph; speed-ups are over the one named 'dense'.

    Args:
        models: By name of the candidate.
        what: 'prefill' or 'decode'.
        ids: Tokens of each sequence, [B, T] for a prefill and [B, 1] for a step.
        length: Tokens of a prompt, or cached before the step.
        quick: Fewer samples.
        energy: The counter that joules are measured with; None leaves them out.
    """
    calls = {}
    for name, model in models.items():
        if what == "prefill":
            calls[name] = prefill_call(model, ids, None)
        else:
            calls[name] = step_call(model, ids, length=length, room=length + SPARE_PLACES, mode=None)
    times = time_interleaved(calls, rounds=6 if quick else 20)
    records = []
    for name, call in calls.items():
        record = forward_record(what, length, ids.shape[0], name, times[name], times["dense"])
        record |= {"runtime": "transformers in a CUDA graph"} | peak_memory(call)
        if energy is not None:
            record["energy_j"] = joules(call, energy)
        records.append(record)
    return records


def door_race(models: Mapping[str, Any], ids: Tensor, generate: int, *, rounds: int) -> list[dict[str, Any]]:
    """Return two records of each model: a forward of the prompt, and a step of `generate()`, host and all.

    A step is what the tokens of a greedy `generate()` take beyond the first, each; the prompt is not in it.

    Args:
        models: By name of the candidate; speed-ups are over the one named 'dense'.
        ids: Prompts, [B, T].
        generate: Tokens to generate, at least 2.
        rounds: Samples of each door, interleaved.
    """
    batch, length = ids.shape
    doors: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        doors[f"forward {name}"] = _forward_door(model, ids)
        doors[f"first {name}"] = _generate_door(model, ids, 1)
        doors[f"all {name}"] = _generate_door(model, ids, generate)
    samples = _by_the_wall_clock(doors, rounds)
    steps = {
        name: [
            (whole - first) / (generate - 1)
            for whole, first in zip(samples[f"all {name}"], samples[f"first {name}"], strict=True)
        ]
        for name in models
    }
    records = []
    for name in models:
        peak = peak_memory(doors[f"all {name}"])
        for what, tokens, door, found in (
            ("prefill", length, "model(...)", {each: summary(samples[f"forward {each}"]) for each in models}),
            ("decode", length + generate // 2, "generate()", {each: summary(steps[each]) for each in models}),
        ):
            record = forward_record(what, tokens, batch, name, found[name], found["dense"])
            records.append(record | {"runtime": door} | peak)
    return records


def _forward_door(model: Any, ids: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def call() -> object:
        return model(input_ids=ids, logits_to_keep=1).logits

    return call


def _generate_door(model: Any, ids: Tensor, count: int) -> Callable[[], object]:
    mask = torch.ones_like(ids)

    def call() -> object:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return model.generate(input_ids=ids, attention_mask=mask, **options)

    return call


def _by_the_wall_clock(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return microseconds of each call, interleaved in an order that rotates; each has run twice before."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(-2, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            _synchronise()
            began = time.perf_counter()
            calls[name]()
            _synchronise()
            if turn >= 0:
                samples[name].append(1e6 * (time.perf_counter() - began))
    return samples


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forward_record(what: str, tokens: int, batch: int, name: str, timing: Timing, dense: Timing) -> dict[str, Any]:
    """Return what every record of a whole forward says."""
    return {
        "what": what,
        "metric": "TTFT" if what == "prefill" else "TPOT",
        "tokens": tokens,
        "batch": batch,
        "candidate": name,
        "median_us": timing.median_us,
        "low_us": timing.low_us,
        "high_us": timing.high_us,
        "num_samples": timing.num_samples,
        "speedup": dense.median_us / timing.median_us,
    }


def peak_memory(call: Callable[[], object]) -> dict[str, int]:
    """Return the record of the most memory that is held during a call, weights and caches included."""
    if not torch.cuda.is_available():
        return {"peak_memory_bytes": 0}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return {"peak_memory_bytes": torch.cuda.max_memory_allocated()}


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
