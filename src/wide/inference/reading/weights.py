"""A decoder layer of a Hugging Face model as the engine computes it: the same tensors, never copied twice."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wide.errors import UnsupportedModelError
from wide.inference.operators.products import GatedWeights, LinearWeights
from wide.inference.reading.attention_form import AttentionForm, paired, read_form
from wide.inference.reading.pruned import Subspace, read_projections
from wide.inference.reading.quantising import Weights
from wide.kernels.rms_norm.op import rms_norm
from wide.kernels.route.weights import RouteWeights, split_weights
from wide.models.block_spec import BlockSpec, FeedForwardSpec, SublayerSpec, plain_linear
from wide.models.gates import GATE_NAME, ROUTER_NAME
from wide.models.router import Router
from wide.models.stream import STREAM_NAME
from wide.plan import LayerPlan, Skipped

ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh", "ReLUSquaredActivation": "relu2"}
_MULTIPLIER = "residual_multiplier"
# Modules that a plan put there.
_OURS = (ROUTER_NAME, GATE_NAME, STREAM_NAME)
# At least any threshold: the offset of a row of the router that always executes.
_ALWAYS = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """An RMSNorm: weight [D], its epsilon, and whether the factor is 1 + weight; `centered` makes it a LayerNorm."""

    weight: Tensor
    eps: float
    unit_offset: bool = False
    centered: bool = False


@dataclass(kw_only=True, slots=True)
class EngineRouter:
    """A router ready for the operators.

    Args:
        weights: With `extra` always-executing groups at the end; the offsets are less the threshold, so that kernels
            decide at 0, and graphs of them follow it without a new capture.
        bias: Offsets of the model's groups, float32 [N_G].
        extra: Groups of key and value rows behind the query's, so that one product makes all three.
        reads_residual: Whether it reads the residual stream, not the norm of it.
        threshold: Margin from which on a group executes.
    """

    weights: RouteWeights
    bias: Tensor
    extra: int
    reads_residual: bool
    threshold: float = 0.0

    @property
    def num_groups(self) -> int:
        """N_G of the model's router."""
        return len(self.bias)

    @property
    def decides(self) -> bool:
        """Whether its threshold lets it skip anything."""
        return self.threshold != -math.inf

    def follow(self, threshold: float) -> None:
        """Let kernels, those in graphs too, read a threshold."""
        offset = self.weights.offset
        assert offset is not None
        self.threshold = threshold
        offset[: self.num_groups] = self.bias - threshold


