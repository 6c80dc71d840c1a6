"""The parts of one decoder layer by role, with their sizes: data, not behaviour."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

NormScope = Literal["none", "head", "width"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The attention of a decoder layer.

    Args:
        module: The attention module; its `forward` receives the normed hidden states `[B, T, D]`.
        query: Projection with the query rows (fused QKV: they come first).
        key: Key projection; None when fused into `query`.
        value: Value projection; None when fused into `query`.
        output: Projection back to the residual stream.
        num_query_heads: H_q.
        num_kv_heads: H_k.
        head_dim: Channels per head; H_q * head_dim need not equal the hidden size.
        q_norm: Whether queries are normed, per head or over the whole query width.
        pre_norm: The norm whose input is the residual stream that this sublayer reads; None when there is none.
    """

    module: nn.Module
    query: nn.Module
    key: nn.Module | None
    value: nn.Module | None
    output: nn.Module
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: NormScope = "none"
    pre_norm: nn.Module | None = None

    @property
    def query_width(self) -> int:
        """Query channels, H_q * head_dim."""
        return self.num_query_heads * self.head_dim

    @property
    def kv_group_size(self) -> int:
        """Query channels that share one KV head."""
        return self.num_query_heads // self.num_kv_heads * self.head_dim

    def linears(self) -> list[nn.Module]:
        """Return the projections, the output's last."""
        return [part for part in (self.query, self.key, self.value, self.output) if part is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardSpec:
    """The FFN of a decoder layer.

    Args:
        module: The FFN module; its `forward` receives hidden states `[B, T, D]`.
        up: Up projection; with `fused_gate` it holds the gate rows first, then the up rows.
        gate: Gate projection of a gated FFN; None when fused or when there is no gate.
        down: Projection back to the residual stream.
        activation: The activation module, one per layer.
        width: Intermediate channels (of the activation's output).
        fused_gate: Whether `up` holds gate and up rows.
        pre_norm: As in `AttentionSpec`.
    """

    module: nn.Module
    up: nn.Module
    gate: nn.Module | None
    down: nn.Module
    activation: nn.Module
    width: int
    fused_gate: bool = False
    pre_norm: nn.Module | None = None

    @property
    def num_matrices(self) -> int:
        """Weight rows or columns that one intermediate channel owns: 3 for gated FFNs, else 2."""
        return 3 if self.gate is not None or self.fused_gate else 2

    def linears(self) -> list[nn.Module]:
        """Return the projections, down last."""
        return [part for part in (self.gate, self.up, self.down) if part is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSpec:
    """One decoder layer.

    Args:
        index: Position in the stack, from 0.
        layer: The decoder layer itself.
        hidden_size: Channels of the residual stream, D.
        attention: Its attention.
        ffn: Its FFN; None where the FFN cannot be routed (mixture of experts).
        ffn_reason: Why `ffn` is None.
    """

    index: int
    layer: nn.Module
    hidden_size: int
    attention: AttentionSpec
    ffn: FeedForwardSpec | None
    ffn_reason: str = ""
