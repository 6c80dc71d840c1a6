"""Give a model the shape that is left of it: the one path from a dense structure to a sliced one.

Materialising runs it on real weights with the heads and channels that a plan keeps; loading a checkpoint runs it on
empty modules, whose values come from the file. The family's own modules keep running what is left of a sublayer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wide.errors import AdapterError, UnsupportedModelError
from wide.materialisation.shape import LayerShape, ModelShape
from wide.materialisation.stream import replace, rotate_embedding, rotate_layer
from wide.models.block_spec import AttentionSpec, BlockSpec, SublayerSpec, feed_forward, plain_linear
from wide.models.discovery import discover
from wide.models.gates import GATHER_NAME, Pending, bypassed, cache_of, install_attention_gates
from wide.models.pretrained import is_added


class AbsentFeedForward(nn.Module):
    """Stands where an FFN was; it adds nothing, or the bias `[D]` that is all that is left of it, and costs nothing."""

    def __init__(self, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """Return what is added to the residual stream, `[]` or `[D]`."""
        return hidden_states.new_zeros(()) if self.bias is None else self.bias


class AbsentAttention(AbsentFeedForward):
    """Stands where an attention was, with its place in the cache.

    If it `counts_tokens`, the model asks this layer of the cache how many tokens it holds; one number per token is then
    kept there.
    """

    def __init__(self, layer_index: int, *, counts_tokens: bool, bias: Tensor | None = None) -> None:
        super().__init__(bias)
        self.layer_idx = layer_index
        self.counts_tokens = counts_tokens

    def forward(self, hidden_states: Tensor, *_args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return what is added to the residual stream, `[]` or `[D]`, and no attention weights."""
        cache = cache_of(kwargs)
        if self.counts_tokens and cache is not None:
            numbers = hidden_states[..., :1].unsqueeze(1)
            cache.update(numbers, numbers, self.layer_idx)
        return super().forward(hidden_states), None


class HeadGather(nn.Module):
    """Picks the heads that an attention function sees, for query heads that no longer share KV heads evenly.

    Grouped attention repeats every KV head the same number of times. Where pruning leaves different numbers of query
    heads to the KV heads, each query head picks its own: the cache holds every KV head once, the attention function
    sees as many KV heads as query heads. The lists are int64 buffers, which are part of a checkpoint.

    Args:
        kv_index: For every query head that is left, the KV head it reads, as the cache counts them.
        query_index: Query heads to pick where all of them had to be computed; None picks none out.
    """

    kv_index: Tensor
    query_index: Tensor | None

    def __init__(self, kv_index: Sequence[int], query_index: Sequence[int] | None = None) -> None:
        super().__init__()
        self.register_buffer("kv_index", torch.tensor(kv_index, dtype=torch.int64))
        picked = None if query_index is None else torch.tensor(query_index, dtype=torch.int64)
        self.register_buffer("query_index", picked)
        self.done = Pending()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value `[B, H', T, d]`, with as many KV heads as query heads."""
        self.done.value = True
        if self.query_index is not None:
            query = query.index_select(1, self.query_index)
        return query, key.index_select(1, self.kv_index), value.index_select(1, self.kv_index)


def _add_gather(attention: nn.Module, gather: HeadGather) -> None:
    install_attention_gates()
    attention.add_module(GATHER_NAME, gather)
    attention.num_key_value_groups = 1  # type: ignore[assignment]
    attention.register_forward_pre_hook(_expect_gather)
    attention.register_forward_hook(_check_gather)


def _expect_gather(attention: nn.Module, _args: tuple[Any, ...]) -> None:
    getattr(attention, GATHER_NAME).done.value = None


def _check_gather(attention: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
    if not getattr(attention, GATHER_NAME).done.take():
        raise bypassed(attention, f"the KV heads of a sliced {type(attention).__name__} were not gathered")


class HeadCounts:
    """The model's configuration, seen by one attention whose numbers of query and KV heads are its own."""

    def __init__(self, base: Any, num_attention_heads: int, num_key_value_heads: int) -> None:
        self.base = base
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads

    def __getattr__(self, name: str) -> Any:
        if name == "base" or name.startswith("__"):
            # A copy is built before its attributes are set.
            raise AttributeError(name)
        return getattr(self.base, name)


