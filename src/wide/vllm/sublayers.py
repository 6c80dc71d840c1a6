"""Modules that take the place of vLLM's FFN and attention: the same linear layers, and a router."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from wide.errors import UnsupportedModelError
from wide.inference.choice.tuning.tune import TunedLayer
from wide.kernels.device import triton_obstacle
from wide.kernels.route.weights import RouteWeights, split_weights
from wide.plan import Routed
from wide.vllm.limits import Pruning
from wide.vllm.operators import attention_sizes, ffn_sizes, measure_once, table_later


def exchange(layers: Iterable[nn.Module], pruning: Pruning) -> None:
    """Put wide's modules in the place of the routed sublayers of vLLM's decoder layers.

    Raises UnsupportedModelError if an attention scales its queries by position.
    """
    for index, (layer, plan) in enumerate(zip(layers, pruning.plan.layers, strict=True)):
        known: Any = layer
        for half, name, kind in (("attention", "self_attn", Attention), ("ffn", "mlp", FeedForward)):
            routed = getattr(plan, half)
            threshold = pruning.thresholds.get((index, half), -math.inf)
            if isinstance(routed, Routed):
                setattr(known, name, kind(getattr(known, name), routed, threshold, pruning))


class _AfterLoading(QuantizeMethodBase):
    """Has vLLM call `prepare` of a router when weights have been read, or drawn."""

    def create_weights(self, *_args: Any, **_options: Any) -> None:
        """Create nothing: the router has made its parameters."""

    def apply(self, *_args: Any, **_options: Any) -> Tensor:
        """Raise NotImplementedError, since a router is no linear layer."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make the weights of a router ready."""
        assert isinstance(layer, Router)
        layer.prepare()


class Router(nn.Module):
    """A router's weights, whole on every rank, and those of this rank's groups and `extra` ones that always execute."""

    bias: nn.Parameter | None
    counts: Tensor

    def __init__(self, hidden_size: int, routed: Routed, threshold: float, extra: int = 0) -> None:
        super().__init__()
        # What is to be measured before the first step, if anything.
        self.measured: tuple[TunedLayer, float] | None = None
        groups, rank = routed.grouping.num_groups, routed.rank

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)

        self.down, self.up = empty(rank, hidden_size), empty(2 * groups, rank)
        self.register_parameter("bias", empty(2 * groups) if routed.bias else None)
        self.extra, self.threshold, self.dtype = extra, threshold, torch.get_default_dtype()
        self.decides = threshold != -math.inf
        self.num_groups = groups // get_tensor_model_parallel_world_size()
        # Pairs that executed, those of `extra` groups included, and rows; they start anew at 2^32.
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int32), persistent=False)
        self.quant_method = _AfterLoading()

    def prepare(self) -> None:
        """Keep the weights of this rank's groups; offsets are less the threshold, so that 0 decides.

        Another call, with another threshold, writes to the same memory, from which graphs read.
        """
        weights = split_weights(self.down, self.up, self.bias, dtype=self.dtype)
        own = slice(get_tensor_model_parallel_rank() * self.num_groups, None)
        difference = weights.difference[own][: self.num_groups]
        offset = difference.new_zeros(self.num_groups)
        if weights.offset is not None:
            offset = weights.offset[own][: self.num_groups]
        difference = torch.cat((difference, difference.new_zeros(self.extra, difference.shape[1])))
        offset = torch.cat((offset - self.threshold, offset.new_full((self.extra,), math.inf)))
        parts = RouteWeights(weights.down, difference, offset, weights.counter)
        for name, tensor in parts._asdict().items():
            known = getattr(self, f"own_{name}", None)
            if known is None:
                # Not persistent, so that no loader looks for it.
                self.register_buffer(f"own_{name}", tensor, persistent=False)
            else:
                known.copy_(tensor)
        if self.measured is not None:
            measure_once(difference.device, *self.measured)

    @property
    def weights(self) -> RouteWeights:
        """What the operators take."""
        return RouteWeights(self.own_down, self.own_difference, self.own_offset, self.own_counter)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Return which of this rank's groups each row [M, D] executes, bool [M, N_G]."""
        backend = "triton" if x.is_cuda and x.dtype != torch.float32 else "torch"
        return torch.ops.wide.route(x, *self.weights, counts=self.counts, backend=backend)  # type: ignore[no-any-return]


def scale_of(linear: nn.Module) -> Tensor | None:
    """Return the scales of int8 weights, float32 [N], or None."""
    return getattr(linear, "weight_scale", None)


def rotation_of(linear: nn.Module) -> Tensor | None:
    """Return what blocks of the input are multiplied by before int8 weights, [b, b], or None."""
    return getattr(linear, "weight_rotation", None)


