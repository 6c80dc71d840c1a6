"""Attention over vLLM's pages that skips (token, group) pairs: a backend, its metadata and its kernel calls.

Single tokens read the pages; prompts read new keys, or keys gathered from the pages where some are cached. It is vLLM's
FlashAttention, and stays it wherever nothing is won; there, skipped heads are set to zero afterwards.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.attention import _encode_layer_name
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from wide.inference.operators.table import OperatorTable
from wide.kernels.attention_decode.op import MAX_PAIRS, attention_decode
from wide.kernels.attention_prefill.op import attention_prefill
from wide.kernels.clear_skipped.op import clear_skipped
from wide.kernels.reorder.op import reorder_sequences

# Keys that the kernel of a step reads at a time; smaller pages would slow it down.
_PAGE = 64
# Bytes of keys and values that a step gathers at most: vLLM does not count them.
_MOST_GATHERED = 1 << 29
# Rows and keys of steps with prompts that FlashAttention runs alone. No graph holds a prompt's attention, and to launch
# a sort and what skips takes the host longer than a GPU saves by it.
_FEW_KEYS = 2048


def skips_in(attention: Any, table: Callable[[], OperatorTable]) -> bool:
    """Let an attention of vLLM skip by a table of `table_later`, if it is FlashAttention; return whether it is."""
    implementation = attention.impl
    if type(implementation) is not FlashAttentionImpl:
        return False
    implementation.__class__ = _Implementation
    implementation.table = table
    implementation.most_tokens = get_current_vllm_config().scheduler_config.max_num_seqs
    attention.attn_backend = Backend
    return True


def attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return heads [M, H_q d] of a layer that skips, zeros where skipped; its keys and values go into the pages.

    Queries are rotated, [M, H_q d]; those of heads that the mask, bool [M, N_G], skips may hold anything.
    """
    heads, keys, values = (
        part.unflatten(1, (part.shape[1] // attention.head_size, attention.head_size)) for part in (q, k, v)
    )
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    name = _encode_layer_name(attention.layer_name)
    stored = torch.ops.vllm.unified_kv_cache_update(keys, values, name)
    # vLLM hands the scale of an output on to the implementation as it is; no such scale goes with routers.
    torch.ops.vllm.unified_attention_with_output(
        heads, keys, values, out, name, output_scale=mask, kv_cache_dummy_dep=stored
    )
    return out.flatten(1)


class _Builder(FlashAttentionMetadataBuilder):
    """Notes on the host where prompts begin in a step, and how many keys they read."""

    # Graphs of mixed steps would be replayed for steps of single tokens.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # FlashAttention takes memory for 32 parts of each sum in steps up to this size, which no prompt needs.
        self.max_cudagraph_size = vllm_config.scheduler_config.max_num_seqs

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return FlashAttention's metadata, with `ahead` and `keys` of `split_step`, and room for what layers share."""
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        lengths, starts = common_attn_metadata.seq_lens_cpu_upper_bound, common_attn_metadata.query_start_loc_cpu
        found.ahead, found.keys, found.shared = None, 0, None
        if found.max_query_len == 1:
            found.ahead = found.num_actual_tokens
        elif lengths is not None:
            found.ahead, found.keys = split_step(lengths.long(), starts.long().diff())
        return found

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Return metadata of a graph, which prompts never replay."""
        found = super().build_for_cudagraph_capture(common_attn_metadata)
        found.ahead = found.num_actual_tokens if found.max_query_len == 1 else None
        return found


def split_step(lengths: Tensor, queries: Tensor) -> tuple[int, int]:
    """Return how many requests of one token come before the first prompt, and how many keys others read, 0 if all new.

    Lengths are keys of each request, this step's included, or more, queries its new tokens, int64 [B] on the host.
    """
    ahead = int((queries != 1).long().argmax())
    cached = not torch.equal(lengths[ahead:], queries[ahead:])
    return ahead, int(lengths[ahead:].sum()) if cached else 0


class _Implementation(FlashAttentionImpl):
    """FlashAttention that takes a mask in the place of the output's scale."""

    table: Callable[[], OperatorTable]
    # Single tokens of a step at most.
    most_tokens: int

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the heads [M, H_q, d] of executing pairs and zeros of others to `output`, and return it."""
        mask = output_scale
        if attn_metadata is None or mask is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        step = self._step(kv_cache, mask, attn_metadata)
        rows, ahead = attn_metadata.num_actual_tokens, attn_metadata.ahead
        if step is None:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
            clear_skipped(output[:rows].flatten(1), mask[:rows], backend="triton")
            return output
        if ahead > 0:
            keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
            found = attention_decode(query[:ahead], keys, values, mask=mask[:ahead], backend="triton", **step.tokens)
            output[:ahead].copy_(found)
        if ahead < rows:
            q, k, v, mask, out = (part[ahead:rows] for part in (query, key, value, mask, output))
            if step.places is not None:
                found = kv_cache.transpose(1, 2).flatten(0, 1).index_select(0, step.places)
                k, v = found.split(self.head_size, dim=-1)
            order = reorder_sequences(mask[None], backend="triton")
            out.copy_(attention_prefill(q[None], k[None], v[None], order, **step.prompts)[0])
        return output

    def warm(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
        """Run steps of so many rows [M, H, d]: prompts, with and without cached keys and single tokens, and tokens."""
        rows, page = len(q), torch.zeros(1, _PAGE, k.shape[1], 2 * self.head_size, dtype=k.dtype, device=k.device)
        steps: list[tuple[list[int], int]] = [([rows], 0), ([rows], _FEW_KEYS)]
        # Masks of what comes behind a token are not aligned.
        steps += [([1, rows - 1], more) for more in (0, _FEW_KEYS) if rows > 2]
        steps += [([1] * rows, 16)] if rows <= self.most_tokens else []
        for queries, cached in steps:
            counts, ahead = torch.tensor(queries), int((torch.tensor(queries) != 1).long().argmax())
            ahead = rows if max(queries) == 1 else ahead
            # All keys lie on one page, which the whole table names.
            lengths = (counts + cached).int()
            # Behind a long request, short prompts skip, too.
            lengths[:ahead] += _FEW_KEYS
            known = SimpleNamespace(num_actual_tokens=rows, ahead=ahead, max_query_len=max(queries), shared=None)
            known.keys = int(lengths[ahead:].sum()) if cached else 0
            known.max_seq_len, known.seq_lens = int(lengths.max()), lengths.to(q.device)
            known.query_start_loc = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(q.device)
            wide = known.max_seq_len // _PAGE + 1
            known.block_table = torch.zeros(len(queries), wide, dtype=torch.int32, device=q.device)
            out, kv_cache = torch.empty(q.shape, dtype=q.dtype, device=q.device), page.transpose(1, 2)
            if self._step(kv_cache, mask, known) is None:
                clear_skipped(out.flatten(1), mask, backend="triton")
            else:
                self.forward(torch.nn.Identity(), q, k, v, kv_cache, known, out, mask)

    def _step(self, kv_cache: Tensor, mask: Tensor, metadata: Any) -> "_Step | None":
        """Return what layers of one kind share in a step, None where nothing skips; the first of them works it out."""
        # Not sooner: vLLM copies metadata for other block tables.
        if metadata.shared is None:
            metadata.shared = {}
        kind = self.sliding_window, self.table
        if kind not in metadata.shared:
            metadata.shared[kind] = self._plan(kv_cache, mask.shape[1], metadata)
        return metadata.shared[kind]  # type: ignore[no-any-return]

    def _plan(self, kv_cache: Tensor, groups: int, metadata: Any) -> "_Step | None":
        rows, ahead, table, count = metadata.num_actual_tokens, metadata.ahead, self.table(), metadata.keys
        before = self.sliding_window[0]
        if ahead is None or not self._skips(kv_cache, groups, metadata):
            return None
        known = {"lengths": metadata.seq_lens[:ahead], "pages": metadata.block_table[:ahead], "scale": self.scale}
        tokens = known | {"window": before + 1 if before >= 0 else None}
        choice, places = table.choice("attention", metadata.max_query_len), None
        prompts: dict[str, Any] = {"scale": self.scale, "zero_skipped": True}
        prompts |= {"backend": choice.backend, "tile": choice.tile}
        windowed = 0 <= before < metadata.max_seq_len - 1
        if ahead < rows and (metadata.query_start_loc.shape[0] - 1 - ahead > 1 or windowed or count):
            starts = metadata.query_start_loc[ahead:] - ahead
            lengths = metadata.seq_lens[ahead:] if count else starts.diff()
            prompts["runs"] = _visible(starts, lengths, rows - ahead, before if windowed else None)
            places = _places(lengths, metadata.block_table[ahead:], count, kv_cache) if count else None
        return _Step(tokens, prompts, places)

    def _skips(self, kv_cache: Tensor, groups: int, metadata: Any) -> bool:
        """Return whether the kernels take a step, and win by it."""
        rows, ahead = metadata.num_actual_tokens, metadata.ahead
        is_short = max(rows, metadata.max_seq_len) <= _FEW_KEYS
        if ahead < rows and (is_short or self.table().how("attention", metadata.max_query_len) == "dense"):
            return False
        if ahead == 0 and not metadata.keys:
            return True
        # Pages in another order than [P, H_k, d] have gaps between a head's keys.
        _, heads, size, width = kv_cache.shape
        whole = kv_cache.stride(0) == heads * size * width and kv_cache.stride(2) == heads * width
        gathers = metadata.keys * heads * width * kv_cache.element_size() <= _MOST_GATHERED
        steps = ahead == 0 or (self.table().cache and ahead * max(heads, groups) <= MAX_PAIRS)
        return whole and gathers and steps


class _Step(NamedTuple):
    """What layers of one kind share in a step.

    Args:
        tokens: Of `attention_decode`, for the single tokens that come first.
        prompts: Of `attention_prefill`, for prompts one behind the other.
        places: Where in the pages the keys of the prompts lie, int64; None = all of them are new.
    """

    tokens: dict[str, Any]
    prompts: dict[str, Any]
    places: Tensor | None


def _visible(starts: Tensor, lengths: Tensor, rows: int, before: int | None) -> Tensor:
    """Return the first key that each row sees and the place behind its last, int32 [2, M], requests in a line.

    Starts are first rows and the end, int32 [B + 1]; lengths are keys up to a request's last row; `before` are keys
    before its own that a row sees at most, None = all of its request.
    """
    row = torch.arange(rows, dtype=torch.int32, device=starts.device)
    which = torch.searchsorted(starts, row, right=True) - 1
    ends = lengths.cumsum(0)
    own = ends[which] - starts[which + 1] + row
    first = ends[which] - lengths[which]
    return torch.stack((first if before is None else torch.maximum(first, own - before), own + 1)).int()


def _places(lengths: Tensor, table: Tensor, count: int, kv_cache: Tensor) -> Tensor:
    """Return the place in the pages, int32 [B, N], of each key of requests in a line, int64 [count]."""
    size, ends = kv_cache.shape[2], lengths.cumsum(0)
    key = torch.arange(count, device=lengths.device)
    which = torch.searchsorted(ends, key, right=True).clamp_(max=len(lengths) - 1)
    local = key - (ends - lengths)[which]
    page = table[which, (local // size).clamp_(max=table.shape[1] - 1)]
    return (page.long() * size + local % size).clamp_(0, kv_cache.shape[0] * size - 1)


class Backend(FlashAttentionBackend):
    """FlashAttention under its own name, with the classes above and larger pages."""

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return tokens of a page where the user named none."""
        return max(default_block_size, _PAGE)

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """Return what computes."""
        return _Implementation

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """Return what makes metadata."""
        return _Builder
