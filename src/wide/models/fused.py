"""Fused execution of one layer: wide's operators instead of dense layers followed by masks.

Nothing of a family's own code is copied: norms, RoPE, caches and masks stay where they are. Replaced is what four
modules compute: the query and output projections, the attention function, and the whole FFN. Skipped channels hold
unspecified memory between them, so values are selected by the mask, never multiplied by it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wide.kernels.attention_decode import attention_decode
from wide.kernels.attention_prefill import attention_prefill
from wide.kernels.gemm_k import gemm_k
from wide.kernels.gemm_mn import gemm_mn
from wide.kernels.gemv import MAX_ROWS, gemv_k, gemv_mn
from wide.kernels.reorder import reorder, reorder_patterns, reorder_sequences
from wide.models.block_spec import AttentionSpec, FeedForwardSpec
from wide.models.router import Router

_PATTERN_GROUPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How fused layers choose between the operators and the dense product followed by a selection.

    Args:
        backend: Backend of the operators, 'triton' or 'torch'.
        min_rows: Tokens in a forward from which the gather products pay. From `MAX_ROWS` + 1 of the decode products
            up to this, the dense product runs.
        min_queries: Queries per sequence from which the gathered prefill attention pays.
        sparse_down: Whether the K-axis product serves the FFN's down projection; otherwise it is dense.
        sparse_output: The same for the attention's output projection.
    """

    backend: str = "triton"
    min_rows: int = 512
    min_queries: int = 256
    sparse_down: bool = True
    sparse_output: bool = True


