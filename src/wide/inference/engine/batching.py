"""Continuous batching: a view of transformers' paged caches, which is what `generate_batch` runs in an optimised model.

A step holds the query tokens of many requests one behind the other. Steps with one token a request read the pages where
they lie; in others, keys are gathered as transformers does, and each query sees one run of them. Shapes are fixed and
nothing is read on the host, so that transformers replays such steps from CUDA graphs. Padded tokens see no keys and get
zeros.
"""

import copy
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from wide.errors import NotAttachedError, UnsupportedModelError
from wide.inference.engine.views import AttentionCall, needs_zeros
from wide.kernels.attention_decode.op import MAX_PAIRS, attention_decode
from wide.kernels.attention_prefill.op import attention_prefill
from wide.kernels.device import half_obstacle
from wide.kernels.reorder.op import reorder_sequences
from wide.models.gates import install_attention_gates
from wide.models.having import having

PAGED_ATTENTION = "wide_paged|flash"
"""wide's attention among transformers'; 'flash' tells them that it needs no mask, 'paged|' which caches it knows."""
ARGUMENTS = frozenset(
    (
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q", "max_seqlen_k", "max_length_q", "max_length_k"),
        *("write_index", "read_index", "logits_indices", "cache", "block_table", "logits_processor_args", "is_causal"),
    )
)
"""Arguments of a model's forward that a step over a paged cache brings along."""
# The cache of a step, among the arguments of attention functions.
_CACHE = "wide_cache"
# Steps of so few tokens read keys token by token; in longer ones, neighbouring tokens share what they read.
_FEW_TOKENS = 64
_DEFAULT_BLOCKS = 32
_FULL = "full_attention"


class _Pages(NamedTuple):
    """A step of one token a request: keys of each, int32 [S], and the place where the new one goes, int64 [S]."""

    lengths: Tensor
    places: Tensor


class _Runs(NamedTuple):
    """A step over gathered keys.

    Args:
        bounds: First key that each token sees, and the place behind its last, int32 [2, Q].
        request: Of each token, int64 [Q].
        is_alone: Whether a token is the only one of its request, bool [Q].
        last: Last token of each request, int64 [S].
        alone: Bounds of requests of one token, the others' empty, int32 [2, S].
    """

    bounds: Tensor
    request: Tensor
    is_alone: Tensor
    last: Tensor
    alone: Tensor


def is_paged_step(given: Mapping[str, Any]) -> bool:
    """Return whether these arguments of a model's forward are those of continuous batching."""
    cache = given.get("cache")
    return cache is not None and not isinstance(cache, Cache) and given.get("cu_seq_lens_q") is not None


