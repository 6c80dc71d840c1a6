"""Attention over vLLM's pages that skips (token, group) pairs: a backend, its metadata and its kernel calls.

It is vLLM's FlashAttention, and stays it wherever nothing is won: steps that mix prompts with single tokens or with
keys of the cache, and graphs of such steps. There, skipped heads are set to zero afterwards.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.attention import _encode_layer_name
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from wide.inference.operators.table import OperatorTable
from wide.kernels.attention_decode import attention_decode
from wide.kernels.attention_prefill import attention_prefill
from wide.kernels.clear_skipped import clear_skipped
from wide.kernels.reorder import reorder_sequences

# Keys that the kernel of a step reads at a time; smaller pages would slow it down.
_PAGE = 64
# Every program of a step counts all (sequence, unit) pairs in its registers.
_MAX_PAIRS = 16384


def skips_in(attention: Any, table: Callable[[], OperatorTable]) -> bool:
    """Let an attention layer of vLLM skip, if it runs FlashAttention; return whether it does.

    Args:
        table: Gives what runs when it is first needed: measurements may come after the layer is made.
    """
    implementation = attention.impl
    if type(implementation) is not FlashAttentionImpl:
        return False
    implementation.__class__ = _Implementation
    implementation.table = table
    attention.attn_backend = Backend
    return True


def attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return heads [M, H_q d] of a layer that skips, zeros where skipped; its keys and values go into the pages.

    Args:
        attention: The layer, of which `skips_in` was true.
        q: Rotated queries, [M, H_q d]; those of skipped heads may hold anything.
        mask: bool [M, N_G].
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
    """Notes on the host whether all keys of a step are new."""

    # Graphs of mixed steps would be replayed for steps of single tokens.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return FlashAttention's metadata, with `is_fresh` and room for what layers share."""
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        known, starts = common_attn_metadata.seq_lens_cpu_upper_bound, common_attn_metadata.query_start_loc_cpu
        # An upper bound that is the number of new tokens is exact.
        found.is_fresh = (
            known is not None and found.max_query_len > 1 and torch.equal(known.long(), starts.long().diff())
        )
        found.bounds = None
        return found

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Return metadata of a graph, whose steps may have keys in the cache."""
        found = super().build_for_cudagraph_capture(common_attn_metadata)
        found.is_fresh = False
        return found


class _Implementation(FlashAttentionImpl):
    """FlashAttention that takes a mask in the place of the output's scale."""

    table: Callable[[], OperatorTable]

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
        rows = attn_metadata.num_actual_tokens
        q, mask = query[:rows], mask[:rows]
        if attn_metadata.max_query_len == 1 and self._reads_pages(kv_cache, mask):
            keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
            window = self.sliding_window[0] + 1 if self.sliding_window[0] >= 0 else None
            found = attention_decode(
                q,
                keys,
                values,
                attn_metadata.seq_lens[:rows],
                mask,
                pages=attn_metadata.block_table[:rows],
                window=window,
                scale=self.scale,
                backend="triton",
            )
        elif attn_metadata.is_fresh and self.table().how("attention", attn_metadata.max_query_len) != "dense":
            found = self._prompts(q, key[:rows], value[:rows], mask, attn_metadata)
        else:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
            clear_skipped(output[:rows].flatten(1), mask, backend="triton")
            return output
        output[:rows].copy_(found)
        return output

    def _reads_pages(self, kv_cache: Tensor, mask: Tensor) -> bool:
        # Pages in another order than [P, H_k, d] have gaps between a head's keys.
        _, heads, size, width = kv_cache.shape
        whole = kv_cache.stride(0) == heads * size * width and kv_cache.stride(2) == heads * width
        fits = mask.shape[0] * max(heads, mask.shape[1]) <= _MAX_PAIRS
        return self.table().cache and whole and fits

    def _prompts(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, metadata: Any) -> Tensor:
        """Return the heads [M, H_q, d] of prompts one behind the other, of which nothing is cached."""
        choice = self.table().choice("attention", metadata.max_query_len)
        starts = metadata.query_start_loc
        options: dict[str, Any] = {}
        windowed = 0 <= self.sliding_window[0] < metadata.max_query_len - 1
        if starts.shape[0] > 2 or windowed:
            if metadata.bounds is None:
                metadata.bounds = _bounds(starts, q.shape[0], self.sliding_window[0] if windowed else None)
            options["runs"] = metadata.bounds
        order = reorder_sequences(mask[None], backend="triton")
        return attention_prefill(
            q[None],
            k[None],
            v[None],
            order,
            **options,
            scale=self.scale,
            zero_skipped=True,
            backend=choice.backend,
            tile=choice.tile,
        )[0]


def _bounds(starts: Tensor, rows: int, before: int | None) -> Tensor:
    """Return the first key that each row sees and the place behind its last, int32 [2, M].

    Args:
        starts: First row of each prompt, and the end, int32 [B + 1].
        before: Keys before its own that a row sees at most; None = all of its prompt.
    """
    row = torch.arange(rows, dtype=torch.int32, device=starts.device)
    first = starts[torch.searchsorted(starts, row, right=True) - 1]
    return torch.stack((first if before is None else torch.maximum(first, row - before), row + 1)).int()


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
