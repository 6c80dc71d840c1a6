"""Operators of torch that hide from vLLM's compiler what is chosen by the number of rows.

vLLM drops the guards of the graphs that it traces, and replays for one row what was traced for thousands. So a choice
by the number of rows has to be made inside an operator, from tensors alone: then all layers share a compiled piece.
"""

import functools

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from wide.inference.choice.layer_sizes import LayerSizes
from wide.inference.choice.measured import is_measured, measured_table
from wide.inference.choice.tuning.tune import TunedLayer, tune_layers
from wide.inference.operators.products import GatedWeights, LinearWeights, feed_forward
from wide.inference.operators.table import OperatorTable
from wide.kernels.registration import operator
from wide.kernels.route import RouteWeights, route

_TUNING_SECONDS = 90.0


@operator(lambda x: torch.empty_like(x))
def routed_feed_forward(
    x: Tensor,
    router: RouteWeights,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    last: Tensor,
    last_bias: Tensor | None,
    executed: float,
) -> Tensor:
    """Return the output [M, D] of an FFN over rows [M, D]: routing, gate and up with SwiGLU, and down.

    Args:
        x: Normed rows of all requests of a step, and of its padding.
        router: Of the groups of this rank.
        gate_up: Gate and below it up, [2 F, D].
        last: Weight of down, [D, F].
        executed: Expected share of (token, group) pairs that execute.
    """
    sizes = ffn_sizes(x.shape[1], last.shape[1], router.difference.shape[0])
    table = _table(x.device, x.dtype, sizes, executed)
    mask = route(x, router, backend=table.backend)
    padding = get_forward_context().is_padding
    if padding is not None and table.how("gate_up", x.shape[0]) != "dense":
        mask.logical_and_(~padding[:, None])
    gated = GatedWeights.of_rows(LinearWeights(gate_up, gate_up_bias), last.shape[1], "silu")
    return feed_forward(gated, LinearWeights(last, last_bias), x, mask, table)


def ffn_sizes(hidden_size: int, width: int, groups: int) -> LayerSizes:
    """Return what measurements of an FFN depend on; the attention's sizes are none of any layer."""
    return LayerSizes(
        hidden_size=hidden_size,
        query_width=1,
        head_dim=1,
        num_kv_heads=1,
        attention_groups=1,
        ffn_width=width,
        ffn_groups=groups,
        is_gated=True,
    )


@functools.cache
def _table(device: torch.device, dtype: torch.dtype, sizes: LayerSizes, executed: float) -> OperatorTable:
    return measured_table(sizes, device=device, dtype=dtype, executed=(executed, executed))


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
