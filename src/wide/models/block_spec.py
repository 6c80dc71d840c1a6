"""The parts of one decoder layer by role, with their sizes, and what is asked of them before they are changed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from wide.errors import UnsupportedModelError

NormScope = Literal["none", "head", "width"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SublayerSpec:
    """A sublayer of a decoder layer; its `module` receives hidden states `[B, T, D]`, normed by `pre_norm`.

    `pre_norm` reads the residual stream, and `post_norm` the output before that is added to it; either may be None.
    """

    projections: ClassVar[tuple[str, ...]]
    module: nn.Module
    pre_norm: nn.Module | None = None
    post_norm: nn.Module | None = None

    def linears(self) -> list[nn.Module]:
        """Return the projections, the one back to the residual stream last."""
        return [part for part in (getattr(self, name) for name in self.projections) if part is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec(SublayerSpec):
    """The attention of a decoder layer.

    Args:
        query: Projection with the query rows (fused QKV: they come first, and `key` and `value` are None).
        num_query_heads: H_q; `num_kv_heads` is H_k.
        head_dim: Channels per head; H_q * head_dim need not equal the hidden size.
        q_norm: Whether queries are normed, per head or over the whole query width.
        borrows: Whether the keys and values are those of an earlier layer (Gemma 3n and 4).
    """

    projections = ("query", "key", "value", "output")
    query: nn.Module
    key: nn.Module | None
    value: nn.Module | None
    output: nn.Module
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: NormScope = "none"
    borrows: bool = False

    @property
    def query_width(self) -> int:
        """Query channels, H_q * head_dim."""
        return self.num_query_heads * self.head_dim

    @property
    def kv_group_size(self) -> int:
        """Query channels that share one KV head."""
        return self.num_query_heads // self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardSpec(SublayerSpec):
    """The FFN of a decoder layer, of `width` intermediate channels.

    With `fused_gate` the rows of the gate come first in `up`; `gate` is None then, and where there is no gate.
    """

    projections = ("gate", "up", "down")
    up: nn.Module
    gate: nn.Module | None
    down: nn.Module
    activation: nn.Module
    width: int
    fused_gate: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSpec:
    """One decoder layer; `index` counts from 0. `ffn` is None where it cannot be routed, for `ffn_reason`."""

    index: int
    layer: nn.Module
    hidden_size: int
    attention: AttentionSpec
    ffn: FeedForwardSpec | None
    ffn_reason: str = ""

    @property
    def shares_norm(self) -> bool:
        """Whether both sublayers read through one norm (parallel blocks)."""
        norm = self.attention.pre_norm
        return norm is not None and self.ffn is not None and norm is self.ffn.pre_norm

    def sublayers(self) -> list[tuple[str, SublayerSpec]]:
        """Return the sublayers that can be routed or pruned, by name, in the order in which they run."""
        return [("attention", self.attention)] + ([] if self.ffn is None else [("ffn", self.ffn)])


def feed_forward(spec: BlockSpec) -> FeedForwardSpec:
    """Return the FFN of a layer; raises UnsupportedModelError if it has none that can be pruned (as of experts)."""
    if spec.ffn is None:
        raise UnsupportedModelError(f"every FFN that is to be pruned must be of a known kind, and {spec.ffn_reason}")
    return spec.ffn


def require_own_keys(specs: Iterable[BlockSpec], what: str) -> None:
    """Raise UnsupportedModelError if a layer takes keys and values of an earlier one; `what` cannot be done then."""
    for spec in specs:
        if spec.attention.borrows:
            raise UnsupportedModelError(f"layer {spec.index} attends to keys and values of an earlier layer, so {what}")


def plain_linear(module: nn.Module | None, layer: int) -> nn.Linear:
    """Return a projection of a layer if it is an unquantised linear layer with its whole weight at hand.

    Raises UnsupportedModelError if it is quantised, wrapped (by LoRA, too), sharded, offloaded, or no linear layer.
    """
    weight: Any = getattr(module, "weight", None)
    what = f"is a {type(module).__name__} with a {type(weight).__name__} weight, not a plain linear layer"
    # Quantised and sharded tensors are classes of their own, which may call themselves floating point.
    if type(module) is nn.Linear and type(weight) is nn.Parameter and weight.is_floating_point():
        # A checkpoint's modules are cut on that device before their weights are read.
        if weight.is_meta and torch.get_default_device().type != "meta":
            what = "has a weight on the meta device (offloaded, or not loaded yet)"
        elif tuple(weight.shape) == (module.out_features, module.in_features):
            return module
        else:
            what = f"has a weight of shape {tuple(weight.shape)}, a shard of it"
    raise UnsupportedModelError(
        f"layer {layer}: a projection {what}; load the model unquantised, unsharded and without offloading, and merge "
        "LoRA first (quantise what comes out, not what goes in)"
    )