def check_cuttable(spec: BlockSpec, sublayer: str) -> None:
    """Raise UnsupportedModelError if 'attention' or 'ffn' is of experts, quantised, or has unknown parameters."""
    part: Any = spec.attention if sublayer == "attention" else feed_forward(spec)
    sizes = {1, part.head_dim} if sublayer == "attention" else {1}
    if sublayer == "attention" and part.q_norm == "width":
        sizes |= {part.query_width, part.num_kv_heads * part.head_dim}
    known = {id(parameter) for linear in part.linears() for parameter in plain_linear(linear, spec.index).parameters()}
    for name, parameter in part.module.named_parameters():
        # What attach and LoRA added goes before anything is cut.
        if id(parameter) not in known and parameter.numel() not in sizes and not is_added(name):
            raise UnsupportedModelError(
                f"layer {spec.index}: {type(part.module).__name__} has the parameter {name}, which may belong to "
                "single heads or channels, so it cannot be cut. Use how='masked'"
            )


def cut(model: Any, specs: Sequence[BlockSpec], shape: ModelShape, channels: Mapping[int, Tensor]) -> None:
    """Cut every layer's heads and channels to what is left, in place; the residual stream is not touched.

    `channels` are the intermediate channels that are left, int64, by layer; the first ones where a layer is not named.
    Raises UnsupportedModelError if the structure does not allow it.
    """
    config = model.config.get_text_config()
    of_all = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    kinds = list(getattr(config, "layer_types", None) or [of_all] * len(specs))
    # A cache is asked for its length through its first layer and the first one of every kind; of layers with a window,
    # it takes tokens back from all.
    counting = {at for at, kind in enumerate(kinds) if kind != "full_attention" or kinds.index(kind) == at} | {0}
    for position, (spec, left) in enumerate(zip(specs, shape.layers, strict=True)):
        if not left.query_heads:
            _leave_out_attention(spec, left, counts_tokens=position in counting)
        elif left.query_heads != "dense":
            _narrow_attention(spec, left.query_heads)
        if not left.channels:
            _leave_out_ffn(spec, left)
        elif left.channels != "dense":
            _narrow_ffn(spec, channels.get(position, torch.arange(left.channels)))


def cut_empty(model: nn.Module, shape: ModelShape) -> None:
    """Give a dense model of a family the shape of a checkpoint, in place; its values mean nothing afterwards.

    Raises AdapterError if the shape belongs to another model.
    """
    specs = discover(model)
    check_range(specs, shape)
    if shape.stream is not None:
        first = torch.eye(specs[0].hidden_size, shape.stream, device=next(specs[0].layer.parameters()).device)
        rotate_embedding(model, first)
        for spec in specs:
            rotate_layer(spec, (first, first, None if spec.index == len(specs) - 1 else first))
        specs = discover(model)
    cut(model, specs, shape, {})


def check_range(specs: Sequence[BlockSpec], shape: ModelShape) -> None:
    """Raise AdapterError if a shape has other layers than a dense model, or heads or channels that this one has not."""
    if len(shape.layers) != len(specs):
        raise AdapterError(f"the checkpoint's shape has {len(shape.layers)} layers, its configuration {len(specs)}")
    for spec, left in zip(specs, shape.layers, strict=True):
        heads = left.query_heads if isinstance(left.query_heads, tuple) else ()
        channels = left.channels if isinstance(left.channels, int) else 0
        width = 0 if spec.ffn is None else spec.ffn.width
        if any(head >= spec.attention.num_query_heads for head in heads) or channels > width:
            raise AdapterError(
                f"layer {spec.index} of the checkpoint's shape has query heads {heads} and {channels} channels; its "
                f"configuration has {spec.attention.num_query_heads} heads and {width} channels"
            )


