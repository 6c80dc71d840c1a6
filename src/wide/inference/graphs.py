"""Prompts and decode steps as CUDA graphs: static inputs, replayed without the host's help."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wide.errors import UnsupportedBackendError
from wide.inference.cache import KvCache
from wide.inference.decoder import Decoder
from wide.inference.run import Run

_WARM_UP_CALLS = 2


class GraphPool:
    """Memory that graphs share which are never replayed at the same time; it outlives each of them."""

    def __init__(self) -> None:
        """Capture one small graph, since a pool without any is gone."""
        self.handle: Any = torch.cuda.graph_pool_handle()
        self._anchor, self._held = capture(lambda: torch.zeros(1, device="cuda"), pool=self.handle)


def capture(call: Callable[[], Tensor], *, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Warm up on a side stream, capture one call, and return the graph with the tensor that it fills.

    Args:
        call: Reads and writes the same memory every time; returns a tensor of any shape, such as logits [B, V].
        pool: Memory pool of other graphs that are never replayed at the same time.

    Returns:
        The graph, and what `call` returned while it was captured: every replay overwrites it.

    Raises:
        UnsupportedBackendError: If there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise UnsupportedBackendError("CUDA graphs need a CUDA device; call the decoder's prefill and step directly")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Kernels are compiled and libraries choose theirs here, which a capture does not allow.
        for _ in range(_WARM_UP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads, of a server or a streamer, may use the device meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = call()
    return graph, out


@torch.no_grad()
def capture_step(decoder: Decoder, cache: KvCache, run: Run, *, pool: Any = None) -> Callable[[Tensor], Tensor]:
    """Return a decode step that replays a graph: tokens [B] in, logits [B, V] out, overwritten by the next call.

    The cache grows by one token a sequence at every call, on the device; the caller keeps count of its room. Capturing
    leaves the cache as it was.

    Args:
        decoder: Whose weights it runs.
        cache: With room for at least three tokens a sequence.
        run: How; nothing may be recorded or traced.
        pool: As in `capture`.
    """
    ids = torch.zeros(cache.batch, dtype=torch.long, device=decoder.device)
    lengths = cache.lengths.clone()
    # Warming up must not run past the end of a full cache.
    cache.lengths.zero_()
    places = [tensor[:, :, :, : _WARM_UP_CALLS + 1].clone() for tensor in (cache.k, cache.v)]
    graph, logits = capture(lambda: decoder.step(ids, cache, run), pool=pool)
    cache.lengths.copy_(lengths)
    for tensor, before in zip((cache.k, cache.v), places, strict=True):
        tensor[:, :, :, : before.shape[3]] = before

    def step(tokens: Tensor) -> Tensor:
        ids.copy_(tokens)
        graph.replay()
        return logits

    return step


@torch.no_grad()
def capture_prompt(
    decoder: Decoder, cache: KvCache, length: int, run: Run, *, pool: Any = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a prefill that replays a graph: tokens [B, <= length] and lengths [B] in, the last logits [B, V] out.

    Args:
        decoder: Whose weights it runs.
        cache: Overwritten from its beginning, now and at every call.
        length: Tokens of a prompt, padding on the right included.
        run: How; nothing may be recorded or traced.
        pool: As in `capture`.
    """
    ids = torch.zeros(cache.batch, length, dtype=torch.long, device=decoder.device)
    lengths = torch.full((cache.batch,), length, dtype=torch.int32, device=decoder.device)
    graph, logits = capture(lambda: decoder.prefill(ids, lengths, cache, run), pool=pool)

    def prompt(tokens: Tensor, real: Tensor) -> Tensor:
        ids[:, : tokens.shape[1]] = tokens
        lengths.copy_(real)
        graph.replay()
        return logits

    return prompt
