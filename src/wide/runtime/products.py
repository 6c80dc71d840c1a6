"""The linear parts of a layer, each dense or by the operator that the table names."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wide.kernels.gemm_k import gemm_k
from wide.kernels.gemm_mn import gemm_mn
from wide.kernels.gemv import gemv_k, gemv_mn
from wide.kernels.reorder import reorder, reorder_patterns
from wide.kernels.reordering import Reordering
from wide.kernels.operator_table import OperatorName, OperatorTable
from wide.runtime.weights import AttentionWeights, FeedForwardWeights

_PATTERN_GROUPS = 8


def project_dense(x: Tensor, weights: AttentionWeights) -> Tensor:
    """Return queries, keys and values [M, (H_q + 2 H_k) d] of normed rows [M, D] in one product."""
    return functional.linear(x, weights.qkv, weights.qkv_bias)


def project_routed(x: Tensor, weights: AttentionWeights, mask: Tensor, table: OperatorTable) -> tuple[Tensor, Tensor]:
    """Return queries [M, H_q d] of executing groups (others hold anything), and keys and values [M, 2 H_k d].

    Args:
        x: Normed rows, [M, D].
        weights: Of the layer.
        mask: With the router's extra groups, bool [M, N_G + extra].
        table: Which operator runs.
    """
    assert weights.router is not None
    width = weights.num_query_heads * weights.head_dim
    how = table.how("query", x.shape[0])
    qkv, bias = weights.qkv, weights.qkv_bias
    if how == "dense" or (how == "few" and weights.router.extra):
        if how == "few":
            whole = gemv_mn(x, qkv, mask, bias=bias, backend=table.backend)
        else:
            whole = functional.linear(x, qkv, bias)
        return whole[:, :width], whole[:, width:]
    q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    kv = functional.linear(x, qkv[width:], kv_bias)
    own = mask[:, : weights.router.num_groups]
    if how == "few":
        return gemv_mn(x, qkv[:width], own, bias=q_bias, backend=table.backend), kv
    order = reorder(own, backend=table.backend)
    return gemm_mn(x, qkv[:width], order, bias=q_bias, backend=table.backend), kv


def sum_groups(
    name: OperatorName, h: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, table: OperatorTable
) -> Tensor:
    """Return the K-axis product [M, D] of `h` [M, K]; where the table says dense, skipped channels must be zero."""
    how = table.how(name, h.shape[0])
    if how == "few":
        return gemv_k(h, weight, mask, bias=bias, backend=table.backend)
    if how == "dense":
        return functional.linear(h, weight, bias)
    num_groups = mask.shape[1]
    per_block = min(_PATTERN_GROUPS, num_groups)
    order = reorder_patterns(
        mask, groups_per_block=per_block, keeps_empty=per_block >= num_groups, backend=table.backend
    )
    return gemm_k(h, weight, order, group_size=h.shape[1] // num_groups, bias=bias, backend=table.backend)


def feed_forward_product(x: Tensor, weights: FeedForwardWeights, mask: Tensor | None, table: OperatorTable) -> Tensor:
    """Return act(x gate) * (x up), [M, F]; skipped channels are zero if the down projection runs dense."""
    options: dict[str, Any] = {
        "up_weight": weights.up,
        "bias": weights.gate_bias,
        "up_bias": weights.up_bias,
        "activation": weights.activation,
    }
    rows = x.shape[0]
    how = "dense" if mask is None else table.how("gate_up", rows)
    needs_zeros = mask is not None and table.how("down", rows) == "dense"
    if how == "few":
        assert mask is not None
        return gemv_mn(x, weights.gate, mask, zero_skipped=needs_zeros, backend=table.backend, **options)
    zeroing = mask if needs_zeros else None
    if how == "dense":
        order = _no_order(x, 1 if mask is None else mask.shape[1])
        return gemm_mn(x, weights.gate, order, mask=zeroing, backend="dense", **options)
    assert mask is not None
    order = reorder(mask, backend=table.backend)
    return gemm_mn(x, weights.gate, order, mask=zeroing, backend=table.backend, **options)


def _no_order(x: Tensor, num_groups: int) -> Reordering:
    """Return a reordering of the right shapes for a dense product, which reads none of it."""
    one = torch.empty(1, dtype=torch.int32, device=x.device)
    index = one.expand(num_groups, x.shape[0])
    counts = one.expand(num_groups)
    return Reordering(index, counts, counts, index, one, one, 128)
