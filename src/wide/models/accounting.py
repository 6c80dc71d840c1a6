"""How much is skipped: rates per layer and group, nominal sparsity, and linear-FLOP sparsity."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wide.models.attach import attachment
from wide.models.block_spec import BlockSpec
from wide.plan import Plan, Routed
from wide.routing import LayerRouting, Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """Matrix-product work of one decoder layer, FLOP per token (2 per weight).

    Args:
        attention_group: Saved by skipping one attention group: its rows of Q and its columns of O; only O where the
            queries are normed over their whole width, because Q must then be computed in full.
        ffn_group: Saved by skipping one FFN group: its rows of gate and up and its columns of down.
        attention_groups: Number of attention groups, 0 where not routed.
        ffn_groups: Number of FFN groups, 0 where not routed.
        fixed: Never skipped: K and V, and whatever is not routed.
    """

    attention_group: float
    ffn_group: float
    attention_groups: int
    ffn_groups: int
    fixed: float

    @property
    def prunable(self) -> float:
        """Work that routing can skip, FLOP per token."""
        return self.attention_group * self.attention_groups + self.ffn_group * self.ffn_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Work of a whole model per token: its layers and the output head, FLOP. Attention scores are not counted."""

    layers: tuple[LayerCost, ...]
    head: float


def costs(specs: Sequence[BlockSpec], plan: Plan, vocab_size: int) -> Costs:
    """Return the linear work of a model under a plan.

    Args:
        specs: Parts of the decoder layers.
        plan: Which halves are routed, in which groups.
        vocab_size: Rows of the output head.
    """
    layers = tuple(
        _layer_cost(spec, layer.attention, layer.ffn) for spec, layer in zip(specs, plan.layers, strict=True)
    )
    return Costs(layers=layers, head=2.0 * specs[0].hidden_size * vocab_size)


def model_costs(model: nn.Module) -> Costs:
    """Return the linear work of an attached model."""
    state = attachment(model)
    return costs(state.specs, state.plan, int(state.base.get("vocab_size") or 0))


def _layer_cost(spec: BlockSpec, attention: object, ffn: object) -> LayerCost:
    d, half = spec.hidden_size, spec.attention
    query = 2.0 * half.query_width * d
    kv = 4.0 * half.num_kv_heads * half.head_dim * d
    fixed, attention_group, ffn_group, attention_groups, ffn_groups = kv, 0.0, 0.0, 0, 0
    if isinstance(attention, Routed):
        attention_groups = attention.grouping.num_groups
        skippable = query if half.q_norm == "width" else 2 * query
        attention_group = skippable / attention_groups
        fixed += 2 * query - skippable
    else:
        fixed += 2 * query
    if spec.ffn is not None:
        work = 2.0 * spec.ffn.num_matrices * spec.ffn.width * d
        if isinstance(ffn, Routed):
            ffn_groups = ffn.grouping.num_groups
            ffn_group = work / ffn_groups
        else:
            fixed += work
    return LayerCost(
        attention_group=attention_group,
        ffn_group=ffn_group,
        attention_groups=attention_groups,
        ffn_groups=ffn_groups,
        fixed=fixed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparsity:
    """Measured skip rates, all in [0, 1].

    Args:
        attention: Mean over layers of skipped attention groups.
        ffn: Mean over layers of skipped FFN groups.
        mean: Unweighted mean of the two (the paper's nominal sparsity).
        linear_flops: Skipped share of the prunable matrix-product work (Q, O, gate, up, down).
        linear_flops_with_fixed: The same over all matrix products, K, V and output head included.
        layers: (attention, FFN) skip rates per layer; None where a half is not routed.
        tokens: Tokens counted; padding is not.
    """

    attention: float
    ffn: float
    mean: float
    linear_flops: float
    linear_flops_with_fixed: float
    layers: tuple[tuple[float | None, float | None], ...]
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "attention": self.attention,
            "ffn": self.ffn,
            "mean": self.mean,
            "linear_flops": self.linear_flops,
            "linear_flops_with_fixed": self.linear_flops_with_fixed,
            "layers": [list(layer) for layer in self.layers],
            "tokens": self.tokens,
        }


class SkipCounter:
    """Counts executed groups over many forwards, on the device, without waiting for it.

    Args:
        model: An attached model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Start at zero."""
        self._costs = model_costs(model)
        self._executed: dict[tuple[int, str], Tensor] = {}
        self._tokens: Tensor | None = None

    def add(self, routing: Routing, valid: Tensor | None = None) -> None:
        """Add one forward.

        Args:
            routing: Masks of every layer, `[B, T, N_G]`.
            valid: Bool `[B, T]`, False for padding; None counts every token.
        """
        for index, layer in enumerate(routing):
            for half in ("attention", "ffn"):
                mask = getattr(layer, half)
                if mask is None:
                    continue
                counted = mask.detach().bool() if valid is None else mask.detach().bool() & valid.unsqueeze(-1)
                total = counted.reshape(-1, mask.shape[-1]).sum(0)
                key = (index, half)
                self._executed[key] = self._executed[key] + total if key in self._executed else total
        self._add_tokens(routing, valid)

    def _add_tokens(self, routing: Routing, valid: Tensor | None) -> None:
        mask = next(m for layer in routing for m in (layer.attention, layer.ffn) if m is not None)
        tokens = torch.tensor(mask[..., 0].numel(), device=mask.device) if valid is None else valid.sum()
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def execute_rates(self) -> list[LayerRouting]:
        """Return per layer the share of tokens that execute each group, `[N_G]` float64 on the CPU."""
        tokens = self._num_tokens()
        rates = [LayerRouting() for _ in self._costs.layers]
        for (index, half), executed in self._executed.items():
            setattr(rates[index], half, executed.double().cpu() / max(tokens, 1))
        return rates

    def _num_tokens(self) -> int:
        return 0 if self._tokens is None else int(self._tokens)

    def result(self) -> Sparsity:
        """Return the rates so far (waits for the device)."""
        skip = [
            tuple(None if rate is None else float(1 - rate.mean()) for rate in (layer.attention, layer.ffn))
            for layer in self.execute_rates()
        ]
        attention = [a for a, _ in skip if a is not None]
        ffn = [f for _, f in skip if f is not None]
        means = [sum(rates) / len(rates) for rates in (attention, ffn) if rates]
        saved = sum(
            (a or 0.0) * cost.attention_group * cost.attention_groups + (f or 0.0) * cost.ffn_group * cost.ffn_groups
            for (a, f), cost in zip(skip, self._costs.layers, strict=True)
        )
        prunable = sum(cost.prunable for cost in self._costs.layers)
        total = prunable + sum(cost.fixed for cost in self._costs.layers) + self._costs.head
        return Sparsity(
            attention=sum(attention) / len(attention) if attention else 0.0,
            ffn=sum(ffn) / len(ffn) if ffn else 0.0,
            mean=sum(means) / len(means) if means else 0.0,
            linear_flops=saved / prunable if prunable else 0.0,
            linear_flops_with_fixed=saved / total if total else 0.0,
            layers=tuple((a, f) for a, f in skip),
            tokens=self._num_tokens(),
        )
