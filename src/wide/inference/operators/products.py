"""The matrix products of a layer under a mask, each dense or by the operator that was chosen; races time these, too.

`LinearWeights` and `GatedWeights` are all that a layer knows of its weights: another format, such as eight bits with
scales, is another class with the same methods (tables of measurements then need the format in their keys).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wide.inference.operators.table import DENSE, OperatorTable
from wide.kernels.gemm_k import gemm_k, gemm_k_rows
from wide.kernels.gemm_mn import dense_mn, gemm_mn
from wide.kernels.gemv import MAX_ROWS, gemv_k, gemv_mn
from wide.kernels.reorder import reorder, reorder_patterns, reorder_rows
from wide.kernels.reordering import BLOCK_M, PATTERN_GROUPS, Reordering
from wide.kernels.tuning import Choice


class LinearWeights(NamedTuple):
    """A linear layer in the model's dtype: weight [N, K] and bias [N] or None."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def outputs(self) -> int:
        """N."""
        return self.weight.shape[0]

    def rows(self, first: int | None, last: int | None) -> "LinearWeights":
        """Return the layer of some outputs, as views."""
        return LinearWeights(self.weight[first:last], None if self.bias is None else self.bias[first:last])

    def dense(self, x: Tensor) -> Tensor:
        """Return the whole product [M, N] of rows [M, K]."""
        return functional.linear(x, self.weight, self.bias)

    def output_groups(self, x: Tensor, mask: Tensor, choice: Choice, *, sorts: str) -> tuple[Tensor, Reordering | None]:
        """Return the product [M, N] in groups of outputs; see `GatedWeights.output_groups`."""
        return GatedWeights(self.weight, None, self.bias, None, "none").output_groups(x, mask, choice, sorts=sorts)

    def input_groups(self, h: Tensor, mask: Tensor, choice: Choice, *, sorts: str) -> Tensor:
        """Return the product [M, N] over the groups of inputs that execute.

        Args:
            h: Rows, [M, K]; skipped channels are zero for a dense choice, and may hold anything for others.
            mask: bool [M, N_G].
            sorts: Backend of the sort by patterns.
        """
        if choice.backend == "dense":
            return self.dense(h)
        if h.shape[0] <= MAX_ROWS:
            return gemv_k(h, self.weight, mask, bias=self.bias, backend=choice.backend, tile=choice.tile)
        num_groups = mask.shape[1]
        options: dict[str, Any] = {"group_size": h.shape[1] // num_groups, "bias": self.bias, "backend": choice.backend}
        if num_groups > PATTERN_GROUPS and (choice.backend == "cuda" or choice.groups_per_block > PATTERN_GROUPS):
            return gemm_k_rows(h, self.weight, reorder_rows(mask, backend="cuda"), **options)
        per_block = min(choice.groups_per_block or PATTERN_GROUPS, num_groups)
        order = reorder_patterns(
            mask,
            groups_per_block=per_block,
            block_m=choice.block_m or BLOCK_M,
            keeps_empty=per_block >= num_groups,
            backend=sorts,
        )
        return gemm_k(h, self.weight, order, tile=choice.tile, **options)


class GatedWeights(NamedTuple):
    """The first half of an FFN: gate (or the only projection) [F, D], up [F, D], biases [F].

    Args:
        gate: Of a gated FFN up lies right behind it in memory.
        up: None without a gate.
        gate_bias: None without biases.
        activation: 'silu', 'gelu_tanh', 'relu2' or 'none'.
    """

    gate: Tensor
    up: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    activation: str

    @property
    def outputs(self) -> int:
        """Columns of the product, gate and up counted apart."""
        return len(self.gate) * (1 if self.up is None else 2)

    @classmethod
    def of_rows(cls, linear: LinearWeights, width: int, activation: str) -> "GatedWeights":
        """Return what one layer holds: gate and below it up, [2 F, D], or the only projection, [F, D]."""
        gate, up = linear.rows(None, width), linear.rows(width, None) if linear.outputs > width else None
        return cls(
            gate.weight, None if up is None else up.weight, gate.bias, None if up is None else up.bias, activation
        )

    def output_groups(
        self,
        x: Tensor,
        mask: Tensor | None,
        choice: Choice,
        *,
        sorts: str,
        zeroed: bool = False,
        ready: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Reordering | None]:
        """Return act(x gate) * (x up), [M, F], and the reordering if one was made.

        Args:
            x: Rows, [M, D].
            mask: bool [M, N_G]; None = everything executes, with a dense choice.
            sorts: Backend of the reordering.
            zeroed: Whether skipped channels are zero; otherwise they hold anything.
            ready: With a dense choice, called before the mask is read: a router on another stream may still write it.
        """
        options: dict[str, Any] = {
            "up_weight": self.up,
            "bias": self.gate_bias,
            "up_bias": self.up_bias,
            "activation": self.activation,
        }
        zeroing = mask if zeroed else None
        if mask is None or choice.backend == "dense":
            if ready is not None:
                return dense_mn(x, self.gate, mask=zeroing, ready=ready, **options), None
            unused = _no_order(x, 1 if mask is None else mask.shape[1])
            return gemm_mn(x, self.gate, unused, mask=zeroing, backend=DENSE.backend, **options), None
        options |= {"backend": choice.backend, "tile": choice.tile}
        if x.shape[0] <= MAX_ROWS:
            return gemv_mn(x, self.gate, mask, zero_skipped=zeroed, **options), None
        order = reorder(mask, block_m=choice.block_m or BLOCK_M, backend=sorts)
        return gemm_mn(x, self.gate, order, mask=zeroing, **options), order


def feed_forward(
    gated: GatedWeights,
    down: LinearWeights,
    x: Tensor,
    mask: Tensor | None,
    table: OperatorTable,
    *,
    ready: Callable[[], None] | None = None,
) -> Tensor:
    """Return the output of an FFN, [M, D], of rows [M, D] under a mask bool [M, N_G]; None = everything executes.

    Args:
        ready: See `GatedWeights.output_groups`.
    """
    rows = x.shape[0]
    choice, last = DENSE if mask is None else table.choice("gate_up", rows), table.choice("down", rows)
    h, _ = gated.output_groups(x, mask, choice, sorts=table.backend, zeroed=last.backend == "dense", ready=ready)
    return down.dense(h) if mask is None else down.input_groups(h, mask, last, sorts=table.backend)


def _no_order(x: Tensor, num_groups: int) -> Reordering:
    """Return a reordering of the right shapes for a dense product, which reads none of it."""
    one = torch.empty(1, dtype=torch.int32, device=x.device)
    index = one.expand(num_groups, x.shape[0])
    counts = one.expand(num_groups)
    return Reordering(index, counts, counts, index, one, BLOCK_M)
