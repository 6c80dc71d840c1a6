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

from wide.errors import NotAttachedError
from wide.inference.engine.paged import attend_paged, is_known
from wide.inference.engine.visible_keys import VisibleKeys
from wide.inference.operators.attention import attend_prompt, sequence_order
from wide.inference.operators.products import GatedWeights, gated_product, project_queries, sum_groups
from wide.inference.operators.table import OperatorTable
from wide.kernels.attention_decode import attention_decode
from wide.kernels.clear_skipped import cleared
from wide.kernels.reordering import Reordering
from wide.models.block_spec import AttentionSpec, FeedForwardSpec
from wide.models.gates import Gate

# Options of an attention function that change what is computed, and that wide's attention does not know.
_UNKNOWN_OPTIONS = ("s_aux", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "block_indices")


class FusedFeedForward:
    """The forward of a routed FFN.

    Args:
        spec: Parts of the FFN.
        gate: Its gate, which holds the pending mask.
        activation: Name of the activation in the operators' words.
        table: Which operator runs when.
    """

    def __init__(self, spec: FeedForwardSpec, gate: Gate, activation: str, table: OperatorTable) -> None:
        """Keep the parts; weights are read at every call, so that loading new ones works."""
        self.spec, self.gate, self.activation, self.table = spec, gate, activation, table
        self.original: Callable[[Tensor], Tensor] = spec.module.forward

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the FFN's output `[..., D]` for hidden states `[..., D]`."""
        mask = self.gate.take()
        if mask is None:
            return self.original(hidden)
        _require_inference(mask)
        rows, groups = hidden.reshape(-1, hidden.shape[-1]), mask.reshape(-1, mask.shape[-1])
        down: Any = self.spec.down
        product = gated_product(rows, self._weights(), groups, self.table)
        return sum_groups("down", product, down.weight, down.bias, groups, self.table).view(hidden.shape)

    def _weights(self) -> GatedWeights:
        up: Any = self.spec.up
        gate: Any = self.spec.gate
        if gate is None:
            return GatedWeights.of_rows(up.weight, up.bias, self.spec.width, self.activation)
        return GatedWeights(gate.weight, up.weight, gate.bias, up.bias, self.activation)


