"""The matrix products of a layer under a mask, each dense or by the operator that was chosen; races time these, too.

`LinearWeights` and `GatedWeights` are all that a layer knows of its weights.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wide.inference.operators.table import DENSE, OperatorTable
from wide.kernels.device import fixed_backend
from wide.kernels.gemm_k.op import gemm_k, gemm_k_rows
from wide.kernels.gemm_mn.op import finish_dense, gemm_mn
from wide.kernels.gemv.op import MAX_ROWS, gemv_k, gemv_mn
from wide.kernels.linear_int8.op import BACKENDS as INT8_BACKENDS
from wide.kernels.linear_int8.op import MAX_ROWS as MAX_INT8_ROWS
from wide.kernels.linear_int8.op import MAX_WHOLE_ROWS, Int8Shape, expand_int8, linear_int8, quantise_rows
from wide.kernels.reorder.op import reorder, reorder_patterns, reorder_rows
from wide.kernels.reordering import BLOCK_M, PATTERN_GROUPS, Reordering
from wide.kernels.tuning import Choice


class LinearWeights(NamedTuple):
    """A linear layer: weight [N, K] in the model's dtype, or in int8 with scales; bias [N] or None.

    Steps read int8 as it is. Rows of larger products are quantised, too, or else weights are expanded for many, by
    each product again, so that the kernels and measurements of the model's dtype serve both.

    Args:
        scale: Of each output of int8 weights, float32 [N].
        int8_rows: Whether rows are quantised, but for the fewest.
        rotation: What blocks of K channels of all rows are multiplied by, as those of the weight were (`hadamard`).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    int8_rows: bool = False
    rotation: Tensor | None = None

    @property
    def outputs(self) -> int:
        """N."""
        return self.weight.shape[0]

    def rows(self, first: int | None, last: int | None) -> "LinearWeights":
        """Return the layer of some outputs, as views."""
        weight, bias, scale = (None if part is None else part[first:last] for part in self[:3])
        assert weight is not None
        return LinearWeights(weight, bias, scale, *self[3:])

    def expanded(self, dtype: torch.dtype) -> "LinearWeights":
        """Return the layer without scales: int8 weights in a floating-point dtype, others as they are."""
        if self.scale is None:
            return self
        backend = fixed_backend(self.weight.device)
        return LinearWeights(expand_int8(self.weight, self.scale, dtype, backend=backend), self.bias)

    def quantises(self, num_rows: int) -> bool:
        """Return whether a dense product of so many rows is one of int8 rows."""
        return self.int8_rows and num_rows > MAX_WHOLE_ROWS

    def dense(self, x: Tensor, mask: Tensor | None = None, *, gate: str | None = None) -> Tensor:
        """Return the whole product [M, N] of rows [M, K]; `gate` as in `linear_int8`.

        Where rows are quantised, channels of groups that a mask, bool [M, N_G], skips count as zero.
        """
        if self.scale is None or not x.shape[0] or (x.shape[0] > MAX_INT8_ROWS and not self.int8_rows):
            weight, bias, *_ = self.expanded(x.dtype)
            return _gated(functional.linear(x, weight, bias), gate)
        quantises, backend = self.quantises(x.shape[0]), fixed_backend(x.device)
        shape = Int8Shape(x.shape[0], torch.int8 if quantises else x.dtype, *self.weight.shape)
        if INT8_BACKENDS.obstacle("cuda", x.device, shape) is None:
            backend = "cuda"
        if not quantises:
            given: dict[str, Any] = {"bias": self.bias, "rotation": self.rotation, "backend": backend}
            if x.shape[0] <= MAX_ROWS and backend != "cuda":
                return _gated(gemv_mn(x, self.weight, None, scale=self.scale, **given), gate)
            return linear_int8(x, self.weight, self.scale, **given, gate=gate)
        values, scales = self.in_int8(x, mask)
        return linear_int8(values, self.weight, self.scale, self.bias, **scales, gate=gate, backend=backend)

    def output_groups(self, x: Tensor, mask: Tensor, choice: Choice, *, sorts: str) -> tuple[Tensor, Reordering | None]:
        """Return the product [M, N] in groups of outputs; see `GatedWeights.output_groups`."""
        return GatedWeights(self, self, None, "none").output_groups(x, mask, choice, sorts=sorts)

    def input_groups(self, h: Tensor, mask: Tensor, choice: Choice, *, sorts: str) -> Tensor:
        """Return the product [M, N] over the groups of inputs that execute.

        Args:
            h: Rows, [M, K]; skipped channels are zero for a dense choice of rows that are not quantised, and may hold
                anything for others.
            mask: bool [M, N_G].
            sorts: Backend of the sort by patterns.
        """
        if choice.backend == "dense":
            return self.dense(h, mask)
        if h.shape[0] <= MAX_ROWS:
            how: dict[str, Any] = {"scale": self.scale, "backend": choice.backend, "tile": choice.tile}
            return gemv_k(h, self.weight, mask, bias=self.bias, rotation=self.rotation, **how)
        num_groups = mask.shape[1]
        options: dict[str, Any] = {"group_size": h.shape[1] // num_groups, "bias": self.bias, "backend": choice.backend}
        weight = self.weight if self.int8_rows else self.expanded(h.dtype).weight
        if self.int8_rows:
            h, scales = self.in_int8(h, mask)
            options |= {**scales, "scale": self.scale}
        if num_groups > PATTERN_GROUPS and (choice.backend == "cuda" or choice.groups_per_block > PATTERN_GROUPS):
            return gemm_k_rows(h, weight, reorder_rows(mask, backend="cuda"), **options)
        block_m, per_block = choice.block_m or BLOCK_M, min(choice.groups_per_block or PATTERN_GROUPS, num_groups)
        how = {"groups_per_block": per_block, "block_m": block_m, "keeps_empty": per_block >= num_groups}
        order = reorder_patterns(mask, **how, backend=sorts)
        return gemm_k(h, weight, order, tile=choice.tile, **options)

    def in_int8(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Return rows in int8 (`quantise_rows`), and what products are told of them."""
        rotation = None if self.rotation is None else self.rotation.to(x.dtype)
        values, scale = quantise_rows(x, mask, rotation=rotation, backend=fixed_backend(x.device))
        return values, {"x_scale": scale, "dtype": x.dtype}


class GatedWeights(NamedTuple):
    """The first half of an FFN.

    Args:
        both: Gate and below it up, N = 2 F, or the only projection, N = F.
        gate: The gate's part of it, or all, as a view.
        up: The rest of it, or None.
        activation: 'silu', 'gelu_tanh', 'relu2' or 'none'.
    """

    both: LinearWeights
    gate: LinearWeights
    up: LinearWeights | None
    activation: str

    @classmethod
    def of_rows(cls, linear: LinearWeights, width: int, activation: str) -> "GatedWeights":
        """Return what one layer holds: gate and below it up, [2 F, D], or the only projection, [F, D]."""
        up = linear.rows(width, None) if linear.outputs > width else None
        return cls(linear, linear.rows(None, width), up, activation)

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
        zeroing = mask if zeroed else None
        if mask is None or choice.backend == "dense":
            joins = self.up is not None and zeroing is None
            values = self.both.dense(x, gate=self.activation if joins else None)
            if ready is not None:
                ready()
            return values if joins else finish_dense(values, self.activation, zeroing, gated=self.up is not None), None
        few = x.shape[0] <= MAX_ROWS
        scales: dict[str, Any] = {}
        if self.both.int8_rows and not few:
            x, scales = self.both.in_int8(x)
        _, gate, up, activation = self if few or scales else self._expanded(x.dtype)
        options: dict[str, Any] = {"activation": activation, "backend": choice.backend, "tile": choice.tile}
        options |= {"bias": gate.bias, "scale": gate.scale}
        if up is not None:
            options |= {"up_weight": up.weight, "up_bias": up.bias, "up_scale": up.scale}
        if few:
            options |= {"zero_skipped": zeroed, "rotation": gate.rotation}
            return gemv_mn(x, gate.weight, mask, **options), None
        order = reorder(mask, block_m=choice.block_m or BLOCK_M, backend=sorts)
        return gemm_mn(x, gate.weight, order, mask=zeroing, **scales, **options), order

    def _expanded(self, dtype: torch.dtype) -> "GatedWeights":
        if self.both.scale is None:
            return self
        return self.of_rows(self.both.expanded(dtype), self.gate.outputs, self.activation)


def _gated(values: Tensor, gate: str | None) -> Tensor:
    return values if gate is None else finish_dense(values, gate, None, gated=True)


def feed_forward(
    gated: GatedWeights,
    down: LinearWeights,
    x: Tensor,
    mask: Tensor | None,
    table: OperatorTable,
    *,
    ready: Callable[[], None] | None = None,
) -> Tensor:
    """Return an FFN's output [M, D] under a mask [M, N_G], None = everything; `ready` as in `output_groups`."""
    rows = x.shape[0]
    choice, last = DENSE if mask is None else table.choice("gate_up", rows), table.choice("down", rows)
    # Rows that are quantised are read where they execute only.
    zeroed = last.backend == "dense" and not down.quantises(rows)
    h, _ = gated.output_groups(x, mask, choice, sorts=table.backend, zeroed=zeroed, ready=ready)
    return down.dense(h) if mask is None else down.input_groups(h, mask, last, sorts=table.backend)