def _narrow_attention(spec: BlockSpec, heads: tuple[int, ...]) -> None:
    """Cut an attention to these query heads, ascending, at least one.

    Their rows of Q and columns of O are kept, and the rows of K and V of every KV head that one of them reads. Where
    queries are normed over their whole width, all of Q, K and V stay, because the norm needs them.
    """
    attention = spec.attention
    output = plain_linear(attention.output, spec.index)
    per_kv = attention.num_query_heads // attention.num_kv_heads
    device = output.weight.device
    _select_columns(output, head_channels(heads, attention.head_dim))
    if attention.q_norm == "width":
        _add_gather(attention.module, HeadGather([head // per_kv for head in heads], heads).to(device))
        return
    for linear, rows in head_rows(attention, heads):
        _select_rows(plain_linear(linear, spec.index), rows)
    readers = Counter(head // per_kv for head in heads)
    kv_heads = sorted(readers)
    _set_head_counts(attention, len(heads), len(kv_heads))
    if len(set(readers.values())) == 1:
        attention.module.num_key_value_groups = len(heads) // len(kv_heads)  # type: ignore[assignment]
    else:
        gather = HeadGather([kv_heads.index(head // per_kv) for head in heads])
        _add_gather(attention.module, gather.to(device))


def _narrow_ffn(spec: BlockSpec, channels: Tensor) -> None:
    """Cut an FFN to these intermediate channels, ascending int64 `[n]`: rows of gate and up, columns of down."""
    ffn = feed_forward(spec)
    *reading, down = ffn.linears()
    rows = torch.cat([channels, channels + ffn.width]) if ffn.fused_gate else channels
    for linear in reading:
        _select_rows(plain_linear(linear, spec.index), rows)
    _select_columns(plain_linear(down, spec.index), channels)


def _leave_out_attention(spec: BlockSpec, left: LayerShape, *, counts_tokens: bool) -> None:
    """Take an attention and its norms away, but for the bias of its output where only its heads are pruned."""
    bias = getattr(spec.attention.output, "bias", None) if left.query_heads is not None else None
    index = int(getattr(spec.attention.module, "layer_idx", spec.index))
    stand_in = AbsentAttention(index, counts_tokens=counts_tokens, bias=bias)
    _stand_in(spec.layer, spec.attention, stand_in, keeps_norm=spec.shares_norm and left.channels not in (None, 0))


def _leave_out_ffn(spec: BlockSpec, left: LayerShape) -> None:
    """Take an FFN and its norms away, but for the bias of its output where only its channels are pruned."""
    ffn = feed_forward(spec)
    bias = getattr(ffn.down, "bias", None) if left.channels is not None else None
    keeps_norm = spec.shares_norm and left.query_heads not in (None, ())
    _stand_in(spec.layer, ffn, AbsentFeedForward(bias), keeps_norm=keeps_norm)


def _stand_in(layer: nn.Module, part: SublayerSpec, absent: AbsentFeedForward, *, keeps_norm: bool) -> None:
    """Put a module in the place of a sublayer; `keeps_norm` says that the other one reads through its norm."""
    norms = (None if keeps_norm else part.pre_norm, part.post_norm if absent.bias is None else None)
    for name, child in list(layer.named_children()):
        if child is part.module:
            setattr(layer, name, absent.train(layer.training))
        elif child in norms:
            setattr(layer, name, nn.Identity())


def _set_head_counts(attention: AttentionSpec, num_heads: int, num_kv_heads: int) -> None:
    module = attention.module
    for name, number in (("num_heads", num_heads), ("num_key_value_heads", num_kv_heads)):
        if hasattr(module, name):
            setattr(module, name, number)
    if attention.key is None:
        # Fused projections are taken apart by the configuration's numbers of heads.
        module.config = HeadCounts(module.config, num_heads, num_kv_heads)  # type: ignore[assignment]


def _select_rows(linear: nn.Linear, rows: Tensor) -> None:
    """Keep these output rows, `[n]` int64, with their biases."""
    rows = rows.to(linear.weight.device)
    bias = None if linear.bias is None else linear.bias.detach().index_select(0, rows)
    replace(linear, linear.weight.detach().index_select(0, rows), bias)


def _select_columns(linear: nn.Linear, columns: Tensor) -> None:
    """Keep these input columns, `[n]` int64; the bias stays."""
    replace(linear, linear.weight.detach().index_select(1, columns.to(linear.weight.device)))


def head_rows(attention: AttentionSpec, heads: Sequence[int]) -> list[tuple[Any, Tensor]]:
    """Return an attention's projections into heads, each with its rows, int64 `[n]`, that these query heads need.

    There are none where queries are normed over their whole width.
    """
    if attention.q_norm == "width":
        return []
    kv_heads = sorted({head * attention.num_kv_heads // attention.num_query_heads for head in heads})
    rows, kv_rows = (head_channels(each, attention.head_dim) for each in (heads, kv_heads))
    if attention.key is None:
        first_key = attention.query_width
        first_value = first_key + attention.num_kv_heads * attention.head_dim
        return [(attention.query, torch.cat([rows, first_key + kv_rows, first_value + kv_rows]))]
    # Gemma 4's global layers have values that are the keys.
    values = [] if attention.value is None else [(attention.value, kv_rows)]
    return [(attention.query, rows), (attention.key, kv_rows), *values]


def head_channels(heads: Sequence[int], head_dim: int) -> Tensor:
    """Return the channels of heads, int64 `[n]`."""
    first = torch.tensor(heads, dtype=torch.int64) * head_dim
    return (first.unsqueeze(1) + torch.arange(head_dim)).flatten()
