"""A view of keys and values for one forward: where new ones go, and how queries attend to what is there.

The layer function knows nothing else of a cache. Here are the views of the engine's own memory; `batching` has that of
transformers' paged caches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from wide.inference.engine.cache import KvCache
from wide.inference.operators.table import OperatorTable
from wide.inference.reading.attention_form import AttentionForm
from wide.kernels.attention_decode.op import attention_decode
from wide.kernels.attention_prefill.op import attention_prefill
from wide.kernels.clear_skipped.op import clear_skipped
from wide.kernels.reorder.op import reorder_sequences
from wide.kernels.reordering import Reordering, SequenceReordering
from wide.kernels.tuning import Choice

_SDPA_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class AttentionCall(NamedTuple):
    """What a layer tells its view; `order` is the query product's, if one was made.

    `wait` waits for a router on another stream, before the mask is read.
    """

    form: AttentionForm
    table: OperatorTable
    order: Reordering | None
    wait: Callable[[], None]


class CacheView(Protocol):
    """Keys and values as one forward sees them.

    Attributes:
        batch: Sequences, B.
        length: New tokens of each, T; rows of a layer are B * T.
        starts: Position of each sequence's first new token, int32 [B].
        is_step: Whether T is 1 and each sequence attends to its own run of keys.
    """

    batch: int
    length: int
    starts: Tensor
    is_step: bool

    def memory(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return memory of keys and values into which those of the new tokens are to be written.

        Args:
            new: The new keys, [B, T, H_k, d], before they are rotated.

        Returns:
            Keys and values, [B, places, H_k, d], and the places of new ones, int64 [B * T]; None = from `starts` on.
        """
        ...

    def attend(self, layer: int, q: Tensor, mask: Tensor | None, call: AttentionCall) -> Tensor:
        """Return the attention output [B, T, H_q, d] over keys of which the new ones have been written.

        Args:
            q: Queries, [B, T, H_q, d].
            mask: bool [B * T, N_G], valid after `wait`; None = everything executes. Skipped heads come back as zeros
                where the output product is dense; otherwise they hold anything.
            call: What all views are told.
        """
        ...