def select_groups(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` `[M, C]` with the channels of skipped groups set to zero; `mask` is bool `[M, N_G]`."""
    grouped = values.unflatten(-1, (mask.shape[-1], -1))
    return torch.where(mask.unsqueeze(-1), grouped, 0).flatten(-2)


class FusedFeedForward:
    """The forward of a routed FFN.

    Args:
        spec: Parts of the FFN.
        router: Its router, which holds the pending mask.
        activation: Name of the activation in the operators' words.
        execution: Which operator runs when.
    """

    def __init__(self, spec: FeedForwardSpec, router: Router, activation: str, execution: Execution) -> None:
        """Keep the parts; weights are read at every call, so that loading new ones works."""
        self.spec, self.router, self.activation, self.execution = spec, router, activation, execution
        self.original: Callable[[Tensor], Tensor] = spec.module.forward

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the FFN's output `[..., D]` for hidden states `[..., D]`."""
        mask = self.router.mask
        if mask is None:
            return self.original(hidden)
        self.router.mask = None
        rows, groups = hidden.reshape(-1, hidden.shape[-1]), mask.reshape(-1, mask.shape[-1])
        return self._run(rows, groups).view(hidden.shape)

    def _run(self, x: Tensor, mask: Tensor) -> Tensor:
        gate, up, gate_bias, up_bias = self._weights()
        down: Any = self.spec.down
        backend = self.execution.backend
        if x.shape[0] <= MAX_ROWS:
            product = gemv_mn(
                x,
                gate,
                mask,
                up_weight=up,
                bias=gate_bias,
                up_bias=up_bias,
                activation=self.activation,
                backend=backend,
            )
            return gemv_k(product, down.weight, mask, bias=down.bias, backend=backend)
        if x.shape[0] < self.execution.min_rows:
            first = self.spec.activation(functional.linear(x, gate, gate_bias))
            product = first if up is None else first * functional.linear(x, up, up_bias)
            return functional.linear(select_groups(product, mask), down.weight, down.bias)
        product = gemm_mn(
            x,
            gate,
            reorder(mask, backend=backend),
            up_weight=up,
            bias=gate_bias,
            up_bias=up_bias,
            activation=self.activation,
            backend=backend,
        )
        if not self.execution.sparse_down:
            return functional.linear(select_groups(product, mask), down.weight, down.bias)
        return sum_groups(product, down, mask, backend)

    def _weights(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        up: Any = self.spec.up
        if self.spec.fused_gate:
            width = self.spec.width
            bias = up.bias
            return (
                up.weight[:width],
                up.weight[width:],
                None if bias is None else bias[:width],
                None if bias is None else bias[width:],
            )
        if self.spec.gate is None:
            return up.weight, None, up.bias, None
        gate: Any = self.spec.gate
        return gate.weight, up.weight, gate.bias, up.bias


class FusedAttention:
    """What a routed attention module's projections and attention function compute.

    Args:
        spec: Parts of the attention.
        router: Its router, which holds the pending mask.
        execution: Which operator runs when.
    """

    def __init__(self, spec: AttentionSpec, router: Router, execution: Execution) -> None:
        """Keep the parts; weights are read at every call."""
        self.spec, self.router, self.execution = spec, router, execution
        self.original_query: Callable[[Tensor], Tensor] = spec.query.forward
        self.original_output: Callable[[Tensor], Tensor] = spec.output.forward
        self.mask: Tensor | None = None

    def query(self, hidden: Tensor) -> Tensor:
        """Return the query projection (with K and V where fused) `[..., N]`, skipped query groups unspecified."""
        mask = self.router.mask
        rows = hidden.reshape(-1, hidden.shape[-1])
        if mask is None or self.spec.q_norm == "width" or MAX_ROWS < rows.shape[0] < self.execution.min_rows:
            # A norm over the whole query width needs every query channel.
            return self.original_query(hidden)
        linear: Any = self.spec.query
        width = self.spec.query_width
        bias = None if linear.bias is None else linear.bias[:width]
        groups = mask.reshape(-1, mask.shape[-1])
        backend = self.execution.backend
        if rows.shape[0] <= MAX_ROWS:
            query = gemv_mn(rows, linear.weight[:width], groups, bias=bias, backend=backend)
        else:
            query = gemm_mn(rows, linear.weight[:width], reorder(groups, backend=backend), bias=bias, backend=backend)
        if linear.weight.shape[0] > width:
            rest = functional.linear(rows, linear.weight[width:], None if linear.bias is None else linear.bias[width:])
            query = torch.cat([query, rest], dim=-1)
        return query.view(*hidden.shape[:-1], -1)

    def attend(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Any,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """Return attention output `[B, T, H, d]`; skipped groups hold zeros or unspecified memory.

        Args:
            function: The dense attention function, for shapes at which gathering does not pay.
            module: The attention module.
            q: Queries `[B, H_q, T, d]`.
            k: Keys `[B, H_k, S, d]`.
            v: Values, as `k`.
            bias: transformers' attention mask, `[B, 1, T, S]` or None for purely causal attention.
            options: Further keyword arguments of the dense function.
        """
        mask = self.mask = self.router.take()
        if mask is None:
            return function(module, q, k, v, bias, **options)
        shared = {
            "scale": options.get("scaling"),
            "window": options.get("sliding_window"),
            "soft_cap": options.get("softcap"),
            "backend": self.execution.backend,
        }
        if q.shape[2] == 1:
            lengths, starts = _bounds(bias, k)
            out = attention_decode(
                q[:, :, 0],
                k.transpose(1, 2),
                v.transpose(1, 2),
                lengths,
                mask[:, 0],
                starts=starts,
                # The bounds of a sliding layer's mask hold its window already.
                **(shared if bias is None else shared | {"window": None}),
            )
            return out.unsqueeze(1), None
        bounds = self.router.control.prefill
        if bounds is None or q.shape[2] < self.execution.min_queries:
            out, weights = function(module, q, k, v, bias, **options)
            return torch.where(self._per_head(mask, out), out, 0), weights
        num_keys = bounds.past + q.shape[2]
        out = attention_prefill(
            q.transpose(1, 2),
            k[:, :, :num_keys].transpose(1, 2),
            v[:, :, :num_keys].transpose(1, 2),
            reorder_sequences(mask, backend=self.execution.backend),
            starts=bounds.starts,
            **shared,
        )
        return out, None

    def output(self, heads: Tensor) -> Tensor:
        """Return the output projection `[..., D]` of attention output `[..., H * d]`."""
        mask, self.mask = self.mask, None
        if mask is None:
            return self.original_output(heads)
        rows, groups = heads.reshape(-1, heads.shape[-1]), mask.reshape(-1, mask.shape[-1])
        linear: Any = self.spec.output
        if rows.shape[0] <= MAX_ROWS:
            out = gemv_k(rows, linear.weight, groups, bias=linear.bias, backend=self.execution.backend)
        elif rows.shape[0] < self.execution.min_rows or not self.execution.sparse_output:
            out = functional.linear(select_groups(rows, groups), linear.weight, linear.bias)
        else:
            out = sum_groups(rows, linear, groups, self.execution.backend)
        return out.view(*heads.shape[:-1], -1)

    def _per_head(self, mask: Tensor, heads: Tensor) -> Tensor:
        return mask.repeat_interleave(heads.shape[-2] // mask.shape[-1], dim=-1).unsqueeze(-1)


def sum_groups(product: Tensor, linear: Any, mask: Tensor, backend: str) -> Tensor:
    """Return the K-axis product of a linear module over the executing groups of each row."""
    num_groups = mask.shape[-1]
    per_block = min(_PATTERN_GROUPS, num_groups)
    order = reorder_patterns(mask, groups_per_block=per_block, keeps_empty=per_block >= num_groups, backend=backend)
    return gemm_k(
        product,
        linear.weight,
        order,
        group_size=product.shape[-1] // num_groups,
        bias=linear.bias,
        backend=backend,
    )


def _bounds(bias: Any, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return per sequence the end and start of the keys that a single query sees, int32 `[B]`, on the device."""
    batch, length = k.shape[0], k.shape[2]
    if bias is None:
        return torch.full((batch,), length, dtype=torch.int32, device=k.device), None
    seen = bias[:, 0, -1, :length]
    seen = seen if seen.dtype == torch.bool else seen == 0
    places = torch.arange(1, length + 1, device=k.device, dtype=torch.int32)
    ends = (seen * places).amax(-1).to(torch.int32)
    starts = length - (seen * places.flip(0)).amax(-1).to(torch.int32)
    return ends.expand(batch).contiguous(), starts.expand(batch).contiguous()
