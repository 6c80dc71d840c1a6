"""The projections of a layer as the engine's weights hold them: query, key and value rows in one matrix."""

from torch import Tensor
from torch.nn import functional

from wide.inference.operator_table import OperatorTable
from wide.inference.products import project_queries
from wide.inference.weights import AttentionWeights
from wide.kernels.reordering import Reordering


def project_routed(
    x: Tensor, weights: AttentionWeights, mask: Tensor, table: OperatorTable
) -> tuple[Tensor, Tensor, Reordering | None]:
    """Return queries [M, H_q d] of executing groups (others hold anything), keys and values, and the reordering.

    Args:
        x: Normed rows, [M, D].
        weights: Of the layer.
        mask: With the router's extra groups, bool [M, N_G + extra].
        table: Which operator runs.

    Returns:
        Queries, keys and values [M, 2 H_k d], and the query operator's reordering if it made one.
    """
    assert weights.router is not None
    width = weights.num_query_heads * weights.head_dim
    how = table.how("query", x.shape[0])
    qkv, bias = weights.qkv, weights.qkv_bias
    if how == "dense" or (how == "few" and weights.router.extra):
        few = how == "few"
        whole = project_queries(x, qkv, bias, mask, table)[0] if few else functional.linear(x, qkv, bias)
        return whole[:, :width], whole[:, width:], None
    q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    kv = functional.linear(x, qkv[width:], kv_bias)
    q, order = project_queries(x, qkv[:width], q_bias, mask[:, : weights.router.source.num_groups], table)
    return q, kv, order
