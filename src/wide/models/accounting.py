"""How much is skipped or pruned: rates per layer and group, nominal sparsity, and linear-FLOP sparsity."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wide.errors import ConfigError
from wide.models.attach import attachment
from wide.models.block_spec import BlockSpec
from wide.models.removed import kept_heads, removed_layers
from wide.models.sizes import LayerSizes, dense_sizes, planned_sizes
from wide.plan import Following, LayerPlan, Plan, Routed
from wide.routing import LayerRouting, Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """Matrix-product work of one decoder layer, FLOP per token (2 per weight).

    Args:
        attention_group: Saved by skipping one attention group: its rows of Q and its columns of O; only O where the
            queries are normed over their whole width, because Q must then be computed in full; K and V too where
            skipping tokens are evicted.
        ffn_group: Saved by skipping one FFN group: its rows of gate and up and its columns of down.
        attention_groups: Number of attention groups, 0 where not routed.
        ffn_groups: Number of FFN groups, 0 where not routed; 1 where the FFN follows the attention's router.
        fixed: Executed for every token: K and V, and whatever is not routed.
        removed: Pruned for every token, of Q, O and FFN; a stream's shortcut matrices are taken off, so that it may
            be negative.
        removed_kv: Pruned for every token, of K and V.
    """

    attention_group: float
    ffn_group: float
    attention_groups: int
    ffn_groups: int
    fixed: float
    removed: float = 0.0
    removed_kv: float = 0.0

    @property
    def prunable(self) -> float:
        """Work that routing can skip, FLOP per token."""
        return self.attention_group * self.attention_groups + self.ffn_group * self.ffn_groups

    @property
    def total(self) -> float:
        """Work of the dense layer, FLOP per token."""
        return self.prunable + self.fixed + self.removed + self.removed_kv


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Work of a whole model per token: its layers and the output head, FLOP. Attention scores are not counted."""

    layers: tuple[LayerCost, ...]
    head: float


def costs(
    specs: Sequence[BlockSpec], plan: Plan, vocab_size: int, *, heads: Mapping[int, Tensor] | None = None
) -> Costs:
    """Return the linear work of a model under a plan.

    Args:
        specs: Parts of the decoder layers.
        plan: What each half-layer runs.
        vocab_size: Rows of the output head.
        heads: By layer, which query heads a `Kept` attention keeps, bool `[H_q]`; K and V of a KV head are saved
            where none of its query heads is kept. Without it they are counted in full.
    """
    layers = tuple(
        _layer_cost(spec, layer, plan, (heads or {}).get(spec.index))
        for spec, layer in zip(specs, plan.layers, strict=True)
    )
    return Costs(layers=layers, head=2.0 * specs[0].hidden_size * vocab_size)


def model_costs(model: nn.Module) -> Costs:
    """Return the linear work of an attached model."""
    state = attachment(model)
    return costs(state.specs, state.plan, int(state.base.get("vocab_size") or 0), heads=kept_heads(state))


def _layer_cost(spec: BlockSpec, layer: LayerPlan, plan: Plan, heads: Tensor | None) -> LayerCost:
    is_last = spec.index == len(plan.layers) - 1
    dense, left = dense_sizes(spec), planned_sizes(spec, layer, stream=plan.stream, heads=heads, is_last=is_last)
    attention_groups = layer.attention.grouping.num_groups if isinstance(layer.attention, Routed) else 0
    ffn_groups = 0
    if spec.ffn is not None:
        ffn_groups = (
            layer.ffn.grouping.num_groups if isinstance(layer.ffn, Routed) else isinstance(layer.ffn, Following)
        )
    output = left.output_columns * left.after_attention
    skippable = 2.0 * (output if spec.attention.q_norm == "width" else left.query_output)
    if isinstance(layer.attention, Routed) and layer.attention.evicts:
        # Nobody reads the keys and values of a token that skips.
        skippable += 2.0 * left.key_value
    routed = (skippable if attention_groups else 0.0) + (2.0 * left.ffn if ffn_groups else 0.0)
    return LayerCost(
        attention_group=skippable / attention_groups if attention_groups else 0.0,
        ffn_group=2.0 * left.ffn / ffn_groups if ffn_groups else 0.0,
        attention_groups=attention_groups,
        ffn_groups=int(ffn_groups),
        fixed=2.0 * left.total - routed,
        removed=2.0 * (_without_kv(dense) - _without_kv(left)),
        removed_kv=2.0 * (dense.key_value - left.key_value),
    )


