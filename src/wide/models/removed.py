"""What a plan takes out of a model for every token alike: rates, parameters, keys and values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from wide.models.attach import Attachment
from wide.models.block_spec import AttentionSpec, BlockSpec, FeedForwardSpec
from wide.models.sizes import dense_sizes, kept_kv_heads, num_parameters, planned_sizes
from wide.plan import Dense, Half, Kept, LayerPlan, Plan, Skipped

_Part = AttentionSpec | FeedForwardSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovedLayer:
    """What is taken out of one decoder layer.

    Args:
        attention: Share of the attention half, in units of its plan (heads, dimensions of the stream, or zeros of
            replaced matrices), in [0, 1]; None where nothing is.
        ffn: The same of the FFN half.
        parameters: Parameters that go; negative where a stream's shortcut matrices outweigh what is cut. Zeros of
            replaced matrices count. Norms go with their half, those before a half also into the matrices of a stream.
        all_parameters: Parameters of the dense layer.
        kv_heads: KV heads whose keys and values are still kept.
        all_kv_heads: KV heads of the dense layer.
    """

    attention: float | None
    ffn: float | None
    parameters: int
    all_parameters: int
    kv_heads: int
    all_kv_heads: int


def removed_layers(state: Attachment) -> list[RemovedLayer]:
    """Return what an attached plan takes out of every layer."""
    heads = kept_heads(state)
    zeros = {} if state.replaced is None else state.replaced.zero_counts()
    found = []
    for spec, layer in zip(state.specs, state.plan.layers, strict=True):
        kept = heads.get(spec.index)
        found.append(
            RemovedLayer(
                attention=_share(layer.attention, spec.attention, state.plan, zeros),
                ffn=_share(layer.ffn, spec.ffn, state.plan, zeros),
                parameters=_parameters(spec, layer, kept, state.plan) + _zeros_of_dense_halves(spec, layer, zeros),
                all_parameters=_count(spec.layer),
                kv_heads=kept_kv_heads(spec.attention, layer.attention, kept),
                all_kv_heads=spec.attention.num_kv_heads,
            )
        )
    return found


def kept_heads(state: Attachment) -> dict[int, Tensor]:
    """Return by layer which query heads a `Kept` attention keeps, bool `[H_q]` on the CPU."""
    found = {}
    for gate in state.static_gates():
        if gate.half_layer == "attention":
            kept = gate.factors().detach().cpu() != 0
            num_heads = state.specs[gate.layer_index].attention.num_query_heads
            found[gate.layer_index] = kept.repeat_interleave(num_heads // kept.numel())
    return found


def _share(half: Half, part: _Part | None, plan: Plan, zeros: Mapping[nn.Parameter, int]) -> float | None:
    share: float | None = None
    if isinstance(half, Skipped):
        share = 1.0
    elif isinstance(half, Kept):
        share = 1 - half.kept / half.grouping.num_groups
    elif isinstance(half, Dense) and part is not None:
        count = sum(zeros.get(parameter, 0) for parameter in _own(part.module))
        share = count / sum(p.numel() for p in _own(part.module) if p.dim() == 2) if count else None
    if plan.stream is None:
        return share
    return 1 - (1 - (share or 0.0)) * plan.stream.kept / plan.stream.width


def _parameters(spec: BlockSpec, layer: LayerPlan, heads: Tensor | None, plan: Plan) -> int:
    whole = isinstance(layer.attention, Skipped) and isinstance(layer.ffn, Skipped)
    if whole and plan.stream is None:
        return _count(spec.layer)
    is_last = spec.index == len(plan.layers) - 1
    left = planned_sizes(spec, layer, stream=plan.stream, heads=heads, is_last=is_last)
    dense = LayerPlan(attention=Dense(), ffn=Dense())
    removed = num_parameters(spec, dense_sizes(spec), dense) - num_parameters(spec, left, layer)
    gone = [_is_gone(layer.attention), _is_gone(layer.ffn)]
    # A stream's norms have no weights of their own any more.
    norms = _norms_gone(spec, gone if plan.stream is None else [True, True])
    return removed + sum(_count(norm) for norm in norms) + _further_parts(spec, gone) + _norms_after(spec, layer, gone)


def _is_gone(half: Half) -> bool:
    return isinstance(half, Skipped) or (isinstance(half, Kept) and half.kept == 0)


def _norms_gone(spec: BlockSpec, gone: list[bool]) -> set[nn.Module | None]:
    """Return the norms in front of halves that are gone; a norm that both halves share stays with either."""
    norms = [spec.attention.pre_norm, None if spec.ffn is None else spec.ffn.pre_norm]
    stays = {norm for norm, is_gone in zip(norms, gone, strict=True) if not is_gone}
    return set(norms) - stays


def _norms_after(spec: BlockSpec, layer: LayerPlan, gone: list[bool]) -> int:
    """Return the parameters of norms after halves that give nothing any more, not even a bias."""
    outputs = (spec.attention.output, None if spec.ffn is None else spec.ffn.down)
    silent = [
        is_gone and (isinstance(half, Skipped) or getattr(output, "bias", None) is None)
        for is_gone, (_, half), output in zip(gone, layer.halves(), outputs, strict=True)
    ]
    parts = [part for part in (spec.attention, spec.ffn) if part is not None]
    known = {part.module for part in parts} | {part.pre_norm for part in parts}
    norms = [count for child in spec.layer.children() if child not in known and (count := _count(child))]
    # Two norms of one size: it does not matter which is whose.
    return norms[0] * sum(silent) if len(norms) == 2 and norms[0] == norms[1] else 0


def _further_parts(spec: BlockSpec, gone: list[bool]) -> int:
    """Return the parameters of halves that are gone beside their projections, such as norms of queries and keys."""
    attention, ffn = spec.attention, spec.ffn
    linears: tuple[tuple[nn.Module | None, ...], ...] = (
        (attention.query, attention.key, attention.value, attention.output),
        () if ffn is None else (ffn.up, ffn.gate, ffn.down),
    )
    modules = (attention.module, None if ffn is None else ffn.module)
    return sum(
        _count(module) - sum(_count(linear) for linear in parts)
        for module, parts, is_gone in zip(modules, linears, gone, strict=True)
        if is_gone
    )


def _zeros_of_dense_halves(spec: BlockSpec, layer: LayerPlan, zeros: Mapping[nn.Parameter, int]) -> int:
    parts = (spec.attention, spec.ffn)
    return sum(
        zeros.get(parameter, 0)
        for (_, half), part in zip(layer.halves(), parts, strict=True)
        if part is not None and isinstance(half, Dense)
        for parameter in _own(part.module)
    )


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield a module's own parameters, without what wide and LoRA have added."""
    for name, parameter in module.named_parameters():
        if "lora_" not in name and "wide_" not in name:
            yield parameter


def _count(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in _own(module))
