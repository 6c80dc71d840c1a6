"""Operators of torch that hide from vLLM's compiler what is chosen by the number of rows.

vLLM drops the guards of the graphs that it traces, and replays for one row what was traced for thousands. So a choice
by the number of rows has to be made inside an operator, from tensors alone: then all layers share a compiled piece.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.forward_context import get_forward_context

from wide.inference.choice.layer_sizes import LayerSizes
from wide.inference.choice.measured import is_measured, measured_table
from wide.inference.choice.tuning.tune import TunedLayer, tune_layers
from wide.inference.operators.products import GatedWeights, LinearWeights, feed_forward
from wide.inference.operators.table import OperatorTable
from wide.kernels.registration import operator
from wide.kernels.route.op import route
from wide.kernels.route.weights import RouteWeights

_TUNING_SECONDS = 90.0


@operator(lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[0])))
def dense_linear(x: Tensor, linear: LinearWeights) -> Tensor:
    """Return the product [..., N] of rows [..., K] with int8 weights, read as the number of rows asks for."""
    return linear.dense(x.flatten(0, -2)).view(*x.shape[:-1], linear.outputs)


@operator(lambda x: torch.empty_like(x))
def routed_feed_forward(
    x: Tensor,
    router: RouteWeights,
    counts: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    gate_up_scale: Tensor | None,
    gate_up_rotation: Tensor | None,
    last: Tensor,
    last_bias: Tensor | None,
    last_scale: Tensor | None,
    last_rotation: Tensor | None,
    executed: float,
    weights: str,
) -> Tensor:
    """Return the output [M, D] of an FFN over rows [M, D]: routing, gate and up with SwiGLU, and down.

    Args:
        x: Normed rows of all requests of a step, and of its padding.
        router: Of the groups of this rank.
        counts: Of `route`.
        gate_up: Gate and below it up, [2 F, D].
        gate_up_scale: Of int8 weights, float32 [2 F].
        gate_up_rotation: Of rows, as in `LinearWeights`.
        last: Weight of down, [D, F].
        executed: Expected share of (token, group) pairs that execute.
        weights: Format of the weights, one of `WEIGHTS`.
    """
    sizes = ffn_sizes(x.shape[1], last.shape[1], router.difference.shape[0], weights)
    table = table_of(x.device, x.dtype, sizes, executed)
    mask, int8_rows = _decide(x, router, counts, table), weights == "w8a8"
    gate_and_up = LinearWeights(gate_up, gate_up_bias, gate_up_scale, int8_rows, gate_up_rotation)
    gated = GatedWeights.of_rows(gate_and_up, last.shape[1], "silu")
    return feed_forward(gated, LinearWeights(last, last_bias, last_scale, int8_rows, last_rotation), x, mask, table)


@operator(
    lambda x, difference, qkv: (
        x.new_empty((x.shape[0], difference.shape[0]), dtype=torch.bool),
        x.new_empty((x.shape[0], qkv.shape[0])),
    )
)
def routed_queries(
    x: Tensor,
    router: RouteWeights,
    counts: Tensor,
    qkv: Tensor,
    qkv_bias: Tensor | None,
    qkv_scale: Tensor | None,
    groups: int,
    kv_heads: int,
    head_dim: int,
    executed: float,
    weights: str,
) -> tuple[Tensor, Tensor]:
    """Return which groups rows [M, D] execute, and their queries, keys and values [M, (H_q + 2 H_k) d].

    Args:
        x: Normed rows of all requests of a step, and of its padding.
        router: Of this rank's groups, and behind them groups of key and value rows, which always execute; without
            these everything is computed. Queries of skipped groups hold anything.
        counts: Of `route`.
        groups: Groups of queries, N_G.
        kv_heads: H_k.
    """
    sizes = attention_sizes(x.shape[1], qkv.shape[0] - 2 * kv_heads * head_dim, groups, kv_heads, head_dim, weights)
    table = table_of(x.device, x.dtype, sizes, executed)
    mask = _decide(x, router, counts, table)
    linear, choice = LinearWeights(qkv, qkv_bias, qkv_scale), table.choice("query", x.shape[0])
    if choice.backend == "dense" or mask.shape[1] == groups:
        return mask, linear.dense(x)
    return mask, linear.output_groups(x, mask, choice, sorts=table.backend)[0]


@operator(lambda heads, weight: heads.new_empty((heads.shape[0], weight.shape[0])))
def routed_output(
    heads: Tensor,
    mask: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    kv_heads: int,
    head_dim: int,
    executed: float,
    weights: str,
) -> Tensor:
    """Return the output product [M, D] of heads [M, H_q d], which are zeros where the mask, bool [M, N_G], is false."""
    sizes = attention_sizes(weight.shape[0], heads.shape[1], mask.shape[1], kv_heads, head_dim, weights)
    table = table_of(heads.device, heads.dtype, sizes, executed)
    choice = table.choice("output", heads.shape[0])
    linear = LinearWeights(weight, bias, scale, int8_rows=weights == "w8a8")
    return linear.input_groups(heads, mask, choice, sorts=table.backend)


def _decide(x: Tensor, router: RouteWeights, counts: Tensor, table: OperatorTable) -> Tensor:
    """Return the mask of rows, in which padding executes nothing."""
    # vLLM marks all rows while it warms up, and without this setting never takes that back.
    padding = get_forward_context().is_padding if envs.VLLM_MOE_SKIP_PADDING else None
    return route(x, router, padding=padding, counts=counts, backend=table.backend)


@functools.cache
def ffn_sizes(hidden_size: int, width: int, groups: int, weights: str) -> LayerSizes:
    """Return what measurements of an FFN depend on."""
    return LayerSizes(hidden_size=hidden_size, ffn_width=width, ffn_groups=groups, is_gated=True, weights=weights)


@functools.cache
def attention_sizes(
    hidden_size: int, query_width: int, groups: int, kv_heads: int, head_dim: int, weights: str
) -> LayerSizes:
    """Return what measurements of an attention depend on."""
    heads: dict[str, Any] = {"query_width": query_width, "head_dim": head_dim, "num_kv_heads": kv_heads}
    return LayerSizes(hidden_size=hidden_size, attention_groups=groups, weights=weights, **heads)


@functools.cache
def table_of(device: torch.device, dtype: torch.dtype, sizes: LayerSizes, executed: float) -> OperatorTable:
    """Return which operator runs at which number of rows, by measurements."""
    table = measured_table(sizes, device=device, dtype=dtype, executed=(executed, executed))
    return table.for_int8_rows() if sizes.weights == "w8a8" else table


@functools.cache
def table_later(*which: Any) -> Callable[[], OperatorTable]:
    """Return what gives `table_of` when it is called: measurements may come after a layer is made."""
    return functools.cache(functools.partial(table_of, *which))


@functools.cache
def measure_once(device: torch.device, layer: TunedLayer, executed: float) -> None:
    """Measure on a GPU what pays at a layer's shapes, where nothing is known of them yet; at most 90 seconds."""
    shares = (executed, executed)
    if is_measured(device, [layer.sizes], executed=shares):
        return
    # vLLM loads models with their own dtype as torch's default.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        tune_layers([layer], device=device, executed=shares, quick=True, seconds=_TUNING_SECONDS)
    finally:
        torch.set_default_dtype(before)