def handed_on(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a model's forward with a paged cache under a name that only wide's attention reads.

    Since transformers 5.24 modules store keys and values themselves where they know the cache.
    """
    if not is_paged_step(given) or config._attn_implementation != PAGED_ATTENTION:
        return given
    return {_CACHE if name == "cache" else name: value for name, value in given.items()}


class PagedView:
    """A step of continuous batching, from a forward's arguments; see `CacheView`. Each token is a sequence."""

    length, is_step = 1, False

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._cache, self._given = given["cache"], given
        self._table: Tensor | None = given.get("block_table")
        # What layers of one kind share.
        self._shared: dict[Any, Any] = {}
        # Keys and values of layers with a window, until transformers has stored them.
        self._new: tuple[Tensor, Tensor] | None = None
        positions = given.get("position_ids")
        self.starts = torch.empty(0) if positions is None else positions[0].to(torch.int32)
        self.batch = self.starts.shape[0]

    @property
    def longest(self) -> int:
        """The most keys that a token may see."""
        if self._table is not None:
            return self._table.shape[2] * _pages_of(self._cache, 0)[0].shape[1]
        lengths = self._given.get("max_length_k", self._given.get("max_seqlen_k"))
        return max(lengths.values()) if isinstance(lengths, dict) else int(lengths)

    def memory(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `CacheView`; keys and values are [1, places, H_k, d], places int64 [Q]."""
        index = _index_of(self._cache, layer)
        places = None if self._table is not None else self._given["write_index"][index]
        if _kind(self._cache, layer) != _FULL:
            # Their pages hold a window, whose oldest keys may still be read before new ones take their places.
            keys, values = (new.new_empty(1, *new.flatten(0, 1).shape) for _ in range(2))
            self._new = keys, values
            return keys, values, torch.arange(keys.shape[1], device=new.device)
        keys, values, trash = _pages_of(self._cache, layer)
        if places is None:
            places = self._pages(index, keys.shape[1], trash).places
        return keys.flatten(0, 1)[None], values.flatten(0, 1)[None], places

    def attend(self, layer: int, q: Tensor, mask: Tensor | None, call: AttentionCall) -> Tensor:
        """See `CacheView`."""
        call.wait()
        scores = {"scale": call.form.scale, "soft_cap": call.form.soft_cap, "backend": call.table.backend}
        return self.mix(layer, q[:, 0], mask, call.form.window, scores, zero_skipped=needs_zeros(mask, call.table))

    def mix(
        self,
        layer: int,
        q: Tensor,
        mask: Tensor | None,
        window: int | None,
        scores: dict[str, Any],
        *,
        zero_skipped: bool,
    ) -> Tensor:
        """Return the attention output [Q, H_q, d] of queries [Q, H_q, d] whose keys `memory` has taken.

        The mask is bool [Q, N_G], None where everything executes; unless `zero_skipped`, skipped pairs hold anything.
        """
        index, kind = _index_of(self._cache, layer), _kind(self._cache, layer)
        if self._table is not None:
            keys, values, trash = _pages_of(self._cache, layer)
            lengths = self._pages(index, keys.shape[1], trash).lengths
            paged = scores | {"pages": self._table[index], "window": window}
            return _decode(q, keys, values, mask, (None, lengths), paged)
        if self._new is not None:
            keys, values = _stored(self._cache, layer, self._new, self._given)
            self._new = None
        else:
            keys, values, _ = _pages_of(self._cache, layer)
            places = self._given["read_index"][index]
            # Without earlier keys in the cache there is nothing to read but what has just been stored.
            places = places if places.numel() else self._given["write_index"][index]
            keys, values = (part.flatten(0, 1).index_select(0, places)[None] for part in (keys, values))
        if (kind, window) not in self._shared:
            runs = _read_runs(self._given["cu_seq_lens_q"], self._key_bounds(kind), q.shape[0], window)
            self._shared[kind, window] = runs
        return _attend_runs(q, keys, values, mask, self._shared[kind, window], scores, zero_skipped=zero_skipped)

    def _pages(self, index: int, size: int, trash: int) -> _Pages:
        """Return where the tokens of a step stand in the pages of a group of layers."""
        if index not in self._shared:
            assert self._table is not None
            self._shared[index] = _read_pages(self._key_bounds(_FULL), self._table[index], size, trash)
        return self._shared[index]

    def _key_bounds(self, kind: str) -> Tensor:
        found = self._given["cu_seq_lens_k"]
        return found[kind] if isinstance(found, dict) else found


def _attend_runs(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, runs: _Runs, scores: dict[str, Any], *, zero_skipped: bool
) -> Tensor:
    """Return the attention output [Q, H_q, d] of queries over keys [1, T, H_k, d] of all requests."""
    has_kernel = scores["backend"] == "triton"
    if has_kernel and q.shape[0] <= _FEW_TOKENS:
        return _decode(q, k, v, mask, (runs.bounds[0], runs.bounds[1]), scores)
    rest = q.new_ones(q.shape[0], 1, dtype=torch.bool) if mask is None else mask
    alone = None
    if has_kernel and runs.last.shape[0] <= _most_rows(k, mask):
        # Requests that decode share no keys with their neighbours, so tiles of the prompts' kernel would be wasted.
        chosen = None if mask is None else mask.index_select(0, runs.last)
        alone = _decode(q.index_select(0, runs.last), k, v, chosen, (runs.alone[0], runs.alone[1]), scores)
        rest = rest & ~runs.is_alone[:, None]
    order = reorder_sequences(rest.unsqueeze(0), backend=scores["backend"])
    out = attention_prefill(q.unsqueeze(0), k, v, order, runs=runs.bounds, zero_skipped=zero_skipped, **scores)[0]
    if alone is not None:
        # Padded requests name the last token, too, and bring the same values.
        kept = torch.where(
            runs.is_alone[runs.last, None, None], alone[runs.request[runs.last]], out.index_select(0, runs.last)
        )
        out.index_copy_(0, runs.last, kept)
    return out


def _decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bounds: Sequence[Tensor | None], options: dict[str, Any]
) -> Tensor:
    """Return `attention_decode` of any number of rows; keys of one row are those of all, bounded by row."""
    rows, pages = _most_rows(k, mask), options.get("pages")
    parts = []
    for first in range(0, q.shape[0], rows):
        part = slice(first, first + rows)
        starts, ends = (None if bound is None else bound[part] for bound in bounds)
        assert ends is not None
        keys, values = (k, v) if pages is not None else (each.expand(ends.shape[0], -1, -1, -1) for each in (k, v))
        given = {**options, "starts": starts, "pages": None if pages is None else pages[part]}
        parts.append(attention_decode(q[part], keys, values, ends, None if mask is None else mask[part], **given))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _most_rows(k: Tensor, mask: Tensor | None) -> int:
    """Return how many rows `attention_decode` takes at once."""
    return max(1, MAX_PAIRS // math.lcm(k.shape[2], 1 if mask is None else mask.shape[1]))


def _read_pages(cu_k: Tensor, table: Tensor, size: int, trash: int) -> _Pages:
    lengths = cu_k.diff()
    last = (lengths - 1).clamp(min=0).long()
    page = table.gather(1, (last // size)[:, None])[:, 0].long()
    # Padded requests have no keys and write where nobody reads.
    return _Pages(lengths.to(torch.int32), torch.where(lengths > 0, page * size + last % size, trash))


def _read_runs(cu_q: Tensor, cu_k: Tensor, num_tokens: int, window: int | None) -> _Runs:
    cu_q, cu_k = cu_q.long(), cu_k.long()
    token = torch.arange(num_tokens, device=cu_q.device)
    requests = cu_q.shape[0] - 1
    request = torch.searchsorted(cu_q[1:], token, right=True).clamp(max=requests - 1)
    is_real = token < cu_q[-1]
    high = cu_k[request + 1] - (cu_q[request + 1] - 1 - token)
    low = cu_k[request] if window is None else torch.maximum(cu_k[request], high - window)
    # Behind the last request come padded tokens, which see nothing.
    bounds = torch.where(is_real, torch.stack([low, high]), cu_k[-1])
    lengths = cu_q.diff()
    last = (cu_q[1:] - 1).clamp(min=0)
    alone = torch.where(lengths == 1, bounds.index_select(1, last), 0)
    is_alone = is_real & (lengths == 1)[request]
    return _Runs(bounds.int().contiguous(), request, is_alone, last, alone.int().contiguous())


# transformers' paged caches, before and after layers got allocators of their own.


def _kind(cache: Any, layer: int) -> str:
    if hasattr(cache, "layer_to_allocator"):
        return str(cache.layer_to_allocator[layer].layer_type)
    return _FULL if cache.sliding_windows[layer] == 1 else "sliding_attention"


def _index_of(cache: Any, layer: int) -> int:
    """Return which of the block tables and indices of a step are those of a layer."""
    if hasattr(cache, "layer_to_allocator"):
        return int(cache.layer_to_allocator[layer].index)
    return int(cache.layer_index_to_group_indices[layer][0])


def _pages_of(cache: Any, layer: int) -> tuple[Tensor, Tensor, int]:
    """Return keys and values of a layer that sees all, [pages, P, H_k, d], and a place to waste."""
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer]
        return *allocator.get_cache_for_block_table(layer), allocator.write_trash_index
    place = cache.layer_index_to_group_indices[layer][1]
    memory = (part[place].unflatten(0, (-1, cache.block_size)) for part in (cache.key_cache, cache.value_cache))
    return *memory, cache.write_trash_index


def _stored(cache: Any, layer: int, new: tuple[Tensor, Tensor], given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return keys and values of all requests, [1, T, H_k, d], after transformers has stored the new ones, as they."""
    k, v = (part.transpose(1, 2) for part in new)
    named = {"key_states": k, "value_states": v, "layer_idx": layer}
    if hasattr(cache, "layer_to_allocator"):
        keys, values = cache.update(**named, kwargs=dict(given))
        return keys.transpose(1, 2), values.transpose(1, 2)
    keys, values = cache.update(**named, read_index=given["read_index"], write_index=given["write_index"])
    return keys.unsqueeze(0), values.unsqueeze(0)


def _attend_masked(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend over a paged cache with every head: what the masked model runs where the engine does not."""
    unknown = [name for name in ("s_aux", "position_bias") if options.get(name) is not None]
    if options.get(_CACHE) is None or attention_mask is not None or unknown:
        raise UnsupportedModelError(
            "this call runs masked, which it cannot while generate_batch (or a manager of it) runs on the same model; "
            f"end that first ({PAGED_ATTENTION!r} is for its steps, without sinks and position biases)"
        )
    view = PagedView({**options, "cache": options[_CACHE], "position_ids": None})
    *memory, places = view.memory(module.layer_idx, key[0].transpose(0, 1)[:, None])
    for kept, new in zip(memory, (key, value), strict=True):
        kept[0].index_copy_(0, places, new[0].transpose(0, 1))
    backend = "triton" if half_obstacle(query.device, query.dtype) is None else "torch"
    scores = {"soft_cap": options.get("softcap"), "scale": options.get("scaling"), "backend": backend}
    q, window = query[0].transpose(0, 1), options.get("sliding_window")
    return view.mix(module.layer_idx, q, None, window, scores, zero_skipped=True)[None], None


class PagedBatching:
    """Lets transformers' continuous batching run wide's attention: no masks, decode steps over block tables, graphs.

    A manager that was kept for a next session ends where what its graphs and pages are `made_of` has changed.
    """

    def __init__(self, model: Any, made_of: Callable[[], Any]) -> None:
        """Register the attention and wrap the one method through which all of continuous batching goes."""
        from transformers import AttentionInterface

        if PAGED_ATTENTION not in AttentionInterface._global_mapping:
            AttentionInterface.register(PAGED_ATTENTION, _attend_masked)
            install_attention_gates()
        self._model = model
        self.is_warming_up = False
        self._managers: weakref.WeakSet[Any] = weakref.WeakSet()
        made_with: Any = None
        original: Callable[..., Any] = model.init_continuous_batching

        @functools.wraps(original)
        def init(
            generation_config: Any = None,
            continuous_batching_config: Any = None,
            workload_hints: Any = None,
            **more: Any,
        ) -> Any:
            nonlocal made_with
            known, made_with = made_with, made_of()
            if made_with != known:
                model.destroy_cached_continuous_batching_manager()
            before = model.config._attn_implementation
            asked = getattr(continuous_batching_config, "max_blocks_per_request", None)
            if asked:
                # Transformers would say that there is none for this attention.
                continuous_batching_config = copy.copy(continuous_batching_config)
                continuous_batching_config.max_blocks_per_request = None
            model.config._attn_implementation = PAGED_ATTENTION
            try:
                manager = original(generation_config, continuous_batching_config, workload_hints, **more)
            except BaseException:
                model.config._attn_implementation = before
                raise
            if before != PAGED_ATTENTION:
                # The manager gives it back when it stops.
                manager._original_attn_impl = before
            self._managers.add(manager)
            if hasattr(manager, "warmup"):
                manager.warmup = functools.partial(self._warm_up, manager.warmup)
            if manager.batch_processor is None:
                self._allow_block_tables(manager.continuous_batching_config, asked, workload_hints)
            return manager

        model.init_continuous_batching = init

    @property
    def is_running(self) -> bool:
        """Whether a manager runs steps, whose graphs hold tensors of the engine."""
        return any(manager.is_running() for manager in self._managers)

    def release(self) -> None:
        """End what was kept for a next session; raises NotAttachedError if a manager is running."""
        if self.is_running:
            raise NotAttachedError("generate_batch (or a manager of it) runs on this model; end that first")
        self._model.destroy_cached_continuous_batching_manager()

    def remove(self) -> None:
        """Give the model its own method back."""
        vars(self._model).pop("init_continuous_batching", None)

    def _warm_up(self, warmup: Callable[[], None]) -> None:
        with having(self, is_warming_up=True):
            warmup()

    def _allow_block_tables(self, settings: Any, asked: int | None, hints: Any) -> None:
        """Let steps of one token a request read pages in place, which transformers knows of flash attention only."""
        config = self._model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        is_sliding = "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None
        # On a CPU, gathering the keys that there are is faster than going through whole tables.
        if is_sliding or (asked is None and self._model.device.type != "cuda"):
            return
        size = getattr(settings, "page_size", None) or settings.block_size
        tokens = 0 if hints is None else hints.max_prompt_length + hints.max_generated_length
        wanted = math.ceil(tokens / size) + 1 if tokens else _DEFAULT_BLOCKS
        longest = getattr(config, "max_position_embeddings", None)
        if longest:
            # The engine knows positions up to the model's longest.
            wanted = min(wanted, longest // size)
        settings.max_blocks_per_request = min(wanted, asked) if asked is not None and longest else asked or wanted
