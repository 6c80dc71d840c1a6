"""Cut one half-layer to the heads or channels that are left, in place; the family's own modules keep running it."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from wide.errors import UnsupportedModelError
from wide.models.block_spec import AttentionSpec, BlockSpec, FeedForwardSpec
from wide.models.materialise.absent import AbsentAttention, AbsentFeedForward
from wide.models.materialise.gather import HeadGather, add_gather
from wide.models.materialise.linear import plain_linear, select_columns, select_rows
from wide.models.materialise.parts import LayerParts


class HeadCounts:
    """A configuration seen by one attention whose numbers of heads are its own; everything else is the model's.

    Args:
        base: The model's configuration.
        num_attention_heads: Query heads of this attention.
        num_key_value_heads: KV heads of this attention.
    """

    def __init__(self, base: Any, num_attention_heads: int, num_key_value_heads: int) -> None:
        """Remember the numbers."""
        self.base = base
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads

    def __getattr__(self, name: str) -> Any:
        """Return what the model's configuration says."""
        if name == "base" or name.startswith("__"):
            # A copy is built before its attributes are set.
            raise AttributeError(name)
        return getattr(self.base, name)


def check_attention(spec: BlockSpec) -> None:
    """Check that an attention can be cut.

    Raises:
        UnsupportedModelError: If it has parameters whose heads are unknown, or a quantised projection.
    """
    half = spec.attention
    sizes = {1, half.head_dim}
    if half.q_norm == "width":
        sizes |= {half.query_width, half.num_kv_heads * half.head_dim}
    _refuse_unknown(spec, half.module, [half.query, half.key, half.value, half.output], sizes)


def check_ffn(spec: BlockSpec) -> None:
    """Check that an FFN can be cut.

    Raises:
        UnsupportedModelError: If it is a mixture of experts, has parameters whose channels are unknown, or a
            quantised projection.
    """
    half = feed_forward(spec)
    _refuse_unknown(spec, half.module, [half.up, half.gate, half.down], {1})


def _refuse_unknown(spec: BlockSpec, module: nn.Module, linears: list[nn.Module | None], sizes: set[int]) -> None:
    plain = [plain_linear(linear, _where(spec)) for linear in linears if linear is not None]
    known = {id(parameter) for linear in plain for parameter in linear.parameters()}
    for name, parameter in module.named_parameters():
        # What attach and LoRA added goes before anything is cut.
        added = name.startswith("wide_") or ".lora_" in name
        if id(parameter) not in known and parameter.numel() not in sizes and not added:
            raise UnsupportedModelError(
                f"layer {spec.index}: {type(module).__name__} has the parameter {name}, which may belong to single "
                "heads or channels, so it cannot be cut. Use how='masked'"
            )