class _OwnKeys:
    _cache: KvCache

    def memory(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `CacheView`."""
        return *self._cache.layer(layer), None


class PromptView(_OwnKeys):
    """Several new tokens of each sequence, of which all have the same number of earlier ones, `past`."""

    is_step = False

    def __init__(self, cache: KvCache, batch: int, length: int, past: int) -> None:
        self.batch, self.length = batch, length
        self.starts = cache.zeros + past if past else cache.zeros
        self._cache, self._past = cache, past

    def attend(self, layer: int, q: Tensor, mask: Tensor | None, call: AttentionCall) -> Tensor:
        """See `CacheView`."""
        form, table, _, wait = call
        num_keys = self._past + self.length
        k, v = (part[:, :num_keys] for part in self._cache.layer(layer))
        window = None if form.window is not None and form.window >= num_keys else form.window
        zeroes = needs_zeros(mask, table)
        # The library's attention knows neither windows nor soft caps, and needs a mask behind earlier tokens, with
        # which the kernels are faster, but not the reference.
        is_plain = window is None and form.soft_cap is None and (not self._past or table.backend == "torch")
        if is_plain and (mask is None or table.how("attention", self.length) == "dense"):
            square = self.starts.new_ones(self.length, num_keys, dtype=torch.bool) if self._past else None
            out = _library_attention(q, k, v, form.scale, None if square is None else square.tril(self._past))
            wait()
            return _zeroed(out, mask if zeroes else None, table.backend)
        wait()
        choice = table.choice("attention", self.length)
        if choice.backend == "dense":
            choice = Choice(backend=table.backend)
        return _attention(q, k, v, mask, call, window=window, backend=choice.backend, tile=choice.tile)


class ContinuedView(_OwnKeys):
    """New tokens of one sequence; only the device knows how many came before, int32 [1]: for CUDA graphs."""

    batch, is_step = 1, False

    def __init__(self, cache: KvCache, length: int, starts: Tensor) -> None:
        self.length, self.starts = length, starts
        self._cache = cache
        self._ends = starts + torch.arange(1, length + 1, dtype=torch.int32, device=starts.device)
        # By window, the same in all layers.
        self._runs: dict[int | None, Tensor] = {}

    def attend(self, layer: int, q: Tensor, mask: Tensor | None, call: AttentionCall) -> Tensor:
        """See `CacheView`."""
        window = call.form.window
        call.wait()
        if window not in self._runs:
            first = torch.zeros_like(self._ends) if window is None else (self._ends - window).clamp(min=0)
            self._runs[window] = torch.stack([first, self._ends])
        keys = self._cache.layer(layer)
        return _attention(q, *keys, mask, call, runs=self._runs[window], backend=call.table.backend)


class StepView(_OwnKeys):
    """One new token of each sequence, behind all that the cache holds of it."""

    length, is_step = 1, True

    def __init__(self, cache: KvCache) -> None:
        self.batch, self.starts, self.ends = cache.batch, cache.lengths, cache.lengths + 1
        self._cache = cache

    def attend(self, layer: int, q: Tensor, mask: Tensor | None, call: AttentionCall) -> Tensor:
        """See `CacheView`."""
        form, table, _, wait = call
        k, v = self._cache.layer(layer)
        wait()
        zeroes = needs_zeros(mask, table)
        # Without a mask every pair is read. Otherwise skipped pairs come back as zeros, which costs nothing where
        # groups are whole KV heads; smaller groups would share each KV head among several programs.
        is_free = mask is not None and zeroes and k.shape[2] % mask.shape[1] == 0
        read = mask if table.cache or is_free else None
        scores: dict[str, Any] = {"scale": form.scale, "soft_cap": form.soft_cap, "window": form.window}
        out = attention_decode(q[:, 0], k, v, self.ends, read, **scores, backend=table.backend)
        return _zeroed(out.unsqueeze(1), mask if zeroes and read is None else None, table.backend)


def needs_zeros(mask: Tensor | None, table: OperatorTable) -> bool:
    """Return whether skipped heads [rows, N_G] must be zeros, since the output product is dense."""
    return mask is not None and table.how("output", mask.shape[0]) == "dense"


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionCall, **options: Any) -> Tensor:
    """Return attention [B, T, H_q, d] by a kernel, over keys and values [B, T_k, H_k, d], of what executes."""
    form, table, order, _ = call
    batch, length = q.shape[:2]
    if mask is None:
        index = torch.arange(length, dtype=torch.int32, device=q.device).repeat(batch, 1, 1)
        sequences = SequenceReordering(index, torch.full_like(index[:, :, 0], length))
    elif order is not None and batch == 1:
        # What the query product gathered.
        sequences = SequenceReordering(order.index[None], order.counts[None])
    else:
        sequences = reorder_sequences(mask.view(batch, length, -1), backend=table.backend)
    scores: dict[str, Any] = {"scale": form.scale, "soft_cap": form.soft_cap}
    return attention_prefill(q, k, v, sequences, zero_skipped=needs_zeros(mask, table), **scores, **options)


def _zeroed(heads: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    """Return attention output [B, T, H_q, d], just made, with skipped groups at zero; None leaves it."""
    if mask is None:
        return heads
    values = heads.reshape(mask.shape[0], -1)
    clear_skipped(values, mask, backend=backend)
    return values.view(heads.shape)


def _library_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    """Return attention [B, T, H_q, d] by the library's fastest kernel, causal without visible keys [T, T_k]."""
    attend: Any = functional.scaled_dot_product_attention
    heads = [part.transpose(1, 2) for part in (q, k, v)]
    options: dict[str, Any] = {"is_causal": visible is None, "attn_mask": visible, "scale": scale}
    options["enable_gqa"] = q.shape[2] != k.shape[2]
    if not q.is_cuda:
        return attend(*heads, **options).transpose(1, 2)
    with sdpa_kernel(_SDPA_ORDER, set_priority=True):
        return attend(*heads, **options).transpose(1, 2)
