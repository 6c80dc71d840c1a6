"""A straight-line forward of Hugging Face decoders: every tensor of fixed shape, nothing read back by the host."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from wide.errors import ShapeError, UnsupportedModelError
from wide.inference.engine.cache import KvCache
from wide.inference.engine.layer import ForwardOptions, Masks, Residual, run_layer
from wide.inference.engine.side_stream import SideStream
from wide.inference.engine.views import CacheView, ContinuedView, PromptView, StepView
from wide.inference.operators.table import OperatorTable
from wide.inference.reading.model import read_model, require_same_outputs
from wide.inference.reading.weights import AttentionWeights, apply_norm


class Decoder:
    """Runs an attached Hugging Face model whose parts it knows, dense, routed or cut, over a cache.

    Weights are the model's own: separate query, key and value (and gate and up) projections are moved into one buffer
    each, which their modules then view, so that memory does not double and the model keeps working. In int8 the model
    computes with the engine's, too. All is read once: `Memory.follow` hands on thresholds that change, and changed
    weights need a new Decoder.

    Args:
        model: An attached causal LM in evaluation mode, LoRA merged.
        max_length: Largest position plus one; None = as many as the model has positions for.
        tables: Which operator skips at which size, for each layer; None = the defaults of `OperatorTable`.
        weights: Format of the layers' projections and the head: 'model', 'int8' or 'w8a8'.

    Raises:
        UnsupportedModelError: If a part of the model is none that the engine computes; the message names it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_length: int | None = None,
        tables: Sequence[OperatorTable] | None = None,
        weights: str = "model",
    ) -> None:
        if model.training:
            raise UnsupportedModelError("the engine is for inference; call model.eval() first")
        self._weights = read_model(model, max_length, weights)
        self.layers, self.embedding, self.head = self._weights.layers, self._weights.embedding, self._weights.head
        self.tables = tuple(tables or [OperatorTable.fixed()] * len(self.layers))
        self.max_length = self._weights.max_length
        self._side = SideStream(self.device) if self.device.type == "cuda" else None
        try:
            require_same_outputs(model, self.probe, self.max_length)
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Give the model's projections their own weights again, in memory of their own."""
        self._weights.taken.give_back()

    @property
    def quantised(self) -> Sequence[nn.Linear]:
        """The model's layers of which int8 copies were made."""
        return self._weights.taken.quantised

    @property
    def saved_bytes(self) -> int:
        """Memory that int8 weights spare."""
        return self._weights.taken.saved_bytes

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def widest(self) -> int:
        """Columns of the widest product of any layer; gate and up count as one."""
        parts = [part for layer in self.layers for part in layer.parts]
        reading = [part.qkv if isinstance(part, AttentionWeights) else part.gated.both for part in parts]
        return max(linear.outputs for linear in reading)

    def new_cache(self, batch: int, room: int | None = None, *, kept: bool = True) -> KvCache:
        """Return an empty cache for `batch` sequences of at most `room` tokens (None: `max_length`).

        Unless it is kept, all layers overwrite the same keys and values in turn.
        """
        part = self._weights.specs[0].attention
        shape = (len(self.layers) if kept else 1, batch, part.num_kv_heads, room or self.max_length, part.head_dim)
        lengths = torch.zeros(batch, dtype=torch.int32, device=self.device)
        # Places beyond a sequence are masked by length, but 0 * NaN in a masked product would still be NaN.
        k, v = (torch.zeros(shape, dtype=self.embedding.dtype, device=self.device) for _ in range(2))
        return KvCache(k=k, v=v, lengths=lengths, zeros=torch.zeros_like(lengths))

    @torch.no_grad()
    def forward(self, x: Tensor, view: CacheView, run: ForwardOptions) -> Residual:
        """Run tokens, or embeddings [..., D], over any view of keys and values; return the stream, see `logits`."""
        weights = self._weights
        if x.is_floating_point():
            hidden = x.reshape(-1, x.shape[-1])
        else:
            hidden = _times(functional.embedding(x.reshape(-1), self.embedding), weights.embedding_scale)
        hidden = _times(hidden, weights.input_scale)
        stream = Residual(hidden if weights.entry is None else functional.linear(hidden, weights.entry), None)
        with nullcontext() if self._side is None else self._side.joined():
            for index, layer in enumerate(self.layers):
                forced = Masks() if run.forced is None else Masks(*run.forced[index])
                table = run.table or self.tables[index]
                stream, masks = run_layer(stream, layer, view, table, routed=run.routed, forced=forced, side=self._side)
                if run.record is not None:
                    run.record.append(masks)
        return stream

    @torch.no_grad()
    def logits(self, stream: Residual, run: ForwardOptions, rows: Tensor | None = None) -> Tensor:
        """Return the logits [rows, V] of what `forward` gave, of these rows (int64) or of all."""
        total, addend = stream
        if rows is not None:
            total, addend = total[rows], None if addend is None else addend[rows]
        weights = self._weights
        logits = self.head.dense(apply_norm(weights.norm, total, addend, (run.table or self.tables[-1]).backend)[1])
        if weights.logit_scale is not None:
            logits *= weights.logit_scale
        cap = weights.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @torch.no_grad()
    def prompt(
        self, x: Tensor, cache: KvCache, run: ForwardOptions, *, past: int = 0, lengths: Tensor | None = None
    ) -> Residual:
        """Run several tokens of each sequence into the cache and return the residual stream.

        Args:
            x: Tokens [B, T], or their embeddings [B, T, D]; shorter sequences are padded on the right with anything.
            cache: Overwritten from place `past` on.
            past: Tokens that every sequence of the cache has already.
            lengths: Tokens of each sequence after this call, int32 [B]; None = past + T.
        """
        batch, length = x.shape[:2]
        if batch != cache.batch or past + length > cache.room:
            raise ShapeError(
                f"{past} + {length} tokens of {batch} sequences do not fit a cache of {cache.batch} x {cache.room}"
            )
        stream = self.forward(x, PromptView(cache, batch, length, past), run)
        if lengths is None:
            cache.lengths.fill_(past + length)
        else:
            cache.lengths.copy_(lengths)
        return stream

    def prefill(
        self, ids: Tensor, lengths: Tensor, cache: KvCache, run: ForwardOptions, starts: Tensor | None = None
    ) -> Tensor:
        """Fill the cache and return the logits after each sequence's last token, [B, V]; the host is told no length.

        Args:
            ids: Tokens, [B, T]; shorter sequences are padded on the right with any token.
            lengths: Tokens of each sequence, earlier ones included, int32 [B], on the device.
            cache: Overwritten.
            starts: Earlier tokens of the only sequence, int32 [1], with room for T more; None = from the beginning.
        """
        if starts is None:
            stream = self.prompt(ids, cache, run, lengths=lengths)
            before = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
        else:
            stream = self.forward(ids, ContinuedView(cache, ids.shape[1], starts), run)
            cache.lengths.copy_(lengths)
            before = -starts.long()
        return self.logits(stream, run, before + lengths - 1)

    def prefill_logits(self, ids: Tensor, cache: KvCache, run: ForwardOptions) -> Tensor:
        """As `prefill` of unpadded tokens, returning the logits after every token, [B, T, V]."""
        return self.logits(self.prompt(ids, cache, run), run).view(*ids.shape, -1)

    @torch.no_grad()
    def step(self, ids: Tensor, cache: KvCache, run: ForwardOptions) -> Tensor:
        """Add a token [B] to each sequence, which the cache has room for, and return the logits after it, [B, V]."""
        view = StepView(cache)
        logits = self.logits(self.forward(ids, view, run), run)
        cache.lengths.copy_(view.ends)
        return logits

    def truncated(self, num_layers: int) -> "Decoder":
        """Return a decoder of the first layers only, for measurements; weights and tables are shared."""
        short = copy.copy(self)
        short.layers = self.layers[:num_layers]
        return short

    def probe(self, ids: Tensor) -> Tensor:
        """Return dense logits [B, T, V] in plain PyTorch, for a comparison with the model's own."""
        run = ForwardOptions(routed=False, table=OperatorTable(backend="torch"))
        return self.prefill_logits(ids, self.new_cache(ids.shape[0], ids.shape[1]), run)


def _times(x: Tensor, factor: float | None) -> Tensor:
    return x if factor is None else x * factor
