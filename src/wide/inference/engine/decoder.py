"""A straight-line forward of Hugging Face decoders: every tensor of fixed shape, nothing read back by the host."""

import copy
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from wide.errors import ShapeError, UnsupportedModelError
from wide.inference.engine.cache import KvCache
from wide.inference.engine.paged import PagedStep
from wide.inference.engine.run import Run
from wide.inference.engine.side_stream import Beside
from wide.inference.operators.attention import attend_prompt, sequence_order
from wide.inference.operators.products import gated_product, project_queries, sum_groups
from wide.inference.operators.table import OperatorName, OperatorTable
from wide.inference.reading.model import read_ends, require_same_outputs
from wide.inference.reading.stacking import unstack_linears
from wide.inference.reading.weights import (
    AttentionWeights,
    FeedForwardWeights,
    RuntimeRouter,
    Sublayer,
    apply_norm,
    read_layer,
)
from wide.kernels.attention_decode import attention_decode
from wide.kernels.clear_skipped import clear_skipped
from wide.kernels.reordering import Reordering
from wide.kernels.rope import rope_to_cache
from wide.kernels.route import MAX_FEW_ROWS, norm_route, route

# A product of more rows is bound by its arithmetic, and slower beside a router.
_MAX_ROWS_BESIDE = 512
_SDPA_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(kw_only=True, slots=True)
class _Pass:
    """What all layers of one forward share; `ends` is None in a prefill, `table` the running layer's."""

    run: Run
    table: OperatorTable
    cache: KvCache | PagedStep
    batch: int
    length: int
    starts: Tensor
    past: int = 0
    ends: Tensor | None = None
    _seen: Tensor | None = None

    def seen(self) -> Tensor | None:
        """Return which keys [T, past + T] each new place sees; None without a past, where it is plainly causal."""
        if self.past and self._seen is None:
            square = self.starts.new_ones(self.length, self.past + self.length, dtype=torch.bool)
            self._seen = square.tril(self.past)
        return self._seen

    def memory(self, index: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values of a layer, and where new ones go if not at their positions."""
        return self.cache.memory(index) if isinstance(self.cache, PagedStep) else (*self.cache.layer(index), None)


class Decoder:
    """Runs an attached (or plain) Hugging Face model whose parts it knows, dense or routed, over a static cache.

    Weights are the model's own: separate query, key and value (and gate and up) projections are moved into one buffer
    each, which their modules then view, so that memory does not double and the model keeps working. Routers are read
    once: call `follow` after changing thresholds, and make a new Decoder after changing weights.

    Args:
        model: A causal LM in evaluation mode, LoRA merged.
        max_length: Largest position plus one.
        tables: Which operator skips at which size, for each layer; None = the defaults of `OperatorTable`.
        checked: Compare a short dense forward with the model's own and refuse a model that differs.

    Raises:
        UnsupportedModelError: If a part of the model is none that the engine computes; the message names it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_length: int,
        tables: Sequence[OperatorTable] | None = None,
        checked: bool = True,
    ) -> None:
        """Read the model; see the class."""
        if model.training:
            raise UnsupportedModelError("the engine is for inference; call model.eval() first")
        ends = read_ends(model, max_length)
        self._specs = ends.specs
        self.embedding, self.head, self.norm = ends.embedding, ends.head, ends.norm
        self.head_bias, self._ends = ends.head_bias, ends
        try:
            self.layers = tuple(map(read_layer, ends.specs, ends.angles))
            self.tables = tuple(tables or [OperatorTable.fixed()] * len(self.layers))
            self.max_length = max_length
            self._beside = Beside(self.device) if self.device.type == "cuda" else None
            if checked:
                require_same_outputs(model, self.probe, max_length)
        except UnsupportedModelError:
            self.unstack()
            raise

    def unstack(self) -> None:
        """Give the projections that were laid together memory of their own again."""
        for spec in self._specs:
            parts = [spec.attention.query, spec.attention.key, spec.attention.value]
            parts += [] if spec.ffn is None else [spec.ffn.gate, spec.ffn.up]
            unstack_linears([part for part in parts if isinstance(part, nn.Linear)])

    def follow(self) -> None:
        """Let all routers decide by the thresholds that the model's have now, in captured graphs, too."""
        for layer in self.layers:
            for router in (layer.attention.router, layer.ffn.router):
                if router is not None:
                    router.follow()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def widest(self) -> int:
        """Columns of the widest product of any layer; gate and up count as one."""
        gated = (each.ffn.down.shape[1] * (1 if each.ffn.gated.up is None else 2) for each in self.layers)
        return max(*gated, *(len(each.attention.qkv) for each in self.layers))

    def new_cache(self, batch: int, room: int | None = None, *, kept: bool = True) -> KvCache:
        """Return an empty cache for `batch` sequences of at most `room` tokens (None: `max_length`).

        Unless it is kept, all layers overwrite the same keys and values in turn.
        """
        part = self.layers[0].attention
        shape = (len(self.layers) if kept else 1, batch, part.num_kv_heads, room or self.max_length, part.head_dim)
        return KvCache.allocate(shape, dtype=self.embedding.dtype, device=self.device)

    @torch.no_grad()
    def prompt(
        self, x: Tensor, cache: KvCache, run: Run, *, past: int = 0, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run several tokens of each sequence into the cache and return their hidden states.

        Args:
            x: Tokens [B, T], or their embeddings [B, T, D]; shorter sequences are padded on the right with anything.
            cache: Overwritten from place `past` on.
            run: How.
            past: Tokens that every sequence of the cache has already.
            lengths: Tokens of each sequence after this call, int32 [B]; None = past + T.

        Returns:
            The residual stream before the last sublayer's output, and that output, both [B * T, D]: see `logits`.
        """
        batch, length = x.shape[:2]
        if batch != cache.batch or past + length > cache.room:
            raise ShapeError(
                f"{past} + {length} tokens of {batch} sequences do not fit a cache of {cache.batch} x {cache.room}"
            )
        starts = cache.zeros + past if past else cache.zeros
        shared = _Pass(run=run, table=self.tables[0], cache=cache, batch=batch, length=length, starts=starts, past=past)
        hidden = self._layers(shared, x)
        if lengths is None:
            cache.lengths.fill_(past + length)
        else:
            cache.lengths.copy_(lengths)
        return hidden

    @torch.no_grad()
    def paged(self, ids: Tensor, step: PagedStep, run: Run) -> tuple[Tensor, Tensor]:
        """Run a step of continuous batching over transformers' cache and return what `prompt` returns.

        Args:
            ids: Tokens of all requests, [1, Q].
            step: Where they stand, and their keys.
            run: How.
        """
        shared = _Pass(run=run, table=self.tables[0], cache=step, batch=ids.shape[1], length=1, starts=step.positions)
        return self._layers(shared, ids)

    @torch.no_grad()
    def logits(self, hidden: tuple[Tensor, Tensor], run: Run, rows: Tensor | None = None) -> Tensor:
        """Return the logits [rows, V] of what `prompt` gave, of these rows (int64) or of all."""
        residual, addend = hidden if rows is None else (hidden[0][rows], hidden[1][rows])
        return self._logits(residual, addend, run)

    def prefill(self, ids: Tensor, lengths: Tensor, cache: KvCache, run: Run) -> Tensor:
        """Fill the cache from its beginning and return the logits after each sequence's last token, [B, V].

        Args:
            ids: Tokens, [B, T]; shorter sequences are padded on the right with any token.
            lengths: Tokens of each sequence, int32 [B], on the device.
            cache: Overwritten.
            run: How.
        """
        hidden = self.prompt(ids, cache, run, lengths=lengths)
        starts = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
        return self.logits(hidden, run, starts + lengths - 1)

    def prefill_logits(self, ids: Tensor, cache: KvCache, run: Run) -> Tensor:
        """As `prefill` of unpadded tokens, returning the logits after every token, [B, T, V]."""
        return self.logits(self.prompt(ids, cache, run), run).view(*ids.shape, -1)

    @torch.no_grad()
    def step(self, ids: Tensor, cache: KvCache, run: Run) -> Tensor:
        """Add one token to each sequence and return the logits after it, [B, V]; the cache's lengths move on.

        Args:
            ids: Tokens, [B].
            cache: With room for another token; the device does not check.
            run: How.
        """
        ends = cache.lengths + 1
        shared = _Pass(
            run=run, table=self.tables[0], cache=cache, batch=ids.shape[0], length=1, starts=cache.lengths, ends=ends
        )
        residual, addend = self._layers(shared, ids)
        cache.lengths.copy_(ends)
        return self._logits(residual, addend, run)

    def truncated(self, num_layers: int) -> "Decoder":
        """Return a decoder of the first layers only, for measurements; weights and tables are shared."""
        short = copy.copy(self)
        short.layers = self.layers[:num_layers]
        return short

    def probe(self, ids: Tensor) -> Tensor:
        """Return dense logits [B, T, V] in plain PyTorch, for a comparison with the model's own."""
        run = Run(routed=False, table=OperatorTable(backend="torch"))
        return self.prefill_logits(ids, self.new_cache(ids.shape[0], ids.shape[1]), run)

    def _layers(self, shared: _Pass, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream and what the last sublayer adds to it, both [M, D]."""
        if x.is_floating_point():
            residual = x.reshape(-1, x.shape[-1])
        else:
            residual = _times(functional.embedding(x.reshape(-1), self.embedding), self._ends.embedding_scale)
        residual = _times(residual, self._ends.input_scale)
        addend: Tensor | None = None
        with nullcontext() if self._beside is None else self._beside.joined():
            for index, layer in enumerate(self.layers):
                shared.table = shared.run.table or self.tables[index]
                forced = (None, None) if shared.run.forced is None else shared.run.forced[index]
                residual, normed, attention_mask = self._enter(layer.attention, residual, addend, forced[0], shared)
                attended = self._attention(layer.attention, index, normed, attention_mask, shared)
                attended = self._leave(layer.attention, attended, shared)
                if layer.parallel:
                    ffn_mask = self._decide(layer.ffn, residual, normed, forced[1], shared)
                    residual = residual + attended
                else:
                    residual, normed, ffn_mask = self._enter(layer.ffn, residual, attended, forced[1], shared)
                addend = self._leave(layer.ffn, self._feed_forward(layer.ffn, normed, ffn_mask, shared), shared)
                if shared.run.record is not None:
                    shared.run.record.append((_own(layer.attention, attention_mask), ffn_mask))
        assert addend is not None
        return residual, addend

    def _enter(
        self, part: Sublayer, residual: Tensor, addend: Tensor | None, forced: Tensor | None, shared: _Pass
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add, norm and decide: return the stream, its norm, and the mask (None: everything executes)."""
        backend, norm, router = shared.table.backend, part.norm, _deciding(part, forced, shared)
        rows = residual.shape[0]
        fits = rows <= MAX_FEW_ROWS and self._apart(part, rows, shared) is None
        if fits and router is not None and norm is not None and not norm.centered:
            total, normed, mask = norm_route(
                residual,
                norm.weight,
                router.weights,
                reads_residual=router.source.reads_residual,
                addend=addend,
                eps=norm.eps,
                unit_offset=norm.unit_offset,
                backend=backend,
            )
            return total, normed, mask if forced is None else forced
        total, normed = apply_norm(norm, residual, addend, backend)
        return total, normed, self._decide(part, total, normed, forced, shared)

    def _decide(
        self, part: Sublayer, total: Tensor, normed: Tensor, forced: Tensor | None, shared: _Pass
    ) -> Tensor | None:
        """Return the mask of a sublayer that reads a sum and its norm, None where nothing is skipped."""
        router = _deciding(part, forced, shared)
        if router is None:
            return None
        seen = total if router.source.reads_residual else normed
        beside = self._apart(part, seen.shape[0], shared)
        call = functools.partial(route, seen, router.weights, beside=beside is not None, backend=shared.table.backend)
        mask = call() if beside is None else beside.begin(call)
        return mask if forced is None else forced

    def _apart(self, part: Sublayer, rows: int, shared: _Pass) -> Beside | None:
        """Return where the router runs if its mask may come later than the sublayer's first product, which is dense."""
        name: OperatorName = "query" if isinstance(part, AttentionWeights) else "gate_up"
        return self._beside if rows <= _MAX_ROWS_BESIDE and shared.table.how(name, rows) == "dense" else None

    def _wait(self) -> None:
        """Wait for a router that runs beside, before its mask is read."""
        if self._beside is not None:
            self._beside.wait()

    def _leave(self, part: Sublayer, out: Tensor, shared: _Pass) -> Tensor:
        """Return what a sublayer adds to the stream, given its output [M, D]."""
        if part.post_norm is not None:
            out = apply_norm(part.post_norm, out, None, shared.table.backend)[1]
        return _times(out, part.multiplier)

    def _attention(
        self, weights: AttentionWeights, index: int, x: Tensor, mask: Tensor | None, shared: _Pass
    ) -> Tensor:
        """Return the output of the attention half, [M, D]; `mask` holds the router's extra groups."""
        table, heads = shared.table, weights.num_query_heads
        order: Reordering | None = None
        q_norm, k_norm = weights.q_norm, weights.k_norm
        if mask is None or weights.norms_width:
            qkv = functional.linear(x, weights.qkv, weights.qkv_bias)
            q, kv = qkv[:, : heads * weights.head_dim], qkv[:, heads * weights.head_dim :]
        else:
            q, kv, order = _project(x, weights, mask, table)
        # Then heads are turned that nobody reads, while the router still runs.
        is_late = self._beside is not None and self._beside.runs
        keys, values = kv.chunk(2, 1)
        if weights.norms_width:
            q, keys = (apply_norm(*pair, None, table.backend)[1] for pair in ((q_norm, q), (k_norm, keys)))
            q_norm = k_norm = None
        shape = (shared.batch, shared.length)
        q, keys, values = (t.unflatten(1, (-1, weights.head_dim)).unflatten(0, shape) for t in (q, keys, values))
        k_cache, v_cache, places = shared.memory(index)
        own = _own(weights, mask)
        q = rope_to_cache(
            q,
            keys,
            values,
            weights.cos,
            weights.sin,
            shared.starts,
            k_cache,
            v_cache,
            places=places,
            # One token's skipped heads cost less than to look them up.
            mask=own if shared.ends is None and not is_late else None,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=1e-6 if q_norm is None else q_norm.eps,
            unit_offset=q_norm is not None and q_norm.unit_offset,
            interleaved=weights.asked.interleaved,
            backend=table.backend,
        )
        if isinstance(shared.cache, PagedStep):
            self._wait()
            needs_zeros = own is not None and table.how("output", own.shape[0]) == "dense"
            options: dict[str, Any] = {"scale": weights.asked.scale, "soft_cap": weights.asked.soft_cap}
            options |= {"backend": table.backend, "zero_skipped": needs_zeros}
            mixed = shared.cache.attend(index, q[:, 0], own, **options)
        else:
            mixed = self._mix(weights, q, k_cache, v_cache, own, order, shared)
        mixed = mixed.reshape(x.shape[0], -1)
        if own is None:
            return functional.linear(mixed, weights.output, weights.output_bias)
        return sum_groups("output", mixed, weights.output, weights.output_bias, own, table)

    def _mix(
        self,
        weights: AttentionWeights,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        order: Reordering | None,
        shared: _Pass,
    ) -> Tensor:
        """Return attention output [B, T, H_q, d]; skipped heads are zero where the output product is dense."""
        table, asked = shared.table, weights.asked
        scores: dict[str, Any] = {"scale": asked.scale, "soft_cap": asked.soft_cap, "window": asked.window}
        needs_zeros = mask is not None and table.how("output", mask.shape[0]) == "dense"
        if shared.ends is not None:
            self._wait()
            # Without a mask every pair is read; skipped ones come back as zeros otherwise, which costs nothing where
            # groups are whole KV heads. Smaller ones would share out each KV head over several programs.
            zeroes = mask is not None and needs_zeros and k.shape[2] % mask.shape[1] == 0
            skips = mask if table.cache or zeroes else None
            out = attention_decode(q[:, 0], k, v, shared.ends, skips, **scores, backend=table.backend)
            return _zeroed(out.unsqueeze(1), mask if needs_zeros and skips is None else None, table.backend)
        seen = shared.past + shared.length
        k, v = k[:, :seen], v[:, :seen]
        if asked.window is not None and asked.window >= seen:
            scores["window"] = None
        # The library's attention knows neither windows nor soft caps.
        is_plain = scores["window"] is scores["soft_cap"] is None
        if not is_plain or (mask is not None and table.how("attention", shared.length) == "many"):
            self._wait()
            sequences = sequence_order(mask, order, q, table.backend)
            return attend_prompt(q, k, v, sequences, table, length=shared.length, zero_skipped=needs_zeros, **scores)
        out = _dense_attention(q, k, v, asked.scale, shared.seen())
        self._wait()
        return _zeroed(out, mask if needs_zeros else None, table.backend)

    def _feed_forward(self, weights: FeedForwardWeights, x: Tensor, mask: Tensor | None, shared: _Pass) -> Tensor:
        table = shared.table
        ready = self._beside.wait if self._beside is not None and self._beside.runs else None
        product = gated_product(x, weights.gated, mask, table, ready)
        if mask is None:
            return functional.linear(product, weights.down, weights.down_bias)
        return sum_groups("down", product, weights.down, weights.down_bias, mask, table)

    def _logits(self, residual: Tensor, addend: Tensor, run: Run) -> Tensor:
        normed = apply_norm(self.norm, residual, addend, (run.table or self.tables[-1]).backend)[1]
        logits = functional.linear(normed, self.head, self.head_bias)
        scale, cap = self._ends.logit_scale, self._ends.logit_cap
        if scale is not None:
            logits *= scale
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _project(
    x: Tensor, weights: AttentionWeights, mask: Tensor, table: OperatorTable
) -> tuple[Tensor, Tensor, Reordering | None]:
    """Return queries [M, H_q d] of executing groups (others hold anything), keys and values, and the reordering if any.

    The mask holds the router's extra groups, bool [M, N_G + extra].
    """
    assert weights.router is not None
    width = weights.num_query_heads * weights.head_dim
    how = table.how("query", x.shape[0])
    qkv, bias = weights.qkv, weights.qkv_bias
    if how == "dense" or (how == "few" and weights.router.extra):
        few = how == "few"
        whole = project_queries(x, qkv, bias, mask, table)[0] if few else functional.linear(x, qkv, bias)
        return whole[:, :width], whole[:, width:], None
    q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    kv = functional.linear(x, qkv[width:], kv_bias)
    q, order = project_queries(x, qkv[:width], q_bias, mask[:, : weights.router.source.num_groups], table)
    return q, kv, order


def _own(part: Sublayer, mask: Tensor | None) -> Tensor | None:
    """Return the mask without the router's extra groups, bool [M, N_G]; None where there is no router."""
    return None if mask is None or part.router is None else mask[:, : part.router.source.num_groups]


def _deciding(part: Sublayer, forced: Tensor | None, shared: _Pass) -> RuntimeRouter | None:
    """Return the router that has to run, None where nothing may be skipped."""
    router = part.router if shared.run.routed else None
    return None if router is not None and not router.decides and forced is None else router


def _times(x: Tensor, factor: float | None) -> Tensor:
    return x if factor is None else x * factor


def _zeroed(heads: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    """Return attention output [B, T, H_q, d], just made, with skipped groups at zero; None leaves it."""
    if mask is None:
        return heads
    values = heads.reshape(mask.shape[0], -1)
    clear_skipped(values, mask, backend=backend)
    return values.view(heads.shape)


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None) -> Tensor:
    """Return causal attention [B, T, H_q, d] of the last T places by the library's fastest kernel."""
    attend: Any = functional.scaled_dot_product_attention
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    # The library's own causal mask begins at the first place.
    options: dict[str, Any] = {"is_causal": seen is None, "attn_mask": seen, "scale": scale}
    options["enable_gqa"] = q.shape[2] != k.shape[2]
    if not q.is_cuda:
        return attend(*heads, **options).transpose(1, 2)
    with sdpa_kernel(_SDPA_ORDER, set_priority=True):
        return attend(*heads, **options).transpose(1, 2)