class FusedAttention:
    """What a routed attention module's projections and attention function compute.

    Args:
        spec: Parts of the attention.
        gate: Its gate, which holds the pending mask.
        table: Which operator runs when.
        keys: Which keys the running forward sees, shared by all layers of the model.
    """

    def __init__(self, spec: AttentionSpec, gate: Gate, table: OperatorTable, keys: VisibleKeys) -> None:
        """Keep the parts; weights are read at every call."""
        self.spec, self.gate, self.table, self.keys = spec, gate, table, keys
        self.original_query: Callable[[Tensor], Tensor] = spec.query.forward
        self.original_output: Callable[[Tensor], Tensor] = spec.output.forward
        self.mask: Tensor | None = None
        self._order: Reordering | None = None

    def query(self, hidden: Tensor) -> Tensor:
        """Return the query projection (with K and V where fused) `[..., N]`, skipped query groups unspecified."""
        mask, self._order = self.gate.mask.value, None
        if mask is not None:
            _require_inference(mask)
        rows = hidden.reshape(-1, hidden.shape[-1])
        if mask is None or self.spec.q_norm == "width" or self.table.how("query", rows.shape[0]) == "dense":
            # A norm over the whole query width needs every query channel.
            return self.original_query(hidden)
        linear: Any = self.spec.query
        width = self.spec.query_width
        bias = None if linear.bias is None else linear.bias[:width]
        groups = mask.reshape(-1, mask.shape[-1])
        query, self._order = project_queries(rows, linear.weight[:width], bias, groups, self.table)
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
            function: The dense attention function, for sizes at which skipping does not pay, and for masks that wide's
                attention does not know.
            module: The attention module.
            q: Queries `[B, H_q, T, d]`.
            k: Keys `[B, H_k, S, d]`.
            v: Values, as `k`.
            bias: transformers' attention mask, `[B, 1, T, S]` or None for purely causal attention.
            options: Further keyword arguments of the dense function.
        """
        mask = self.mask = self.gate.take()
        order, self._order = self._order, None
        if self.keys.is_paged and is_known(options):
            needs_zeros = self.table.how("output", q.shape[2]) == "dense"
            given: dict[str, Any] = {"backend": self.table.backend, "shared": self.keys.shared}
            return attend_paged(module, q, k, v, mask, options, zero_skipped=needs_zeros, **given), None
        if mask is None:
            return function(module, q, k, v, bias, **options)
        if _is_plain(module, bias, options):
            if q.shape[2] == 1 and self.keys.step and self.table.cache:
                return self._attend_step(q, k, v, bias, mask, options), None
            if q.shape[2] > 1 and self.keys.prefill and self.table.how("attention", q.shape[2]) != "dense":
                return self._attend_prompt(q, k, v, mask, order, options), None
        out, weights = function(module, q, k, v, bias, **options)
        return _select(out, mask), weights

    def _attend_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, order: Reordering | None, options: dict[str, Any]
    ) -> Tensor:
        """Return the attention output `[B, T, H, d]` of several tokens, skipped groups zero or unspecified."""
        assert self.keys.prefill is not None
        past, starts = self.keys.prefill
        length, rows = q.shape[2], mask.shape[0] * mask.shape[1]
        num_keys = past + length
        if k.shape[2] < num_keys and starts is not None:
            # A sliding layer's cache has dropped the oldest keys.
            starts = (starts - (num_keys - k.shape[2])).clamp(min=0)
        q = q.transpose(1, 2)
        return attend_prompt(
            q,
            k[:, :, :num_keys].transpose(1, 2),
            v[:, :, :num_keys].transpose(1, 2),
            sequence_order(mask, order, q, self.table.backend),
            self.table,
            length=length,
            starts=starts,
            window=options.get("sliding_window"),
            soft_cap=options.get("softcap"),
            scale=options.get("scaling"),
            zero_skipped=self.table.how("output", rows) == "dense",
        )

    def _attend_step(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the attention output `[B, 1, H, d]` of one new token a sequence, skipped groups zero."""
        bounds = self.keys.bounds(bias, k)
        out = attention_decode(
            q[:, :, 0],
            k.transpose(1, 2),
            v.transpose(1, 2),
            bounds.ends,
            mask[:, 0],
            starts=bounds.starts,
            # The bounds of a sliding layer's mask hold its window already.
            window=options.get("sliding_window") if bias is None else None,
            soft_cap=options.get("softcap"),
            scale=options.get("scaling"),
            backend=self.table.backend,
        )
        if bounds.is_broken is not None:
            # The mask was promised to leave one run of keys; where it does not, no number is right.
            out.masked_fill_(bounds.is_broken[:, None, None], torch.nan)
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


def _is_plain(module: nn.Module, bias: Any, options: dict[str, Any]) -> bool:
    """Return whether an attention function is asked for what wide's attention computes, as far as the layer knows."""
    if bias is not None and not (isinstance(bias, Tensor) and bias.dim() == 4 and bias.shape[1] == 1):
        return False
    if options.get("is_causal") is False or not getattr(module, "is_causal", True):
        return False
    return all(options.get(name) is None for name in _UNKNOWN_OPTIONS)


def _select(heads: Tensor, mask: Tensor) -> Tensor:
    """Return attention output `[B, T, H, d]` with zeros for skipped groups, in place where gradients are off."""
    if not torch.is_grad_enabled() and heads.is_contiguous():
        cleared(heads.view(mask.shape[0] * mask.shape[1], -1), mask.flatten(0, 1))
        return heads
    per_head = mask.repeat_interleave(heads.shape[-2] // mask.shape[-1], dim=-1).unsqueeze(-1)
    return torch.where(per_head, heads, 0)


def _require_inference(mask: Tensor) -> None:
    """Refuse the float masks of routers in training mode."""
    if mask.dtype != torch.bool:
        raise NotAttachedError(
            f"this model is optimised, which is for inference, and a router in training mode gave a mask of "
            f"{mask.dtype}; call wide.deoptimize(model) first, or model.eval()"
        )