@dataclass(frozen=True, kw_only=True, slots=True)
class Sublayer:
    """What lies around a sublayer.

    Args:
        norm: Before it; None where it reads the residual stream itself.
        post_norm: Of its output, before that is added to the stream, or None.
        multiplier: Of its output, or None.
        router: None where the sublayer is not routed.
        shortcut: What takes the stream from the basis that this reads to the one that it leaves, [D', D'] (of the last
            sublayer [D, D']); None where the stream is not projected.
    """

    norm: Norm | None
    post_norm: Norm | None
    multiplier: float | None
    router: EngineRouter | None
    shortcut: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights(Sublayer):
    """The attention of a layer.

    Args:
        qkv: Query, key and value projections, N = (H_q + 2 H_k) d.
        query: The queries' part of it, as a view.
        kv: The rest of it, as a view.
        q_norm: Of each query head, or of all of them as one row, or None. `k_norm` is the same for keys.
        norms_width: Whether queries are normed over all heads, so that none of their channels can be skipped.
        head_dim: d.
        form: Scale, window and soft cap of the scores, and how queries and keys are rotated.
        cos: Cosines by position, [max_length, r]; r = 0 where queries and keys are not rotated. `sin` are the sines.
    """

    qkv: LinearWeights
    query: LinearWeights
    kv: LinearWeights
    output: LinearWeights
    q_norm: Norm | None
    k_norm: Norm | None
    norms_width: bool
    head_dim: int
    form: AttentionForm
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardWeights(Sublayer):
    """The FFN of a layer: its first half, and the down projection."""

    gated: GatedWeights
    down: LinearWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer without what is left out for every token; both sublayers of a `parallel` one share a norm."""

    index: int
    attention: AttentionWeights | None
    ffn: FeedForwardWeights | None
    parallel: bool

    @property
    def parts(self) -> list[AttentionWeights | FeedForwardWeights]:
        """The sublayers that there are."""
        return [part for part in (self.attention, self.ffn) if part is not None]


def read_layer(
    spec: BlockSpec,
    angles: tuple[Tensor, Tensor],
    weights: Weights,
    plan: LayerPlan,
    spaces: tuple[Subspace | None, Subspace | None],
) -> LayerWeights:
    """Return a layer's weights; `weights` takes its projections, and `angles` are by position, [max_length, r].

    Spaces are the stream around its attention and its FFN, where it is projected. Raises UnsupportedModelError if the
    layer has a part that the engine does not know; the message names it.
    """
    where = f"layer {spec.index}"
    attention, ffn = spec.attention, require_plain(spec)
    parts: tuple[SublayerSpec, ...] = (attention, ffn)
    norms = [norm for part in parts for norm in (part.pre_norm, part.post_norm) if norm is not None]
    require_known(spec.layer, (attention.module, ffn.module, *norms), where, _MULTIPLIER)
    names, multiplier = (f"{where}: attention", f"{where}: FFN"), getattr(spec.layer, _MULTIPLIER, None)
    like = plain_linear(attention.output, spec.index).weight
    around = [
        {
            "norm": _cut_norm(read_norm(part.pre_norm, f"{name}, norm before it"), space),
            "post_norm": read_norm(part.post_norm, f"{name}, norm after it"),
            "multiplier": multiplier,
            "shortcut": None if space is None else space.shortcut.to(like),
        }
        for name, part, space in zip(names, parts, spaces, strict=True)
    ]
    has_attention, has_ffn = (not isinstance(half, Skipped) for half in (plan.attention, plan.ffn))
    return LayerWeights(
        index=spec.index,
        attention=_attention(names[0], spec, around[0], angles, weights, spaces[0]) if has_attention else None,
        ffn=_feed_forward(names[1], spec, ffn, around[1], weights, spaces[1]) if has_ffn else None,
        parallel=spec.shares_norm,
    )


def _cut_norm(norm: Norm | None, space: Subspace | None) -> Norm | None:
    """Return the norm of a projected stream, whose weight the projections have; its mean is over fewer values."""
    if norm is None or space is None:
        return norm
    width, kept = space.before.shape
    return Norm(weight=norm.weight.new_ones(kept), eps=norm.eps * width / kept)


def require_plain(spec: BlockSpec) -> FeedForwardSpec:
    """Return the FFN of a layer whose projections the engine can read.

    Raises UnsupportedModelError if the layer has no plain FFN, or projections that are not plain linear layers, were
    exchanged since the model was attached, or are of several dtypes or devices.
    """
    where = f"layer {spec.index}"
    if spec.ffn is None:
        raise UnsupportedModelError(f"the engine needs a plain FFN in every layer: {spec.ffn_reason}")
    linears = [*spec.attention.linears(), *spec.ffn.linears()]
    present = set(spec.layer.modules())
    if not present.issuperset(linears):
        names = {f"{type(part).__module__}.{type(part).__qualname__}" for part in present}
        raise UnsupportedModelError(
            f"{where}: a projection was replaced after wide.attach, and the layer now holds "
            f"{sorted(name for name in names if 'Linear' in name)}; load the model unquantised, then attach"
        )
    for fact in ("dtype", "device"):
        found = {str(getattr(plain_linear(linear, spec.index).weight, fact)) for linear in linears}
        if len(found) > 1:
            raise UnsupportedModelError(
                f"{where}: the projections must have one {fact}, got {sorted(found)}; move or convert them to one"
            )
    return spec.ffn


def require_known(module: nn.Module, parts: Iterable[object], where: str, *numbers: str) -> None:
    """Raise UnsupportedModelError if a module has weights or multipliers that nobody reads; the message names one."""
    known = set(parts)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        if child not in known and name not in _OURS and next(child.parameters(), None) is not None:
            names.append(name)
    for name, value in vars(module).items():
        if isinstance(value, float) and value != 1 and name not in numbers and not name.endswith("dropout"):
            names.append(name)
    if names:
        raise UnsupportedModelError(f"{where} has {names[0]}, which the engine does not compute")


def read_norm(module: nn.Module | None, where: str) -> Norm | None:
    """Return a norm's weight and constants, found out by trying it; None if there is none.

    Raises UnsupportedModelError if it is neither an RMSNorm nor a LayerNorm without bias.
    """
    if module is None:
        return None
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or eps is None:
        raise UnsupportedModelError(f"{where}: the engine needs an RMSNorm here, found {type(module).__name__}")
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(3, weight.numel(), generator=generator).to(device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        wanted = module(probe).float()
        for kind in ({}, {"unit_offset": True}, {"centered": True}):
            norm = Norm(weight=weight.detach(), eps=float(eps), **kind)
            if (apply_norm(norm, probe, None, "torch")[1].float() - wanted).norm() <= 1e-2 * wanted.norm() + 1e-6:
                return norm
    raise UnsupportedModelError(f"{where}: {type(module).__name__} computes neither an RMSNorm nor a LayerNorm")


def apply_norm(norm: Norm | None, x: Tensor, addend: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    """Return x + addend [M, D] and its norm; the sum twice without a norm."""
    if norm is not None and not norm.centered:
        return rms_norm(x, norm.weight, addend=addend, eps=norm.eps, unit_offset=norm.unit_offset, backend=backend)
    total = x if addend is None else x + addend
    if norm is None:
        return total, total
    weight = norm.weight.float()
    return total, functional.layer_norm(total.float(), weight.shape, weight, eps=norm.eps).to(x.dtype)


def _attention(
    where: str,
    spec: BlockSpec,
    around: dict[str, Any],
    angles: tuple[Tensor, Tensor],
    weights: Weights,
    space: Subspace | None,
) -> AttentionWeights:
    part = spec.attention
    head_norms = [getattr(part.module, name, None) for name in ("q_norm", "k_norm")]
    require_known(part.module, (*part.linears(), *head_norms), where, "scaling", "attn_logit_softcapping")
    q_norm, k_norm = (read_norm(norm, f"{where}, norm of heads") for norm in head_norms)
    kinds = [None if norm is None else (norm.eps, norm.unit_offset, norm.centered) for norm in (q_norm, k_norm)]
    if any(norm is not None and norm.centered for norm in (q_norm, k_norm)):
        raise UnsupportedModelError(f"{where}: queries and keys have a LayerNorm; the engine takes RMSNorms there")
    if kinds[0] != kinds[1]:
        raise UnsupportedModelError(f"{where}: the norms of queries and keys are not of one kind: {kinds}")
    form = read_form(part, *angles, where)
    cos, sin = (paired(each) if form.interleaved else each for each in angles)
    if not form.rotates:
        cos, sin = cos[:, :0], sin[:, :0]
    # Last, since what tries the module needs its own weights.
    # Rounding what these read costs as much perplexity as all the rest, for a seventh of the time.
    reading, output, width = read_projections(spec, part, space)
    qkv = weights.take(reading, where, rounds=False)
    return AttentionWeights(
        **around,
        qkv=qkv,
        query=qkv.rows(None, width),
        kv=qkv.rows(width, None),
        output=weights.take([output], where),
        q_norm=q_norm,
        k_norm=k_norm,
        norms_width=part.q_norm == "width",
        head_dim=part.head_dim,
        form=form,
        cos=cos,
        sin=sin,
        router=_router(part.module, output.weight.dtype, part.query_width, 2 * part.num_kv_heads * part.head_dim),
    )


def _feed_forward(
    where: str, spec: BlockSpec, part: FeedForwardSpec, around: dict[str, Any], weights: Weights, space: Subspace | None
) -> FeedForwardWeights:
    require_known(part.module, (*part.linears(), part.activation), where)
    activation = ACTIVATIONS.get(type(part.activation).__name__)
    if activation is None:
        raise UnsupportedModelError(
            f"{where}: no operator for the activation {type(part.activation).__name__}; there are {sorted(ACTIVATIONS)}"
        )
    reading, down, width = read_projections(spec, part, space)
    router = _router(part.module, down.weight.dtype, width, 0)
    size = width if router is None else width // router.num_groups
    both = weights.take(reading, where, rotates=reading[0].in_features)
    return FeedForwardWeights(
        **around,
        gated=GatedWeights.of_rows(both, width, activation),
        down=weights.take([down], where, rotates=size),
        router=router,
    )


def _router(module: nn.Module, dtype: torch.dtype, width: int, further: int) -> EngineRouter | None:
    router = getattr(module, ROUTER_NAME, None)
    if not isinstance(router, Router):
        return None
    group_size = width // router.num_groups
    extra = further // group_size if further % group_size == 0 else 0
    # Other forms than the bottleneck have been refused with the model.
    weights = split_weights(router.down, router.up, router.bias, dtype=dtype)
    difference = weights.difference
    bias = difference.new_zeros(router.num_groups) if weights.offset is None else weights.offset
    weights = weights._replace(
        difference=torch.cat((difference, difference.new_zeros(extra, difference.shape[1]))),
        offset=torch.cat((bias, bias.new_full((extra,), _ALWAYS))),
    )
    found = EngineRouter(weights=weights, bias=bias, extra=extra, reads_residual=router.reads_residual)
    found.follow(router.threshold)
    return found
