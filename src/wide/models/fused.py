"""Fused execution of one layer: wide's operators instead of dense layers followed by masks.

Nothing of a family's own code is copied: norms, RoPE, caches and masks stay where they are. Replaced is what four
modules compute: the query and output projections, the attention function, and the whole FFN. Skipped channels hold
unspecified memory between them, so values are selected by the mask, never multiplied by it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wide.kernels.attention_decode import attention_decode
from wide.kernels.operator_table import OperatorTable
from wide.kernels.products import GatedWeights, gated_product, project_queries, sum_groups
from wide.kernels.prompt_attention import attend_prompt
from wide.kernels.reorder import reorder_sequences
from wide.models.block_spec import AttentionSpec, FeedForwardSpec
from wide.models.router import Router


class FusedFeedForward:
    """The forward of a routed FFN.

    Args:
        spec: Parts of the FFN.
        router: Its router, which holds the pending mask.
        activation: Name of the activation in the operators' words.
        table: Which operator runs when.
    """

    def __init__(self, spec: FeedForwardSpec, router: Router, activation: str, table: OperatorTable) -> None:
        """Keep the parts; weights are read at every call, so that loading new ones works."""
        self.spec, self.router, self.activation, self.table = spec, router, activation, table
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
        down: Any = self.spec.down
        product = gated_product(x, self._weights(), mask, self.table)
        return sum_groups("down", product, down.weight, down.bias, mask, self.table)

    def _weights(self) -> GatedWeights:
        up: Any = self.spec.up
        if self.spec.fused_gate:
            width, weight, bias = self.spec.width, up.weight, up.bias
            gate_bias, up_bias = (None, None) if bias is None else (bias[:width], bias[width:])
            return GatedWeights(weight[:width], weight[width:], gate_bias, up_bias, self.activation)
        if self.spec.gate is None:
            return GatedWeights(up.weight, None, up.bias, None, self.activation)
        gate: Any = self.spec.gate
        return GatedWeights(gate.weight, up.weight, gate.bias, up.bias, self.activation)


class FusedAttention:
    """What a routed attention module's projections and attention function compute.

    Args:
        spec: Parts of the attention.
        router: Its router, which holds the pending mask.
        table: Which operator runs when.
    """

    def __init__(self, spec: AttentionSpec, router: Router, table: OperatorTable) -> None:
        """Keep the parts; weights are read at every call."""
        self.spec, self.router, self.table = spec, router, table
        self.original_query: Callable[[Tensor], Tensor] = spec.query.forward
        self.original_output: Callable[[Tensor], Tensor] = spec.output.forward
        self.mask: Tensor | None = None

    def query(self, hidden: Tensor) -> Tensor:
        """Return the query projection (with K and V where fused) `[..., N]`, skipped query groups unspecified."""
        mask = self.router.mask
        rows = hidden.reshape(-1, hidden.shape[-1])
        if mask is None or self.spec.q_norm == "width" or self.table.how("query", rows.shape[0]) == "dense":
            # A norm over the whole query width needs every query channel.
            return self.original_query(hidden)
        linear: Any = self.spec.query
        width = self.spec.query_width
        bias = None if linear.bias is None else linear.bias[:width]
        groups = mask.reshape(-1, mask.shape[-1])
        query = project_queries(rows, linear.weight[:width], bias, groups, self.table)[0]
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
        bounds = self.router.control.prefill
        if q.shape[2] == 1 and self.table.cache:
            return self._attend_step(q, k, v, bias, mask, options), None
        length = q.shape[2]
        if length == 1 or bounds is None or self.table.how("attention", length) == "dense":
            out, weights = function(module, q, k, v, bias, **options)
            return torch.where(self._per_head(mask, out), out, 0), weights
        num_keys = bounds.past + length
        rows = mask.shape[0] * mask.shape[1]
        out = attend_prompt(
            q.transpose(1, 2),
            k[:, :, :num_keys].transpose(1, 2),
            v[:, :, :num_keys].transpose(1, 2),
            reorder_sequences(mask, backend=self.table.backend),
            self.table,
            length=length,
            starts=bounds.starts,
            window=options.get("sliding_window"),
            soft_cap=options.get("softcap"),
            scale=options.get("scaling"),
            zero_skipped=self.table.how("output", rows) == "dense",
        )
        return out, None

    def _attend_step(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the attention output `[B, 1, H, d]` of one new token a sequence, skipped groups zero."""
        lengths, starts = _bounds(bias, k)
        out = attention_decode(
            q[:, :, 0],
            k.transpose(1, 2),
            v.transpose(1, 2),
            lengths,
            mask[:, 0],
            starts=starts,
            # The bounds of a sliding layer's mask hold its window already.
            window=options.get("sliding_window") if bias is None else None,
            soft_cap=options.get("softcap"),
            scale=options.get("scaling"),
            backend=self.table.backend,
        )
        return out.unsqueeze(1)

    def output(self, heads: Tensor) -> Tensor:
        """Return the output projection `[..., D]` of attention output `[..., H * d]`."""
        mask, self.mask = self.mask, None
        if mask is None:
            return self.original_output(heads)
        rows, groups = heads.reshape(-1, heads.shape[-1]), mask.reshape(-1, mask.shape[-1])
        linear: Any = self.spec.output
        # `attend` has put zeros where this product is dense.
        out = sum_groups("output", rows, linear.weight, linear.bias, groups, self.table)
        return out.view(*heads.shape[:-1], -1)

    def _per_head(self, mask: Tensor, heads: Tensor) -> Tensor:
        return mask.repeat_interleave(heads.shape[-2] // mask.shape[-1], dim=-1).unsqueeze(-1)


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
