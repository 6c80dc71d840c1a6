"""The linear parts of a layer under a mask, each dense or by the operator that was chosen; races time these, too."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wide.inference.operators.table import DENSE, OperatorName, OperatorTable
from wide.kernels.gemm_k import gemm_k, gemm_k_rows
from wide.kernels.gemm_mn import dense_mn, gemm_mn
from wide.kernels.gemv import MAX_ROWS, gemv_k, gemv_mn
from wide.kernels.reorder import reorder, reorder_patterns, reorder_rows
from wide.kernels.reordering import PATTERN_GROUPS, Reordering
from wide.kernels.tuning import Choice

BLOCK_M = 128
"""Rows of a tile that sorts are made for where nothing else was measured."""


class GatedWeights(NamedTuple):
    """Weights of the first half of an FFN: gate (or the only projection) [F, D], up [F, D], biases [F]."""

    gate: Tensor
    up: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    activation: str

    @classmethod
    def of_rows(cls, rows: Tensor, bias: Tensor | None, width: int, activation: str) -> "GatedWeights":
        """Return what one matrix holds: gate and below it up, [2 F, D], or the only projection, [F, D]."""
        gate, up = rows[:width], rows[width:] if len(rows) > width else None
        of_gate, of_up = (None, None) if bias is None else (bias[:width], None if up is None else bias[width:])
        return cls(gate, up, of_gate, of_up, activation)


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
    weights = GatedWeights(weight, None, bias, None, "none")
    return output_groups(x, weights, mask, table.choice("query", x.shape[0]), sorts=table.backend)


def gated_product(
    x: Tensor,
    weights: GatedWeights,
    mask: Tensor | None,
    table: OperatorTable,
    ready: Callable[[], None] | None = None,
) -> Tensor:
    """Return act(x gate) * (x up), [M, F]; skipped channels are zero if the table runs the down projection dense.

    Args:
        x: Rows, [M, D].
        weights: Of the FFN.
        mask: bool [M, N_G]; None = everything executes.
        table: Which operator runs.
        ready: See `output_groups`.
    """
    choice = DENSE if mask is None else table.choice("gate_up", x.shape[0])
    zeroed = table.how("down", x.shape[0]) == "dense"
    return output_groups(x, weights, mask, choice, sorts=table.backend, zeroed=zeroed, ready=ready)[0]


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
    return input_groups(h, weight, bias, mask, table.choice(name, h.shape[0]), sorts=table.backend)


def output_groups(
    x: Tensor,
    weights: GatedWeights,
    mask: Tensor | None,
    choice: Choice,
    *,
    sorts: str,
    zeroed: bool = False,
    ready: Callable[[], None] | None = None,
) -> tuple[Tensor, Reordering | None]:
    """Return a product over output groups [M, F], and the reordering if one was made.

    Args:
        x: Rows, [M, D].
        weights: Gate and up, or one projection.
        mask: bool [M, N_G]; None = everything executes, with a dense choice.
        choice: What runs.
        sorts: Backend of the reordering.
        zeroed: Whether skipped channels are zero; otherwise they hold anything.
        ready: With a dense choice, called before the mask is looked at, which may be on its way until then.
    """
    options: dict[str, Any] = {
        "up_weight": weights.up,
        "bias": weights.gate_bias,
        "up_bias": weights.up_bias,
        "activation": weights.activation,
    }
    zeroing = mask if zeroed else None
    if mask is None or choice.backend == "dense":
        if ready is not None:
            return dense_mn(x, weights.gate, mask=zeroing, ready=ready, **options), None
        unused = _no_order(x, 1 if mask is None else mask.shape[1])
        return gemm_mn(x, weights.gate, unused, mask=zeroing, backend="dense", **options), None
    options |= {"backend": choice.backend, "tile": choice.tile}
    if x.shape[0] <= MAX_ROWS:
        return gemv_mn(x, weights.gate, mask, zero_skipped=zeroed, **options), None
    order = reorder(mask, block_m=choice.block_m or BLOCK_M, backend=sorts)
    return gemm_mn(x, weights.gate, order, mask=zeroing, **options), order


def input_groups(h: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, choice: Choice, *, sorts: str) -> Tensor:
    """Return a product over input groups [M, N].

    Args:
        h: Rows, [M, K]; skipped channels are zero for a dense choice, and may hold anything for others.
        weight: [N, K].
        bias: [N] or None.
        mask: bool [M, N_G].
        choice: What runs.
        sorts: Backend of the sort by patterns.
    """
    if choice.backend == "dense":
        return functional.linear(h, weight, bias)
    if h.shape[0] <= MAX_ROWS:
        return gemv_k(h, weight, mask, bias=bias, backend=choice.backend, tile=choice.tile)
    num_groups = mask.shape[1]
    options: dict[str, Any] = {"group_size": h.shape[1] // num_groups, "bias": bias, "backend": choice.backend}
    if num_groups > PATTERN_GROUPS and (choice.backend == "cuda" or choice.groups_per_block > PATTERN_GROUPS):
        return gemm_k_rows(h, weight, reorder_rows(mask, backend="cuda"), **options)
    per_block = min(choice.groups_per_block or PATTERN_GROUPS, num_groups)
    order = reorder_patterns(
        mask,
        groups_per_block=per_block,
        block_m=choice.block_m or BLOCK_M,
        keeps_empty=per_block >= num_groups,
        backend=sorts,
    )
    return gemm_k(h, weight, order, tile=choice.tile, **options)


def _no_order(x: Tensor, num_groups: int) -> Reordering:
    """Return a reordering of the right shapes for a dense product, which reads none of it."""
    one = torch.empty(1, dtype=torch.int32, device=x.device)
    index = one.expand(num_groups, x.shape[0])
    counts = one.expand(num_groups)
    return Reordering(index, counts, counts, index, one, BLOCK_M)
