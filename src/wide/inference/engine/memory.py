"""Memory for keys and values, lent to caches and used again, with the CUDA graphs that read and write it."""

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from wide.inference.engine.cache import EngineCache, KvCache
from wide.inference.engine.decoder import Decoder
from wide.inference.engine.graphs import CapturedStep, GraphPool, NextStep, capture_prompt, capture_step
from wide.inference.engine.layer import ForwardOptions

_SMALLEST_ROOM = 256
# Room beyond a prompt where nobody says how many tokens will follow.
_SPARE_ROOM = 256
# Room beyond a prompt that is made at once, however long a text may become.
_FIRST_ROOM = 2048
# Freed memory of earlier calls, with its graphs, that is kept for calls to come: so many, in all this share of a GPU's.
_KEPT_SLOTS, _KEPT_SHARE = 2, 0.125
_HOST_MEMORY = 1 << 33
# Rows of a prompt up to which launching its kernels may take longer than they do; of narrow layers more, as long as
# rows times columns of the widest product, and with them a graph's memory, are those of an 8B model.
_GRAPH_ROWS, _MOST_GRAPH_ROWS, _GRAPH_CELLS = 4096, 16384, 4096 * 28672


class Slot:
    """Keys and values of some sequences, and the graphs of the prompts and steps that read and write them."""

    def __init__(self, decoder: Decoder, cache: KvCache, memory: "Memory") -> None:
        self.decoder, self.cache, self.memory = decoder, cache, memory
        self.owner: weakref.ref[EngineCache] | None = None
        self._steps: dict[bool, Callable[[Tensor], Tensor]]
        self._prompts: dict[tuple[int, bool, bool], Callable[[Tensor, Tensor, int], Tensor] | None]
        self.forget()

    @property
    def holder(self) -> EngineCache | None:
        """The living cache that holds it; None where it is free."""
        owner = None if self.owner is None else self.owner()
        return owner if owner is not None and owner.slot is self else None

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Let nobody else use the memory inside the block."""
        with self.memory.lock:
            self.memory.claim()
            yield

    def forget(self) -> None:
        """Let go of all graphs; they are captured again when they are needed."""
        self._steps, self._prompts = {}, {}

    def captured(self, *, routed: bool) -> CapturedStep | None:
        """Return the graph of a step, None before the first one and on a CPU."""
        step = self._steps.get(routed)
        return step if isinstance(step, CapturedStep) else None

    def step(self, ids: Tensor, *, routed: bool, pool: GraphPool | None) -> Tensor:
        """Return the logits [B, V] after one more token [B] a sequence, in memory that the next step overwrites."""
        step = self._steps.get(routed)
        if step is None:
            run = ForwardOptions(routed=routed)
            if pool is None:
                step = functools.partial(self.decoder.step, cache=self.cache, run=run)
            else:
                step = capture_step(self.decoder, self.cache, run, pool)
            self._steps[routed] = step
        return step(ids)

    def prompt(
        self, ids: Tensor, lengths: Tensor, *, routed: bool, pool: GraphPool | None, past: int = 0
    ) -> Tensor | None:
        """Return the logits [B, V] after short prompts [B, T] by a graph; None where none is worth its capture.

        Launching a short prompt's kernels one by one takes longer than they do. Prompts are padded on the right, so
        that one graph serves a range of lengths, and it is captured when such a length comes a second time. Lengths,
        int32 [B], count `past` tokens of the only sequence, too, of whose numbers one graph serves all.
        """
        length = _prompt_bucket(ids.shape[1])
        if pool is None or past + length > self.cache.room:
            return None
        key = length, routed, past > 0
        if key not in self._prompts:
            self._prompts[key] = None
            return None
        prompt = self._prompts[key]
        if prompt is None:
            run = ForwardOptions(routed=routed)
            try:
                prompt = capture_prompt(self.decoder, self.cache, length, run, pool, past=past)
            except torch.OutOfMemoryError:
                # Without a graph it may fit; the length has to come twice again.
                del self._prompts[key]
                return None
            self._prompts[key] = prompt
        return prompt(ids, lengths, past)


class Memory:
    """All memory of one decoder. Whoever uses it holds the lock and calls `claim` (or `join`, then `take`) first."""

    def __init__(self, decoder: Decoder, lock: "threading.RLock") -> None:  # type: ignore[valid-type]
        self.decoder, self.lock = decoder, lock
        self.slots: list[Slot] = []
        self.pool: GraphPool | None = None
        self._next: NextStep | None = None
        self._stream: torch.cuda.Stream | None = None
        parts = [part for layer in decoder.layers for part in layer.parts]
        self._routers = [part.router for part in parts if part.router is not None]
        self._thresholds = [router.threshold for router in self._routers]
        device = decoder.device
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _HOST_MEMORY
        self._most_kept = _KEPT_SHARE * total

    def join(self) -> None:
        """Let the current stream wait for the one that used the memory last."""
        device = self.decoder.device
        if device.type == "cuda":
            self.pool = self.pool or GraphPool(device)
            stream = torch.cuda.current_stream(device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream

    def claim(self) -> None:
        """Let the current stream use the memory: also take back a step that was begun for a likely next token."""
        self.join()
        if self._next is not None:
            self._next.drop()

    def take(self, slot: Slot, ids: Tensor, *, routed: bool) -> Tensor | None:
        """Return the logits [B, V] of the step that was begun, if it runs for these tokens [B]; otherwise drop it."""
        return None if self._next is None else self._next.take(slot.captured(routed=routed), ids)

    def begin(self, slot: Slot, *, routed: bool) -> bool:
        """Begin a step for the likeliest next tokens, and return whether that was possible."""
        step = slot.captured(routed=routed)
        # A processor may bar tokens that the model has logits but no embedding of.
        if step is None or step.logits.shape[1] > len(self.decoder.embedding):
            return False
        self._next = self._next or NextStep(step.ids.device)
        self._next.begin(step, slot.cache)
        return True

    def release(self) -> None:
        """Let caches leave the engine, with what they hold."""
        self.claim()
        for slot in self.slots:
            holder = slot.holder
            if holder is not None:
                holder.leave_engine()
        self.slots, self.pool = [], None

    def follow(self, thresholds: list[float]) -> None:
        """Let the decoder, in captured graphs too, decide by the thresholds that the model's routers have now.

        They come by layer, attention before FFN; those of layers that the decoder does not have come last.
        """
        thresholds = thresholds[: len(self._routers)]
        if thresholds != self._thresholds:
            before, self._thresholds = self._thresholds, thresholds
            self.claim()
            for router, threshold in zip(self._routers, thresholds, strict=True):
                router.follow(threshold)
            # Where nothing is skipped no router runs: other kernels, and so other graphs.
            if [each == -math.inf for each in thresholds] != [each == -math.inf for each in before]:
                for slot in self.slots:
                    slot.forget()

    def room(self, cache: EngineCache, batch: int, needed: int) -> Slot:
        """Return a cache's memory, with room for so many tokens a sequence."""
        if cache.slot is not None:
            return cache.slot if needed <= cache.slot.cache.room else self.grow(cache, needed)
        # Memory grows with the text: many a call ends long before its longest text.
        room = needed + _SPARE_ROOM if cache.room is None else min(cache.room, needed + _FIRST_ROOM)
        slot = self.free(batch, min(max(needed, room), self.decoder.max_length))
        self._lend(slot, cache)
        return slot

    def free(self, batch: int, wanted: int) -> Slot:
        """Return free memory for so many tokens a sequence, used before if there is any."""
        free = [slot for slot in self.slots if slot.holder is None]
        fits = [slot for slot in free if slot.cache.batch == batch and slot.cache.room >= wanted]
        if fits:
            slot = min(fits, key=lambda each: each.cache.room)
            dropped = [slot]
        else:
            dropped = free[: max(0, len(free) - _KEPT_SLOTS + 1)]
            room = min(_bucket(wanted), self.decoder.max_length)
            memory = None
            with suppress(torch.OutOfMemoryError):
                memory = self.decoder.new_cache(batch, room)
            if memory is None:
                # Whatever names the free memory keeps it.
                self.slots, free, dropped = [each for each in self.slots if each.holder is not None], [], []
                torch.cuda.empty_cache()
                memory = self.decoder.new_cache(batch, room)
            slot = Slot(self.decoder, memory, self)
        # The last one is the latest used.
        self.slots = [*(each for each in self.slots if each not in dropped), slot]
        return slot

    def grow(self, cache: EngineCache, needed: int) -> Slot:
        """Move a cache into larger memory, with room for so many tokens a sequence."""
        assert cache.slot is not None
        old = cache.slot.cache
        slot = self.free(old.batch, min(max(needed, 3 * old.room // 2), self.decoder.max_length))
        for source, target in ((old.k, slot.cache.k), (old.v, slot.cache.v)):
            target[:, :, :, : cache.tokens] = source[:, :, :, : cache.tokens]
        slot.cache.lengths.copy_(old.lengths)
        self._lend(slot, cache)
        return slot

    def _lend(self, slot: Slot, cache: EngineCache) -> None:
        """Give memory to a cache; much of it is not kept when the cache is gone."""

        def gone(_cache: object) -> None:
            # Garbage is collected anywhere: a forward of another thread drops what is too much when it needs memory.
            if not self.lock.acquire(blocking=False):
                return
            free = [each for each in self.slots if each.holder is None]
            kept = sum(2 * each.cache.k.nbytes for each in free)
            dropped = []
            for old in free:
                if kept > self._most_kept:
                    dropped.append(old)
                    kept -= 2 * old.cache.k.nbytes
            self.slots = [each for each in self.slots if each not in dropped]
            self.lock.release()

        cache.slot, slot.owner = slot, weakref.ref(cache, gone)


def has_graph(ids: Tensor, widest: int | None) -> bool:
    """Return whether prompts [B, T] are so short that a graph is worth it; None as `widest` admits fewer rows."""
    rows = ids.shape[0] * _prompt_bucket(ids.shape[1])
    fits = widest is not None and rows <= _MOST_GRAPH_ROWS and rows * widest <= _GRAPH_CELLS
    return ids.is_cuda and (rows <= _GRAPH_ROWS or fits)


def _prompt_bucket(length: int) -> int:
    """Return the length of the graph that serves a prompt: about an eighth longer at most, but for short ones."""
    step = max(64, (1 << (length - 1).bit_length()) // 16)
    return -(-length // step) * step


def _bucket(room: int) -> int:
    """Return the next of 256, 384, 512, 768, 1024, ...: few kinds of memory, little of it wasted."""
    size = _SMALLEST_ROOM
    while size < room:
        if 3 * size // 2 >= room:
            return 3 * size // 2
        size *= 2
    return size