def cleared(values: Tensor, mask: Tensor) -> Tensor:
    """Return values [M, C] with zeros in skipped groups, in plain torch: the compiler fuses it."""
    grouped = values.unflatten(1, (mask.shape[1], values.shape[1] // mask.shape[1]))
    return grouped.masked_fill(~mask.unsqueeze(2), 0).flatten(1)


class FeedForward(nn.Module):
    """vLLM's gated FFN under a router: one operator over all rows on a GPU, masked on a CPU."""

    def __init__(self, dense: Any, routed: Routed, threshold: float, pruning: Pruning) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = dense.gate_up_proj, dense.down_proj, dense.act_fn
        self.wide_router = Router(self.gate_up_proj.input_size, routed, threshold)
        self.how, self.decides = (pruning.executed, pruning.weights), self.wide_router.decides
        # A CPU may have packed the weights into another form.
        weight = self.gate_up_proj.weight
        self.skips = weight.is_cuda and triton_obstacle(weight.device) is None
        if self.skips and self.decides:
            sizes = ffn_sizes(weight.shape[1], weight.shape[0] // 2, self.wide_router.num_groups, pruning.weights)
            self.wide_router.measured = TunedLayer(sizes=sizes, attention=False, ffn=True), pruning.executed
            self.kind = sizes

    def warm(self, x: Tensor) -> None:
        """Run the operators for rows [M, D]."""
        self.output(x)

    def output(self, x: Tensor) -> Tensor:
        """Return the output [M, D] of this rank's channels alone."""
        first, last = self.gate_up_proj, self.down_proj
        bias = None if last.tp_rank > 0 else last.bias
        reading = first.weight, first.bias, scale_of(first), rotation_of(first)
        writing = last.weight, bias, scale_of(last), rotation_of(last)
        known = *self.wide_router.weights, self.wide_router.counts
        return torch.ops.wide.routed_feed_forward(x, *known, *reading, *writing, *self.how)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [M, D] of normed rows [M, D], of all ranks together."""
        if self.skips and self.decides:
            out = self.output(x)
            return tensor_model_parallel_all_reduce(out) if self.down_proj.tp_size > 1 else out
        inner = self.act_fn(self.gate_up_proj(x)[0])
        if self.decides:
            inner = cleared(inner, self.wide_router(x))
        return self.down_proj(inner)[0]


class Attention(nn.Module):
    """vLLM's attention under a router: on a GPU queries, pages and output skip; elsewhere heads are masked."""

    qkv_proj: Any
    o_proj: Any
    rotary_emb: Any
    attn: Any
    q_norm: Any
    k_norm: Any

    def __init__(self, dense: Any, routed: Routed, threshold: float, pruning: Pruning) -> None:
        super().__init__()
        if getattr(dense, "do_llama_4_scaling", False) or getattr(dense, "dual_chunk_attention_config", None):
            raise UnsupportedModelError(
                "this attention scales its queries by position or chunk, which wide's modules for vLLM do not compute; "
                "use `wide serve`"
            )
        for name in ("qkv_proj", "o_proj", "rotary_emb", "attn"):
            setattr(self, name, getattr(dense, name))
        norms = (getattr(dense, name, None) for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm = norms
        self.widths, self.head_dim = (dense.q_size, dense.kv_size, dense.kv_size), dense.head_dim
        self.how, self.decides = (pruning.executed, pruning.weights), threshold != -math.inf
        groups = routed.grouping.num_groups // get_tensor_model_parallel_world_size()
        size, further = dense.q_size // groups, 2 * dense.kv_size
        extra = further // size if further % size == 0 else 0
        self.skips, weight = False, self.qkv_proj.weight
        if self.decides and weight.is_cuda and triton_obstacle(weight.device) is None:
            from wide.vllm.pages import attend, skips_in

            shape = groups, dense.num_kv_heads, self.head_dim
            sizes = attention_sizes(weight.shape[1], dense.q_size, *shape, pruning.weights)
            table = table_later(weight.device, weight.dtype, sizes, pruning.executed)
            self.skips, self.attend = skips_in(self.attn, table), attend
        self.wide_router = Router(self.qkv_proj.input_size, routed, threshold, extra if self.skips else 0)
        self.shape = (groups, dense.num_kv_heads, self.head_dim)
        if self.skips:
            self.wide_router.measured = TunedLayer(sizes=sizes, attention=True, ffn=False), pruning.executed
            self.kind = sizes, self.attn.impl.sliding_window

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mask, bool [M, N_G], and queries, keys and values of rows [M, D]."""
        router, first = self.wide_router, self.qkv_proj
        parts = (*router.weights, router.counts, first.weight, first.bias, scale_of(first), *self.shape, *self.how)
        mask, qkv = torch.ops.wide.routed_queries(x, *parts)
        return mask[:, : self.shape[0]], qkv

    def output(self, heads: Tensor, mask: Tensor) -> Tensor:
        """Return the output [M, D] of this rank's heads alone."""
        last = self.o_proj
        linear = (last.weight, None if last.tp_rank > 0 else last.bias, scale_of(last))
        return torch.ops.wide.routed_output(heads, mask, *linear, *self.shape[1:], *self.how)  # type: ignore[no-any-return]

    def warm(self, x: Tensor) -> None:
        """Run the operators for rows [M, D], in steps of all kinds."""
        mask, qkv = self.queries(x)
        heads = [part.unflatten(1, (-1, self.head_dim)) for part in qkv.split(self.widths, dim=-1)]
        self.attn.impl.warm(*heads, mask)
        self.output(heads[0].flatten(1).contiguous(), mask)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the output [M, D] of normed rows [M, D] at positions [M]."""
        first, last = self.qkv_proj, self.o_proj
        mask: Tensor | None = None
        if self.skips:
            mask, qkv = self.queries(hidden_states)
        else:
            qkv = first(hidden_states)[0]
        q, k, v = qkv.split(self.widths, dim=-1)
        if self.q_norm is not None:
            q, k = (
                norm(part.unflatten(1, (part.shape[1] // self.head_dim, self.head_dim))).flatten(1)
                for norm, part in ((self.q_norm, q), (self.k_norm, k))
            )
        q, k = self.rotary_emb(positions, q, k)
        if mask is None:
            heads = self.attn(q, k, v)
            return last(cleared(heads, self.wide_router(hidden_states)) if self.decides else heads)[0]
        out = self.output(self.attend(self.attn, q, k, v, mask), mask)
        return tensor_model_parallel_all_reduce(out) if last.tp_size > 1 else out
