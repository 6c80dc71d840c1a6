"""The linear parts of a layer under a mask, each dense or by the operator that the table names."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wide.inference.operator_table import OperatorName, OperatorTable
from wide.kernels.gemm_k import gemm_k
from wide.kernels.gemm_k_rows import gemm_k_rows
from wide.kernels.gemm_mn import gemm_mn
from wide.kernels.gemv import gemv_k, gemv_mn
from wide.kernels.gemv.tiles import GemvTile
from wide.kernels.reorder import reorder, reorder_patterns
from wide.kernels.reorder_rows import reorder_rows
from wide.kernels.reordering import PATTERN_GROUPS, Reordering
from wide.kernels.tuning import SPECIAL_BACKENDS, Choice

_BLOCK_M = 128


class GatedWeights(NamedTuple):
    """Weights of the first half of an FFN: gate (or the only projection) [F, D], up [F, D], biases [F]."""

    gate: Tensor
    up: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    activation: str


def project_queries(
    x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, table: OperatorTable
) -> tuple[Tensor, Reordering | None]:
    """Return queries [M, N] of executing groups (others hold anything) and the reordering, if one was made.

    Args:
        x: Rows, [M, D].
        weight: [N, D].
        bias: [N] or None.
        mask: bool [M, N_G].
        table: Which operator runs.
    """
    how, choice = table.how("query", x.shape[0]), table.choice("query", x.shape[0])
    if how == "dense":
        return functional.linear(x, weight, bias), None
    if how == "few":
        tile = GemvTile(*choice.tile) if choice.tile else None
        return gemv_mn(x, weight, mask, bias=bias, backend=table.backend, tile=tile), None
    order = reorder(mask, block_m=choice.block_m or _BLOCK_M, backend=table.backend)
    return gemm_mn(x, weight, order, bias=bias, backend=_backend(choice, table), tile=choice.tile), order


def gated_product(x: Tensor, weights: GatedWeights, mask: Tensor | None, table: OperatorTable) -> Tensor:
    """Return act(x gate) * (x up), [M, F]; skipped channels are zero if the table runs the down projection dense.

    Args:
        x: Rows, [M, D].
        weights: Of the FFN.
        mask: bool [M, N_G]; None = everything executes.
        table: Which operator runs.
    """
    options: dict[str, Any] = {
        "up_weight": weights.up,
        "bias": weights.gate_bias,
        "up_bias": weights.up_bias,
        "activation": weights.activation,
    }
    rows = x.shape[0]
    if mask is None:
        return gemm_mn(x, weights.gate, _no_order(x, 1), backend="dense", **options)
    how, choice = table.how("gate_up", rows), table.choice("gate_up", rows)
    needs_zeros = table.how("down", rows) == "dense"
    if how == "few":
        tile = GemvTile(*choice.tile) if choice.tile else None
        return gemv_mn(x, weights.gate, mask, zero_skipped=needs_zeros, backend=table.backend, tile=tile, **options)
    zeroing = mask if needs_zeros else None
    if how == "dense":
        return gemm_mn(x, weights.gate, _no_order(x, mask.shape[1]), mask=zeroing, backend="dense", **options)
    order = reorder(mask, block_m=choice.block_m or _BLOCK_M, backend=table.backend)
    options |= {"mask": zeroing, "backend": _backend(choice, table), "tile": choice.tile}
    return gemm_mn(x, weights.gate, order, **options)


def sum_groups(
    name: OperatorName, h: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, table: OperatorTable
) -> Tensor:
    """Return the K-axis product of `h` [M, K]; where the table says dense, skipped channels must be zero.

    Args:
        name: 'output' or 'down'.
        h: Rows, [M, K].
        weight: [N, K].
        bias: [N] or None.
        mask: bool [M, N_G].
        table: Which operator runs.
    """
    how, choice = table.how(name, h.shape[0]), table.choice(name, h.shape[0])
    if how == "dense":
        return functional.linear(h, weight, bias)
    if how == "few":
        tile = GemvTile(*choice.tile) if choice.tile else None
        return gemv_k(h, weight, mask, bias=bias, backend=table.backend, tile=tile)
    num_groups = mask.shape[1]
    if choice.backend == "cuda" and num_groups > PATTERN_GROUPS:
        rows = reorder_rows(mask, backend=choice.backend)
        return gemm_k_rows(h, weight, rows, group_size=h.shape[1] // num_groups, bias=bias, backend="cuda")
    per_block = min(choice.groups_per_block or PATTERN_GROUPS, num_groups)
    order = reorder_patterns(
        mask,
        groups_per_block=per_block,
        block_m=choice.block_m or _BLOCK_M,
        keeps_empty=per_block >= num_groups,
        backend=table.backend,
    )
    return gemm_k(
        h,
        weight,
        order,
        group_size=h.shape[1] // num_groups,
        bias=bias,
        backend=_backend(choice, table),
        tile=choice.tile,
    )


def _backend(choice: Choice, table: OperatorTable) -> str:
    """Return the backend of a sparse product: that of the table, unless a more special one was measured."""
    return choice.backend if choice.backend in SPECIAL_BACKENDS else table.backend


def _no_order(x: Tensor, num_groups: int) -> Reordering:
    """Return a reordering of the right shapes for a dense product, which reads none of it."""
    one = torch.empty(1, dtype=torch.int32, device=x.device)
    index = one.expand(num_groups, x.shape[0])
    counts = one.expand(num_groups)
    return Reordering(index, counts, counts, index, one, _BLOCK_M)
