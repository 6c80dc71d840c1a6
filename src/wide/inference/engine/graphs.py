"""Prompts and decode steps as CUDA graphs: static inputs, replayed without the host's help."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wide.inference.engine.cache import KvCache
from wide.inference.engine.decoder import Decoder
from wide.inference.engine.layer import ForwardOptions

_WARM_UP_CALLS = 2


class GraphPool:
    """Captures calls as graphs that share memory and are never replayed at the same time; it outlives each of them."""

    def __init__(self, device: torch.device) -> None:
        """Capture one small graph, since a pool without any is gone."""
        self._device = device
        with torch.cuda.device(self._device):
            self._handle: Any = torch.cuda.graph_pool_handle()
            # One for all: the libraries keep a workspace of their own for every stream. Products go before what runs
            # beside them, which is of no priority.
            self._stream = torch.cuda.Stream(priority=-1)
        self._anchor = self.capture(lambda: torch.zeros(1, device=self._device))

    def capture(self, call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Warm up, capture one call over the same memory, and return the graph with the tensor that replays fill."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                # Kernels are compiled and libraries choose theirs here, which a capture does not allow.
                for _ in range(_WARM_UP_CALLS):
                    call()
            torch.cuda.current_stream().wait_stream(self._stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            options: dict[str, Any] = {"pool": self._handle, "stream": self._stream}
            # Other threads, of a server or a streamer, may use the device meanwhile.
            with torch.cuda.graph(graph, **options, capture_error_mode="thread_local"):
                out = call()
        return graph, out


@dataclass(frozen=True, eq=False, slots=True)
class CapturedStep:
    """A decode step that replays a graph: tokens, int64 [B], in, logits [B, V] out, overwritten by the next call."""

    graph: torch.cuda.CUDAGraph
    ids: Tensor
    logits: Tensor

    def __call__(self, ids: Tensor) -> Tensor:
        """Run it for these tokens."""
        self.ids.copy_(ids)
        self.graph.replay()
        return self.logits


@torch.no_grad()
def capture_step(decoder: Decoder, cache: KvCache, run: ForwardOptions, pool: GraphPool) -> CapturedStep:
    """Return a decode step that replays a graph.

    The cache, with room for three tokens a sequence, grows by one at every call, on the device; the caller keeps count.
    Capturing leaves it as it was. Nothing may be recorded.
    """
    ids = torch.zeros(cache.batch, dtype=torch.long, device=decoder.device)
    lengths = cache.lengths.clone()
    # Warming up must not run past the end of a full cache.
    cache.lengths.zero_()
    places = [tensor[:, :, :, : _WARM_UP_CALLS + 1].clone() for tensor in (cache.k, cache.v)]
    try:
        graph, logits = pool.capture(lambda: decoder.step(ids, cache, run))
    finally:
        # Whoever was interrupted may go on with the cache.
        cache.lengths.copy_(lengths)
        for tensor, before in zip((cache.k, cache.v), places, strict=True):
            tensor[:, :, :, : before.shape[3]] = before
    return CapturedStep(graph, ids, logits)


@torch.no_grad()
def capture_prompt(
    decoder: Decoder, cache: KvCache, length: int, run: ForwardOptions, pool: GraphPool, *, past: int = 0
) -> Callable[..., Tensor]:
    """Return a prefill that replays a graph: tokens [B, <= length] and lengths [B] in, the last logits [B, V] out.

    Args:
        cache: Overwritten from its beginning, or behind `past` tokens, now and at every call.
        length: New tokens, padding on the right included.
        run: How; nothing may be recorded.
        past: Earlier tokens of the only sequence, whose number (not 0) is the third argument of each call.
    """
    ids = torch.zeros(cache.batch, length, dtype=torch.long, device=decoder.device)
    lengths = torch.full((cache.batch,), past + length, dtype=torch.int32, device=decoder.device)
    starts = torch.full_like(lengths, past) if past else None
    graph, logits = pool.capture(lambda: decoder.prefill(ids, lengths, cache, run, starts))

    def prompt(tokens: Tensor, real: Tensor, past: int = 0) -> Tensor:
        ids[:, : tokens.shape[1]] = tokens
        lengths.copy_(real)
        if starts is not None:
            starts.fill_(past)
        graph.replay()
        return logits

    return prompt


class NextStep:
    """Holds at most one step that runs for a guessed token, until it is asked for or has to make way.

    It writes the place after a cache's last token and moves its lengths on, so that whatever else uses the engine's
    memory has to `drop` it first; graphs share memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._guessed, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._running: tuple[CapturedStep, KvCache] | None = None

    @property
    def _current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def begin(self, step: CapturedStep, cache: KvCache) -> None:
        """Let a step run for the likeliest token after the logits that it gave last; the cache has room for it."""
        self._stream.wait_stream(self._current)
        with torch.cuda.stream(self._stream):
            torch.argmax(step.logits, 1, out=step.ids)
            self._guessed.record()
            step.graph.replay()
            self._done.record()
        self._running = step, cache

    def take(self, step: CapturedStep | None, ids: Tensor) -> Tensor | None:
        """Return the logits [B, V] of a step if it runs for these tokens [B]; otherwise drop what runs."""
        if self._running is not None and self._running[0] is step:
            self._current.wait_event(self._guessed)
            # The host waits for the comparison alone: the step goes on beside it.
            if torch.equal(step.ids, ids):
                self._running = None
                self._current.wait_event(self._done)
                return step.logits
        self.drop()
        return None

    def drop(self) -> None:
        """Take back the step that runs, if one does; the current stream waits for it, also if another dropped it."""
        running, self._running = self._running, None
        self._current.wait_event(self._done)
        if running is not None:
            running[1].lengths.sub_(1)
