"""What a plan costs and saves: matrix products, parameters, keys and values; planned, and measured on text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from wide.errors import ConfigError
from wide.models.attach import attachment
from wide.models.block_spec import AttentionSpec, BlockSpec
from wide.models.pretrained import is_added
from wide.plan import GONE, Following, Half, Kept, LayerPlan, Plan, Routed, Skipped, Stream
from wide.routing import Routing

Measure = Literal["mean", "linear_flops", "attention", "ffn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """Matrix products of one decoder layer, FLOP per token (2 per weight), and what its plan takes out of it.

    Args:
        attention: Saved by skipping all attention groups, 0 where not routed: Q and O; only O where the queries are
            normed over their whole width, because Q must then be computed in full; K and V too where skipping tokens
            are evicted.
        ffn: Saved by skipping all FFN groups, 0 where not routed: gate, up and down.
        fixed: Executed for every token: K and V, and whatever is not routed, `other` included.
        other: Of matrices that no plan prunes: FFNs that cannot be routed (of experts, as many as a token runs), their
            routers, and whatever else lies in the layer.
        removed: Pruned for every token, of Q, O and FFN; a stream's shortcut matrices are taken off, so that it may be
            negative.
        attention_removed: Share of the attention that is pruned for every token, in units of its plan (heads,
            dimensions of the stream), in [0, 1]; None where nothing is. `ffn_removed` is the same of the FFN.
        parameters: Of the dense layer, as `kv_heads` are.
        parameters_removed: Parameters that go; negative where a stream's shortcut matrices outweigh what is cut. Norms
            go with their sublayer, those before one also into a stream's matrices.
        evicts: Whether nothing is kept of the keys and values of a token that skips the attention.
    """

    attention: float
    ffn: float
    fixed: float
    other: float
    removed: float
    removed_kv: float
    key_value: float
    attention_removed: float | None
    ffn_removed: float | None
    parameters: int
    parameters_removed: int
    kv_heads: int
    kv_heads_kept: int
    evicts: bool

    @property
    def prunable(self) -> float:
        """Work that routing can skip, FLOP per token."""
        return self.attention + self.ffn

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
    """Return the linear work of a model under a plan, and what the plan takes out of it.

    Args:
        vocab_size: Rows of the output head.
        heads: By layer, which query heads a `Kept` attention keeps, bool `[H_q]`; K and V of a KV head are saved where
            none of its query heads is kept. Without it they are counted in full.
    """
    layers = tuple(
        _layer_cost(spec, layer, plan, (heads or {}).get(spec.index))
        for spec, layer in zip(specs, plan.layers, strict=True)
    )
    return Costs(layers=layers, head=2.0 * specs[0].hidden_size * vocab_size)


def model_costs(model: nn.Module) -> Costs:
    """Return the linear work of an attached model, and what its plan takes out of it."""
    state = attachment(model)
    vocab_size, heads = int(state.base.get("vocab_size") or 0), {}
    for gate in state.static_gates():
        if gate.half_layer == "attention":
            kept = gate.factors().detach().cpu() != 0
            num_heads = state.specs[gate.layer_index].attention.num_query_heads
            heads[gate.layer_index] = kept.repeat_interleave(num_heads // kept.numel())
    return costs(state.specs, state.plan, vocab_size, heads=heads)


def half_weights(model: nn.Module, measure: Measure = "mean") -> list[float]:
    """Return what the skip rate of each router weighs in the sparsity of an attached model.

    The sparsity is the sum of weight times skip rate, in the order of `Attachment.routers()`. An FFN that follows the
    attention has the rate of the attention's router.

    Args:
        measure: 'mean': unweighted mean over the routed layers of each kind of sublayer, then over the two kinds
            (paper, section 3.2); 'linear_flops': the share of the prunable matrix-product work; 'attention', 'ffn': the
            mean over the sublayers of that kind alone.
    """
    routers = attachment(model).routers()
    if measure == "mean":
        kinds = [weights for weights in (half_weights(model, "attention"), half_weights(model, "ffn")) if any(weights)]
        return [sum(weights) / len(kinds) for weights in zip(*kinds, strict=True)]
    decided = [{router.half_layer} | ({"ffn"} if router.is_followed else set()) for router in routers]
    if measure != "linear_flops":
        counts = [measure in sublayers for sublayers in decided]
        return [count / max(sum(counts), 1) for count in counts]
    work = model_costs(model)
    total = sum(layer.prunable for layer in work.layers)
    return [
        sum(getattr(work.layers[router.layer_index], sublayer) for sublayer in sublayers) / total
        for router, sublayers in zip(routers, decided, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparsity:
    """Measured skip rates and what is pruned for every token, as shares of the dense model.

    In a plan that prunes anything for every token, a sublayer that runs as it is counts as a rate of 0 in the means and
    with its work in the totals; in a plan of routers alone, such sublayers are left out of `attention`, `ffn`, `mean`
    and `linear_flops`, as in the objective.

    Args:
        attention: Mean over layers of skipped attention groups, pruned heads, or skipped attentions.
        ffn: Mean over layers of skipped FFN groups, pruned channels, or skipped FFNs.
        mean: Unweighted mean of the two (the paper's nominal sparsity).
        linear_flops: Skipped share of the prunable matrix-product work (Q, O, gate, up, down).
        linear_flops_with_fixed: The same over all matrix products, K, V and output head included.
        linear_flops_layers: The same over those of the decoder layers, K and V included, the output head not. A skipped
            attention saves its K and V, pruned heads those of KV heads that no head reads any more. A stream is counted
            with its shortcut matrices, so that it may be negative; what routers multiply is not taken off.
        parameters_removed: Share of the decoder layers' parameters that a plan makes superfluous for every token; it
            may be negative for the same reason. Routers are not counted.
        kv_cache_kept: Share of keys and values that must still be kept.
        layers: (attention, FFN) rates per layer, in units of the plan (dimensions for a stream); None where a sublayer
            is neither routed nor pruned.
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

    Raises NotAttachedError if the model carries no plan, and ConfigError if that has routers, whose rates depend on
    text.
    """
    if attachment(model).plan.is_routed:
        raise ConfigError("what routers skip depends on the text; measure it with SkipCounter, or wide.evaluate")
    return SkipCounter(model).result()


class SkipCounter:
    """Counts executed groups over many forwards, on the device, without waiting for it."""

    def __init__(self, model: nn.Module) -> None:
        state = attachment(model)
        self._costs = model_costs(model)
        self._counts_dense = state.plan.is_static
        self._has_ffn = any(spec.ffn is not None for spec in state.specs)
        # Of all groups of sublayers whose masks lie together, by layer, half and number of groups of each.
        self._executed: dict[tuple[tuple[int, str, int], ...], Tensor] = {}
        self._tokens: Tensor | int = 0

    def add(self, routing: Routing, valid: Tensor | None = None) -> None:
        """Add one forward: masks of every layer, `[B, T, N_G]`; `valid`, bool `[B, T]`, is False for padding."""
        masks: dict[torch.device, dict[tuple[int, str, int], Tensor]] = {}
        for index, layer in enumerate(routing):
            for sublayer in ("attention", "ffn"):
                mask = getattr(layer, sublayer)
                if mask is not None:
                    key = (index, sublayer, mask.shape[-1])
                    masks.setdefault(mask.device, {})[key] = mask.detach().bool()
        for device, found in masks.items():
            # Of all sublayers together: a handful of kernels for each would take as long as the layers of small models.
            joined = torch.cat([*found.values()], dim=-1)
            counted = joined if valid is None else joined & valid.to(device).unsqueeze(-1)
            self._executed[(*found,)] = self._executed.get((*found,), 0) + counted.flatten(0, -2).sum(0)
        if masks:
            # Without routers nothing depends on the tokens, and none are counted.
            self._tokens = self._tokens + (joined[..., 0].numel() if valid is None else valid.sum())

    def result(self) -> Sparsity:
        """Return the rates so far (waits for the device)."""
        layers = self._costs.layers
        tokens = int(self._tokens)
        sums: dict[tuple[int, str], Any] = {}
        for keys, counts in self._executed.items():
            for (index, half, _), n in zip(keys, counts.cpu().split([size for *_, size in keys]), strict=True):
                sums[index, half] = sums.get((index, half), 0) + n
        by_sublayer = {key: float(1 - (n.double() / max(tokens, 1)).mean()) for key, n in sums.items()}
        skipped = [(by_sublayer.get((i, "attention")), by_sublayer.get((i, "ffn"))) for i in range(len(layers))]
        rates = [
            (_combined(a, layer.attention_removed), _combined(f, layer.ffn_removed))
            for (a, f), layer in zip(skipped, layers, strict=True)
        ]
        means = [self._mean([a for a, _ in rates]), self._mean([f for _, f in rates]) if self._has_ffn else None]
        known = [mean for mean in means if mean is not None]
        kept = sum(
            layer.kv_heads_kept * (1 - (a or 0.0) * layer.evicts) for (a, _), layer in zip(skipped, layers, strict=True)
        )
        return Sparsity(
            attention=means[0] or 0.0,
            ffn=means[1] or 0.0,
            mean=sum(known) / len(known) if known else 0.0,
            **self._work(skipped),
            parameters_removed=sum(layer.parameters_removed for layer in layers)
            / sum(layer.parameters for layer in layers),
            kv_cache_kept=kept / sum(layer.kv_heads for layer in layers),
            layers=tuple(rates),
            tokens=tokens,
        )

    def _work(self, skipped: Sequence[tuple[float | None, float | None]]) -> dict[str, float]:
        layers = self._costs.layers
        routed = sum(
            (a or 0.0) * layer.attention + (f or 0.0) * layer.ffn for (a, f), layer in zip(skipped, layers, strict=True)
        )
        saved = routed + sum(layer.removed for layer in layers)
        saved_with_kv = saved + sum(layer.removed_kv for layer in layers)
        total = sum(layer.total for layer in layers)
        prunable = sum(
            layer.total - layer.key_value - layer.other if self._counts_dense else layer.prunable for layer in layers
        )
        return {
            "linear_flops": saved / prunable if prunable else 0.0,
            "linear_flops_with_fixed": saved_with_kv / (total + self._costs.head),
            "linear_flops_layers": saved_with_kv / total,
        }

    def _mean(self, rates: Sequence[float | None]) -> float | None:
        counted = [rate or 0.0 for rate in rates if rate is not None or self._counts_dense]
        return sum(counted) / len(counted) if counted else None


def _combined(routed: float | None, removed: float | None) -> float | None:
    if routed is None or removed is None:
        return removed if routed is None else routed
    return 1 - (1 - routed) * (1 - removed)


class _Matrix(NamedTuple):
    rows: int
    columns: int
    has_bias: bool = False


def _layer_cost(spec: BlockSpec, layer: LayerPlan, plan: Plan, heads: Tensor | None) -> LayerCost:
    dense = _matrices(spec, LayerPlan())
    left = _matrices(spec, layer, stream=plan.stream, heads=heads, is_last=spec.index == len(plan.layers) - 1)
    evicts = isinstance(layer.attention, Routed) and layer.attention.evicts
    key_value = _weights(left, "key", "value")
    attention = ffn = 0
    if isinstance(layer.attention, Routed):
        attention = _weights(left, "output") if spec.attention.q_norm == "width" else _weights(left, "query", "output")
        # Nobody reads the keys and values of a token that skips an attention which evicts them.
        attention += key_value if evicts else 0
    if isinstance(layer.ffn, Routed | Following):
        ffn = _weights(left, "gate", "up", "down")
    removed_kv = _weights(dense, "key", "value") - key_value
    removed = _projection_parameters(dense) - _projection_parameters(left)
    is_gone = plan.stream is None and layer == GONE
    other = 2.0 * _other_weights(spec)
    return LayerCost(
        attention=2.0 * attention,
        ffn=2.0 * ffn,
        fixed=2.0 * (_weights(left) - attention - ffn) + other,
        other=other,
        removed=2.0 * (_weights(dense) - _weights(left) - removed_kv),
        removed_kv=2.0 * removed_kv,
        key_value=2.0 * _weights(dense, "key", "value"),
        attention_removed=_removed_share(layer.attention, plan.stream),
        ffn_removed=_removed_share(layer.ffn, plan.stream) if spec.ffn is not None else None,
        parameters=_count(spec.layer),
        parameters_removed=_count(spec.layer) if is_gone else removed + _others_removed(spec, layer, plan.stream),
        kv_heads=0 if spec.attention.borrows else spec.attention.num_kv_heads,
        kv_heads_kept=left["key"].rows // spec.attention.head_dim,
        evicts=evicts,
    )


def _matrices(
    spec: BlockSpec,
    layer: LayerPlan,
    *,
    stream: Stream | None = None,
    heads: Tensor | None = None,
    is_last: bool = False,
) -> dict[str, _Matrix]:
    """Return the matrices that every token finds in a layer, without what its plan prunes for every token.

    What routers skip is still there; a stream brings the matrices that take it from each subspace to the next.
    """
    attention, ffn = spec.attention, spec.ffn
    kept = _kept_channels(layer.attention, attention.query_width)
    # A norm over the whole query width needs every query.
    query = attention.query_width if kept and attention.q_norm == "width" else kept
    keys = 0 if attention.borrows else _kept_kv_heads(attention, layer.attention, heads) * attention.head_dim
    values = 0 if attention.key is not None and attention.value is None else keys
    narrow = spec.hidden_size if stream is None else stream.kept
    # The stream that the output head reads has its whole width again.
    after = spec.hidden_size if is_last else narrow
    found = {
        "query": _Matrix(query, narrow, _has_bias(attention.query)),
        "key": _Matrix(keys, narrow, _has_bias(attention.key or attention.query)),
        "value": _Matrix(values, narrow, _has_bias(attention.value or attention.query)),
        "output": _Matrix(narrow, kept, _has_bias(attention.output) and not isinstance(layer.attention, Skipped)),
    }
    if ffn is not None:
        channels = _kept_channels(layer.ffn, ffn.width)
        found["up"] = _Matrix(channels, narrow, _has_bias(ffn.up))
        found["down"] = _Matrix(after, channels, _has_bias(ffn.down) and not isinstance(layer.ffn, Skipped))
        if ffn.gate is not None or ffn.fused_gate:
            found["gate"] = found["up"]
    if stream is not None:
        found |= {"attention_shortcut": _Matrix(narrow, narrow), "ffn_shortcut": _Matrix(after, narrow)}
    return found


def _weights(matrices: Mapping[str, _Matrix], *names: str) -> int:
    """Return the weights of the matrices of these names, as far as there are any; of all without names."""
    chosen = [matrix for name, matrix in matrices.items() if not names or name in names]
    return sum(matrix.rows * matrix.columns for matrix in chosen)


def _other_weights(spec: BlockSpec) -> float:
    """Return by how many weights a token is multiplied in a layer besides those of its projections that were found."""
    known = {linear for _, part in spec.sublayers() for linear in part.linears()}
    # What chooses among experts says how many a token runs.
    active = [top for module in spec.layer.modules() if isinstance(top := getattr(module, "top_k", None), int)]

    def count(name: str, module: nn.Module) -> float:
        inputs, outputs = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if isinstance(inputs, int) and isinstance(outputs, int):
            # LoRA wraps a projection; quantised weights have other shapes.
            return 0 if not known.isdisjoint(module.modules()) else inputs * outputs
        own = [p for key, p in module.named_parameters(recurse=False) if p.dim() > 1 and "bias" not in key]
        weights = 0.0 if isinstance(module, nn.Embedding) else float(sum(p.numel() for p in own))
        weights += sum(count(key, child) for key, child in module.named_children() if not is_added(key))
        if name == "experts" and active:
            weights *= active[0] / (len(module) if isinstance(module, nn.ModuleList) else own[0].shape[0])
        return weights

    return count("", spec.layer)


def _projection_parameters(matrices: Mapping[str, _Matrix]) -> int:
    return _weights(matrices) + sum(matrix.rows * matrix.has_bias for matrix in matrices.values())


def _kept_channels(half: Half, width: int) -> int:
    if isinstance(half, Skipped):
        return 0
    return half.kept * half.grouping.group_size if isinstance(half, Kept) else width


def _kept_kv_heads(spec: AttentionSpec, half: Half, heads: Tensor | None) -> int:
    """Return how many KV heads are still needed.

    A KV head goes when all its query heads are pruned, unless queries and keys are normed over their whole width,
    where every head takes part in the norm; without any query head, all go.
    """
    if isinstance(half, Skipped) or (isinstance(half, Kept) and half.kept == 0):
        return 0
    if heads is None or spec.q_norm == "width":
        return spec.num_kv_heads
    return int(heads.view(spec.num_kv_heads, -1).any(-1).sum())


def _removed_share(half: Half, stream: Stream | None) -> float | None:
    share: float | None = None
    if isinstance(half, Skipped):
        share = 1.0
    elif isinstance(half, Kept):
        share = 1 - half.kept / half.grouping.num_groups
    return share if stream is None else 1 - (1 - (share or 0.0)) * stream.kept / stream.width


def _others_removed(spec: BlockSpec, layer: LayerPlan, stream: Stream | None) -> int:
    """Return the parameters beside the projections that go: norms, and whatever else is left out."""
    sublayers = [(getattr(layer, name), part) for name, part in spec.sublayers()]
    gone = [(half, part) for half, part in sublayers if not _kept_channels(half, 1)]
    # Whatever lies beside the projections, such as norms of queries and keys.
    removed = sum(_count(part.module) - sum(_count(linear) for linear in part.linears()) for _, part in gone)
    # A norm that both sublayers share stays with either; a stream's norms have no weights of their own.
    stay = {part.pre_norm for half, part in sublayers if stream is None and _kept_channels(half, 1)}
    removed += sum(_count(norm) for norm in {part.pre_norm for _, part in sublayers} - stay)
    # Norms after sublayers go with those that give nothing any more, not even a bias.
    silent = [part for half, part in gone if isinstance(half, Skipped) or not _has_bias(part.linears()[-1])]
    return removed + sum(_count(part.post_norm) for part in silent)


def _has_bias(linear: nn.Module) -> bool:
    return getattr(linear, "bias", None) is not None


def _count(module: nn.Module | None) -> int:
    named = () if module is None else module.named_parameters()
    return sum(parameter.numel() for name, parameter in named if not is_added(name))