def _without_kv(sizes: LayerSizes) -> int:
    return sizes.total - sizes.key_value


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparsity:
    """Measured skip rates and what is pruned for every token, as shares of the dense model.

    In a plan that prunes anything for every token, a half that runs as it is counts as a rate of 0 in the means and
    with its work in the totals; in a plan of routers alone, such halves are left out of `attention`, `ffn`, `mean` and
    `linear_flops`, as in the objective.

    Args:
        attention: Mean over layers of skipped attention groups, pruned heads, or skipped halves.
        ffn: Mean over layers of skipped FFN groups, pruned channels, or skipped halves.
        mean: Unweighted mean of the two (the paper's nominal sparsity).
        linear_flops: Skipped share of the prunable matrix-product work (Q, O, gate, up, down).
        linear_flops_with_fixed: The same over all matrix products, K, V and output head included.
        linear_flops_layers: The same over all matrix products of the decoder layers, K and V included, the output head
            not. A skipped attention saves its K and V, pruned heads those of KV heads that no head reads any more.
            Zeros inside a matrix save nothing. A stream is counted with its shortcut matrices, of kept x kept
            dimensions (kept x all in the last layer), so that it may be negative.
        parameters_removed: Share of the decoder layers' parameters that a plan makes superfluous for every token,
            zeros of replaced matrices included; it may be negative for the same reason. Routers are not counted.
        kv_cache_kept: Share of keys and values that must still be kept.
        layers: (attention, FFN) rates per layer, in units of the plan (dimensions for a stream, zeros for replaced
            matrices); None where a half is neither routed nor pruned.
        tokens: Tokens counted; padding is not. 0 where no router had to be watched.
    """

    attention: float
    ffn: float
    mean: float
    linear_flops: float
    linear_flops_with_fixed: float
    linear_flops_layers: float
    parameters_removed: float
    kv_cache_kept: float
    layers: tuple[tuple[float | None, float | None], ...]
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self) | {"layers": [list(layer) for layer in self.layers]}


def static_sparsity(model: nn.Module) -> Sparsity:
    """Return what an attached plan without routers prunes; no text is needed.

    Raises:
        NotAttachedError: If the model carries no plan.
        ConfigError: If the plan has routers, whose rates depend on the text.
    """
    if attachment(model).plan.is_routed:
        raise ConfigError("what routers skip depends on the text; measure it with SkipCounter, or wide.evaluate")
    return SkipCounter(model).result()


class SkipCounter:
    """Counts executed groups over many forwards, on the device, without waiting for it.

    Args:
        model: An attached model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Start at zero."""
        state = attachment(model)
        self._costs = model_costs(model)
        self._removed = removed_layers(state)
        self._counts_dense = state.plan.is_static or state.replaced is not None
        self._key_value = [2.0 * dense_sizes(spec).key_value for spec in state.specs]
        self._evicts = [isinstance(p.attention, Routed) and p.attention.evicts for p in state.plan.layers]
        self._has_ffn = any(spec.ffn is not None for spec in state.specs)
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
        mask = next((m for layer in routing for m in (layer.attention, layer.ffn) if m is not None), None)
        if mask is None:
            # Without routers nothing depends on the tokens.
            return
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
        skip = [(_skip_rate(executed.attention), _skip_rate(executed.ffn)) for executed in self.execute_rates()]
        routed = sum(
            (a or 0.0) * cost.attention_group * cost.attention_groups + (f or 0.0) * cost.ffn_group * cost.ffn_groups
            for (a, f), cost in zip(skip, self._costs.layers, strict=True)
        )
        layers = [
            (_combined(a, removed.attention), _combined(f, removed.ffn))
            for (a, f), removed in zip(skip, self._removed, strict=True)
        ]
        means = [self._mean([a for a, _ in layers]), self._mean([f for _, f in layers]) if self._has_ffn else None]
        known = [mean for mean in means if mean is not None]
        parameters = sum(layer.all_parameters for layer in self._removed)
        return Sparsity(
            attention=means[0] or 0.0,
            ffn=means[1] or 0.0,
            mean=sum(known) / len(known) if known else 0.0,
            **self._work(routed),
            parameters_removed=sum(layer.parameters for layer in self._removed) / parameters,
            kv_cache_kept=self._kept_of_cache([a for a, _ in skip]),
            layers=tuple(layers),
            tokens=self._num_tokens(),
        )

    def _work(self, routed: float) -> dict[str, float]:
        """Return the shares of work that are saved; `routed` is what routers skip, FLOP per token."""
        layers = self._costs.layers
        removed, removed_kv = sum(layer.removed for layer in layers), sum(layer.removed_kv for layer in layers)
        total = sum(layer.total for layer in layers)
        prunable = sum(layer.prunable for layer in layers)
        if self._counts_dense:
            prunable = total - sum(self._key_value)
        saved = routed + removed + removed_kv
        return {
            "linear_flops": (routed + removed) / prunable if prunable else 0.0,
            "linear_flops_with_fixed": saved / (total + self._costs.head),
            "linear_flops_layers": saved / total,
        }

    def _kept_of_cache(self, attention: Sequence[float | None]) -> float:
        """Return the share of keys and values that is kept; `attention` is what its routers skip, by layer."""
        kept = sum(
            removed.kv_heads * (1 - (rate or 0.0) * evicts)
            for removed, rate, evicts in zip(self._removed, attention, self._evicts, strict=True)
        )
        return kept / sum(layer.all_kv_heads for layer in self._removed)

    def _mean(self, rates: Sequence[float | None]) -> float | None:
        """Return the mean rate of a kind of half; None if no half counts."""
        counted = [rate or 0.0 for rate in rates if rate is not None or self._counts_dense]
        return sum(counted) / len(counted) if counted else None


def _skip_rate(executed: Tensor | None) -> float | None:
    return None if executed is None else float(1 - executed.mean())


def _combined(routed: float | None, removed: float | None) -> float | None:
    """Return the rate of a half that routers skip and a plan prunes."""
    if routed is None or removed is None:
        return removed if routed is None else routed
    return 1 - (1 - routed) * (1 - removed)