def narrow_attention(spec: BlockSpec, heads: tuple[int, ...]) -> None:
    """Cut an attention to these query heads.

    Their rows of Q and columns of O are kept, and the rows of K and V of every KV head that one of them reads. Where
    queries are normed over their whole width, all of Q, K and V stay, because the norm needs them.

    Args:
        spec: The layer.
        heads: Query heads that are left, ascending; at least one.
    """
    half, where = spec.attention, _where(spec)
    output = plain_linear(half.output, where)
    per_kv = half.num_query_heads // half.num_kv_heads
    device = output.weight.device
    columns = _channels(heads, half.head_dim, device)
    select_columns(output, columns)
    if half.q_norm == "width":
        add_gather(half.module, HeadGather([head // per_kv for head in heads], heads).to(device))
        return
    readers = Counter(head // per_kv for head in heads)
    kv_heads = sorted(readers)
    _select_projections(half, columns, _channels(kv_heads, half.head_dim, device), where)
    _set_head_counts(half, len(heads), len(kv_heads))
    if len(set(readers.values())) == 1:
        half.module.num_key_value_groups = len(heads) // len(kv_heads)  # type: ignore[assignment]
    else:
        add_gather(half.module, HeadGather([kv_heads.index(head // per_kv) for head in heads]).to(device))


def narrow_ffn(spec: BlockSpec, channels: Tensor) -> None:
    """Cut an FFN to these intermediate channels: their rows of gate and up, their columns of down.

    Args:
        spec: The layer.
        channels: Channels that are left, ascending, int64 `[n]`; at least one.
    """
    half, where = feed_forward(spec), _where(spec)
    rows = torch.cat([channels, channels + half.width]) if half.fused_gate else channels
    select_rows(plain_linear(half.up, where), rows)
    if half.gate is not None:
        select_rows(plain_linear(half.gate, where), rows)
    select_columns(plain_linear(half.down, where), channels)


def leave_out_attention(
    spec: BlockSpec, parts: LayerParts, *, counts_tokens: bool, ffn_reads_norm: bool, keep_bias: bool = False
) -> None:
    """Take an attention and its norms away.

    Args:
        spec: The layer.
        parts: The attribute names of its parts.
        counts_tokens: Whether this layer of the cache is asked for the number of tokens.
        ffn_reads_norm: Whether an FFN that stays reads through the attention's norm.
        keep_bias: Whether the bias of the output projection, if it has one, is still added.
    """
    bias = getattr(spec.attention.output, "bias", None) if keep_bias else None
    index = int(getattr(spec.attention.module, "layer_idx", spec.index))
    stand_in = AbsentAttention(index, counts_tokens=counts_tokens, bias=bias)
    setattr(spec.layer, parts.attention, stand_in.train(spec.layer.training))
    _take_away(spec.layer, None if ffn_reads_norm else parts.attention_norm)
    _take_away(spec.layer, None if bias is not None else parts.attention_post_norm)


def leave_out_ffn(spec: BlockSpec, parts: LayerParts, *, attention_reads_norm: bool, keep_bias: bool = False) -> None:
    """Take an FFN and its norms away.

    Args:
        spec: The layer.
        parts: The attribute names of its parts.
        attention_reads_norm: Whether an attention that stays reads through the FFN's norm.
        keep_bias: Whether the bias of the down projection, if it has one, is still added.

    Raises:
        UnsupportedModelError: If it is a mixture of experts.
    """
    half = feed_forward(spec)
    bias = getattr(half.down, "bias", None) if keep_bias else None
    assert parts.ffn is not None
    setattr(spec.layer, parts.ffn, AbsentFeedForward(bias).train(spec.layer.training))
    _take_away(spec.layer, None if attention_reads_norm else parts.ffn_norm)
    _take_away(spec.layer, None if bias is not None else parts.ffn_post_norm)


def feed_forward(spec: BlockSpec) -> FeedForwardSpec:
    """Return the FFN of a layer.

    Raises:
        UnsupportedModelError: If it cannot be cut (mixture of experts).
    """
    if spec.ffn is None:
        raise UnsupportedModelError(f"the plan prunes an FFN that cannot be cut: {spec.ffn_reason}")
    return spec.ffn


def _take_away(layer: nn.Module, norm: str | None) -> None:
    if norm is not None:
        setattr(layer, norm, nn.Identity())


def _select_projections(half: AttentionSpec, query: Tensor, kv: Tensor, where: str) -> None:
    if half.key is None or half.value is None:
        first_key = half.query_width
        first_value = first_key + half.num_kv_heads * half.head_dim
        select_rows(plain_linear(half.query, where), torch.cat([query, first_key + kv, first_value + kv]))
        return
    select_rows(plain_linear(half.query, where), query)
    select_rows(plain_linear(half.key, where), kv)
    select_rows(plain_linear(half.value, where), kv)


def _set_head_counts(half: AttentionSpec, num_heads: int, num_kv_heads: int) -> None:
    for name, number in (("num_heads", num_heads), ("num_key_value_heads", num_kv_heads)):
        if hasattr(half.module, name):
            setattr(half.module, name, number)
    if half.key is None:
        # Fused projections are taken apart by the configuration's numbers of heads.
        half.module.config = HeadCounts(half.module.config, num_heads, num_kv_heads)  # type: ignore[assignment]


def _where(spec: BlockSpec) -> str:
    return f"layer {spec.index}: a projection"


def _channels(heads: list[int] | tuple[int, ...], head_dim: int, device: torch.device) -> Tensor:
    first = torch.tensor(heads, dtype=torch.int64, device=device) * head_dim
    return (first.unsqueeze(1) + torch.arange(head_dim, device=device)).flatten()
