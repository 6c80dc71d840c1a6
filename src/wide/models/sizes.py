"""How large the matrices of a decoder layer are, dense and under a plan: the base of all accounting."""

from dataclasses import dataclass

from torch import Tensor, nn

from wide.models.block_spec import AttentionSpec, BlockSpec
from wide.plan import Half, Kept, LayerPlan, Skipped, Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Rows and columns that every token finds in one decoder layer; what routers skip is still counted.

    Args:
        query_rows: Of Q.
        kv_rows: Of K, and of V.
        output_columns: Of O.
        channels: Intermediate channels of the FFN, 0 where it is not known.
        reads: Channels of the stream that the layer reads, D, or D' of a `Stream`.
        after_attention: Channels of the stream between the halves.
        after_ffn: Channels of the stream after the layer.
        ffn_matrices: That an intermediate channel has a row or column of.
        shortcuts: Whether matrices take the stream from each subspace to the next.
    """

    query_rows: int
    kv_rows: int
    output_columns: int
    channels: int
    reads: int
    after_attention: int
    after_ffn: int
    ffn_matrices: int
    shortcuts: bool

    @property
    def query_output(self) -> int:
        """Weights of Q and O."""
        return self.query_rows * self.reads + self.output_columns * self.after_attention

    @property
    def key_value(self) -> int:
        """Weights of K and V."""
        return 2 * self.kv_rows * self.reads

    @property
    def ffn(self) -> int:
        """Weights of the FFN."""
        return self.channels * ((self.ffn_matrices - 1) * self.after_attention + self.after_ffn)

    @property
    def attention_shortcut(self) -> int:
        """Weights of the matrix beside the attention, 0 without."""
        return self.reads * self.after_attention * self.shortcuts

    @property
    def ffn_shortcut(self) -> int:
        """Weights of the matrix beside the FFN, 0 without."""
        return self.after_attention * self.after_ffn * self.shortcuts

    @property
    def total(self) -> int:
        """All of these weights."""
        return self.query_output + self.key_value + self.ffn + self.attention_shortcut + self.ffn_shortcut


def dense_sizes(spec: BlockSpec) -> LayerSizes:
    """Return the sizes of a layer as it is."""
    attention, ffn = spec.attention, spec.ffn
    return LayerSizes(
        query_rows=attention.query_width,
        kv_rows=attention.num_kv_heads * attention.head_dim,
        output_columns=attention.query_width,
        channels=0 if ffn is None else ffn.width,
        reads=spec.hidden_size,
        after_attention=spec.hidden_size,
        after_ffn=spec.hidden_size,
        ffn_matrices=0 if ffn is None else ffn.num_matrices,
        shortcuts=False,
    )


def planned_sizes(
    spec: BlockSpec, layer: LayerPlan, *, stream: Stream | None, heads: Tensor | None, is_last: bool
) -> LayerSizes:
    """Return the sizes of a layer without what its plan prunes for every token.

    Args:
        spec: Parts of the layer.
        layer: What it runs.
        stream: Of the plan.
        heads: Which query heads a `Kept` attention keeps, bool `[H_q]`; None counts K and V in full.
        is_last: Whether the layer is the last one, after which a `Stream` has its whole width again.
    """
    dense, attention = dense_sizes(spec), spec.attention
    kept = _kept_channels(layer.attention, dense.output_columns)
    kv_heads = kept_kv_heads(attention, layer.attention, heads)
    # A norm over the whole query width needs every query and key.
    query_rows = dense.query_rows if kept and attention.q_norm == "width" else kept
    narrow = spec.hidden_size if stream is None else stream.kept
    return LayerSizes(
        query_rows=query_rows,
        kv_rows=kv_heads * attention.head_dim,
        output_columns=kept,
        channels=_kept_channels(layer.ffn, dense.channels),
        reads=narrow,
        after_attention=narrow,
        after_ffn=spec.hidden_size if is_last else narrow,
        ffn_matrices=dense.ffn_matrices,
        shortcuts=stream is not None,
    )


def kept_kv_heads(spec: AttentionSpec, half: Half, heads: Tensor | None) -> int:
    """Return how many KV heads are still needed.

    A KV head goes when all its query heads are pruned, unless queries and keys are normed over their whole width,
    where every head takes part in the norm; without any query head, all go.

    Args:
        spec: Parts of the attention.
        half: What it runs.
        heads: Which query heads are kept, bool `[H_q]`; None says it of none.
    """
    if isinstance(half, Skipped) or (isinstance(half, Kept) and half.kept == 0):
        return 0
    if heads is None or spec.q_norm == "width":
        return spec.num_kv_heads
    return int(heads.view(spec.num_kv_heads, -1).any(-1).sum())


def _kept_channels(half: Half, width: int) -> int:
    if isinstance(half, Skipped):
        return 0
    return half.kept * half.grouping.group_size if isinstance(half, Kept) else width


def num_parameters(spec: BlockSpec, sizes: LayerSizes, layer: LayerPlan) -> int:
    """Return the parameters of a layer's projections at these sizes, biases and shortcuts included.

    Args:
        spec: Parts of the layer.
        sizes: Of its matrices.
        layer: What it runs; a skipped half has no bias either.
    """
    attention, ffn = spec.attention, spec.ffn
    total = sizes.total + sizes.query_rows * _has_bias(attention.query)
    total += sizes.kv_rows * (
        _has_bias(attention.key or attention.query) + _has_bias(attention.value or attention.query)
    )
    if not isinstance(layer.attention, Skipped):
        total += sizes.after_attention * _has_bias(attention.output)
    if ffn is not None:
        total += sizes.channels * _has_bias(ffn.up) * (ffn.num_matrices - 1)
        if not isinstance(layer.ffn, Skipped):
            total += sizes.after_ffn * _has_bias(ffn.down)
    return total


def _has_bias(linear: nn.Module) -> bool:
    return getattr(linear, "bias", None) is not None
