"""CUDA graphs of a prefill and of one decode step: static inputs, replayed without the host's help."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wide.errors import UnsupportedBackendError
from wide.inference.cache import KvCache
from wide.inference.decoder import Decoder
from wide.inference.run import Run

_WARM_UP_CALLS = 2


def capture(call: Callable[[], Tensor], *, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Warm up on a side stream, capture one call, and return the graph with the tensor that it fills.

    Args:
        call: Reads and writes the same memory every time; returns a tensor of any shape, such as logits [B, V].
        pool: Memory pool of another graph that is never replayed at the same time.

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
    with torch.cuda.graph(graph, pool=pool):
        out = call()
    return graph, out


class CapturedPrefill:
    """A prefill of one shape as a CUDA graph.

    Args:
        decoder: Whose weights it runs.
        cache: Overwritten from its beginning at every call.
        length: Tokens of a prompt, padding included.
        run: How; nothing may be recorded or traced.
        pool: As in `capture`.
    """

    def __init__(self, decoder: Decoder, cache: KvCache, length: int, run: Run, *, pool: Any = None) -> None:
        """Capture on tokens 0."""
        self.ids = torch.zeros(cache.batch, length, dtype=torch.long, device=decoder.device)
        self.lengths = torch.full((cache.batch,), length, dtype=torch.int32, device=decoder.device)
        self.graph, self.logits = capture(lambda: decoder.prefill(self.ids, self.lengths, cache, run), pool=pool)

    def __call__(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the logits after the last tokens, [B, V], overwritten by the next call; lengths None = unpadded."""
        self.ids.copy_(ids)
        if lengths is None:
            self.lengths.fill_(ids.shape[1])
        else:
            self.lengths.copy_(lengths)
        self.graph.replay()
        return self.logits


class CapturedStep:
    """One decode step as a CUDA graph; positions advance on the device.

    Args:
        decoder: Whose weights it runs.
        cache: Grows by one token a sequence at every call; the caller keeps count of its room.
        run: How; nothing may be recorded or traced.
        greedy: Whether the graph also puts the most likely tokens into `ids`, for the next replay.
        pool: As in `capture`.
    """

    def __init__(self, decoder: Decoder, cache: KvCache, run: Run, *, greedy: bool = False, pool: Any = None) -> None:
        """Capture on tokens 0; the cache's lengths are put back, the places behind them are overwritten later."""
        self.ids = torch.zeros(cache.batch, dtype=torch.long, device=decoder.device)
        lengths = cache.lengths.clone()
        # Warming up must not run past the end of a full cache.
        cache.lengths.zero_()
        places = [tensor[:, :, :, : _WARM_UP_CALLS + 1].clone() for tensor in (cache.k, cache.v)]

        def call() -> Tensor:
            logits = decoder.step(self.ids, cache, run)
            if greedy:
                self.ids.copy_(logits.argmax(-1))
            return logits

        self.graph, self.logits = capture(call, pool=pool)
        cache.lengths.copy_(lengths)
        for tensor, before in zip((cache.k, cache.v), places, strict=True):
            tensor[:, :, :, : before.shape[3]] = before
        self.ids.zero_()

    def __call__(self, ids: Tensor | None = None) -> Tensor:
        """Return the logits, [B, V], overwritten by the next call; None takes the tokens that `ids` holds."""
        if ids is not None:
            self.ids.copy_(ids)
        self.graph.replay()
        return self.logits
