"""What the engine reads of a Hugging Face model: the same tensors, arranged for the operators, never copied twice."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wide.errors import UnsupportedModelError
from wide.inference.operators.products import GatedWeights
from wide.inference.reading.attention_call import Asked, ask, paired
from wide.inference.reading.stacking import stack_linears
from wide.kernels.rms_norm import rms_norm
from wide.kernels.route import RouteWeights, split_weights
from wide.models.block_spec import AttentionSpec, BlockSpec, FeedForwardSpec
from wide.models.gates import ROUTER_NAME
from wide.models.router import Router

ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}
# After the attention and after the FFN, where the second is not the norm before the FFN.
_POST_NORMS = (
    ("post_self_attn_layernorm", "post_attention_layernorm"),
    ("post_mlp_layernorm", "post_feedforward_layernorm"),
)
_MULTIPLIER = "residual_multiplier"
# At least any threshold: the offset of a row of the router that always executes.
_ALWAYS = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """An RMSNorm: weight [D], its epsilon, and whether the factor is 1 + weight; `centered` makes it a LayerNorm."""

    weight: Tensor
    eps: float
    unit_offset: bool = False
    centered: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeRouter:
    """A router ready for the operators.

    Args:
        source: The model's, whose threshold holds.
        weights: With `extra` always-executing groups at the end; the offsets are less the threshold, so that kernels
            decide at 0, and graphs of them follow it without a new capture.
        bias: Offsets of the model's groups, float32 [N_G].
        extra: Groups of key and value rows behind the query's, so that one product makes all three.
    """

    source: Router
    weights: RouteWeights
    bias: Tensor
    extra: int

    @property
    def decides(self) -> bool:
        """Whether its threshold lets it skip anything."""
        return self.source.threshold != -math.inf

    def follow(self) -> None:
        """Let kernels, those in graphs too, read the threshold that the model's router has now."""
        offset = self.weights.offset
        assert offset is not None
        offset[: len(self.bias)] = self.bias - self.source.threshold


@dataclass(frozen=True, kw_only=True, slots=True)
class Sublayer:
    """What lies around a sublayer.

    Args:
        norm: Before it; None where it reads the residual stream itself.
        post_norm: Of its output, before that is added to the stream, or None.
        multiplier: Of its output, or None.
        router: None where the sublayer is not routed.
    """

    norm: Norm | None
    post_norm: Norm | None
    multiplier: float | None
    router: RuntimeRouter | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights(Sublayer):
    """The attention of a layer.

    Args:
        qkv: Query, key and value rows, [(H_q + 2 H_k) d, D].
        qkv_bias: Their biases or None.
        output: [D, H_q d].
        output_bias: [D] or None.
        q_norm: Of each query head, or of all of them as one row, or None.
        k_norm: The same for keys.
        num_query_heads: H_q.
        num_kv_heads: H_k.
        head_dim: d.
        asked: Scale, window and soft cap of the scores, and how queries and keys are turned.
        cos: Cosines by position, [max_length, r]; r = 0 where queries and keys are not turned.
        sin: Sines, as `cos`.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    q_norm: Norm | None
    k_norm: Norm | None
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    asked: Asked
    cos: Tensor
    sin: Tensor

    @property
    def norms_width(self) -> bool:
        """Whether queries are normed over all heads, so that none of their rows can be skipped."""
        return self.q_norm is not None and self.q_norm.weight.numel() != self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardWeights(Sublayer):
    """The FFN of a layer.

    Args:
        gated: Of the first half, up right behind gate in memory.
        down: [D, F].
        down_bias: [D] or None.
    """

    gated: GatedWeights
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer; both sublayers of a `parallel` one read the same norm."""

    attention: AttentionWeights
    ffn: FeedForwardWeights
    parallel: bool


def read_layer(spec: BlockSpec, angles: tuple[Tensor, Tensor]) -> LayerWeights:
    """Return a layer's weights; separate projections are moved into one buffer that their modules then view.

    Args:
        spec: Its parts.
        angles: Cosines and sines by position, [max_length, r].

    Raises:
        UnsupportedModelError: If the layer has a part that the engine does not know; the message names it.
    """
    where = f"layer {spec.index}"
    if spec.ffn is None:
        raise UnsupportedModelError(f"the engine needs a plain FFN in every layer: {spec.ffn_reason}")
    attention, ffn, layer = spec.attention, spec.ffn, spec.layer
    parts: tuple[AttentionSpec | FeedForwardSpec, ...] = attention, ffn
    pre_norms = [part.pre_norm for part in parts if part.pre_norm is not None]
    found = [[getattr(layer, name, None) for name in names] for names in _POST_NORMS]
    post_norms = [next((norm for norm in norms if norm not in (None, ffn.pre_norm)), None) for norms in found]
    require_known(layer, (attention.module, ffn.module, *pre_norms, *post_norms), where, _MULTIPLIER)
    around = [
        {
            "norm": _optional_norm(part.pre_norm, f"{where}: norm before the {name}"),
            "post_norm": _optional_norm(norm, f"{where}: norm after the {name}"),
            "multiplier": getattr(layer, _MULTIPLIER, None),
        }
        for name, part, norm in zip(("attention", "FFN"), parts, post_norms, strict=True)
    ]
    return LayerWeights(
        attention=_attention(f"{where}: attention", attention, angles, around[0]),
        ffn=_feed_forward(f"{where}: FFN", ffn, around[1]),
        parallel=len(set(pre_norms)) < len(pre_norms),
    )


def require_known(module: nn.Module, parts: Iterable[object], where: str, *numbers: str) -> None:
    """Refuse weights and multipliers of a module that nobody reads.

    Raises:
        UnsupportedModelError: The message names what is not known.
    """
    known = set(parts)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        if child not in known and name != ROUTER_NAME and next(child.parameters(), None) is not None:
            names.append(name)
    for name, value in vars(module).items():
        if isinstance(value, float) and value != 1 and name not in numbers and not name.endswith("dropout"):
            names.append(name)
    if names:
        raise UnsupportedModelError(f"{where} has {names[0]}, which the engine does not compute")


def read_norm(module: nn.Module | None, where: str) -> Norm:
    """Return a norm's weight and constants, found out by trying it.

    Raises:
        UnsupportedModelError: If there is no such norm or it is neither an RMSNorm nor a LayerNorm without bias.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if module is None or not isinstance(weight, Tensor) or eps is None:
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


def _optional_norm(module: nn.Module | None, where: str) -> Norm | None:
    return None if module is None else read_norm(module, where)


def _attention(
    where: str, part: AttentionSpec, angles: tuple[Tensor, Tensor], around: dict[str, Any]
) -> AttentionWeights:
    head_norms = [getattr(part.module, name, None) for name in ("q_norm", "k_norm")]
    require_known(part.module, (*part.linears(), *head_norms), where, "scaling", "attn_logit_softcapping")
    query, output = _plain(part.query, where), _plain(part.output, where)
    if part.key is not None and part.value is not None:
        qkv, qkv_bias = stack_linears([query, _plain(part.key, where), _plain(part.value, where)], where)
    else:
        qkv, qkv_bias = query.weight.detach(), _detached(query.bias)
    q_norm, k_norm = (_optional_norm(norm, f"{where}, norm of heads") for norm in head_norms)
    kinds = [None if norm is None else (norm.eps, norm.unit_offset, norm.centered) for norm in (q_norm, k_norm)]
    if any(norm is not None and norm.centered for norm in (q_norm, k_norm)):
        raise UnsupportedModelError(f"{where}: queries and keys have a LayerNorm; the engine takes RMSNorms there")
    if kinds[0] != kinds[1]:
        raise UnsupportedModelError(f"{where}: the norms of queries and keys are not of one kind: {kinds}")
    asked = ask(part, *angles, where)
    cos, sin = (paired(each) if asked.interleaved else each for each in angles)
    if not asked.is_turned:
        cos, sin = cos[:, :0], sin[:, :0]
    return AttentionWeights(
        **around,
        qkv=qkv,
        qkv_bias=qkv_bias,
        output=output.weight.detach(),
        output_bias=_detached(output.bias),
        q_norm=q_norm,
        k_norm=k_norm,
        num_query_heads=part.num_query_heads,
        num_kv_heads=part.num_kv_heads,
        head_dim=part.head_dim,
        asked=asked,
        cos=cos,
        sin=sin,
        router=_router(part.module, qkv.dtype, part.query_width, 2 * part.num_kv_heads * part.head_dim),
    )


def _feed_forward(where: str, part: FeedForwardSpec, around: dict[str, Any]) -> FeedForwardWeights:
    require_known(part.module, (*part.linears(), part.activation), where)
    activation = ACTIVATIONS.get(type(part.activation).__name__)
    if activation is None:
        raise UnsupportedModelError(f"{where}: no operator for the activation {type(part.activation).__name__}")
    up, down = _plain(part.up, where), _plain(part.down, where)
    both: Tensor
    if part.gate is not None:
        both, bias = stack_linears([_plain(part.gate, where), up], where)
    else:
        both, bias = up.weight.detach(), _detached(up.bias)
    return FeedForwardWeights(
        **around,
        gated=GatedWeights.of_rows(both, bias, part.width, activation),
        down=down.weight.detach(),
        down_bias=_detached(down.bias),
        router=_router(part.module, both.dtype, part.width, 0),
    )


def _plain(linear: nn.Module, where: str) -> nn.Linear:
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
        raise UnsupportedModelError(
            f"{where}: {type(linear).__name__} is not a plain linear layer; merge LoRA, or load the model unquantised"
        )
    return linear


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _router(module: nn.Module, dtype: torch.dtype, width: int, further: int) -> RuntimeRouter | None:
    router = getattr(module, ROUTER_NAME, None)
    if not isinstance(router, Router):
        return None
    group_size = width // router.num_groups
    extra = further // group_size if further % group_size == 0 else 0
    # Other forms than the bottleneck have been refused with the model.
    assert router.down is not None
    weights = split_weights(router.down, router.up, router.bias, dtype=dtype)
    difference = weights.difference
    bias = difference.new_zeros(router.num_groups) if weights.offset is None else weights.offset
    weights = weights._replace(
        difference=torch.cat((difference, difference.new_zeros(extra, difference.shape[1]))),
        offset=torch.cat((bias, bias.new_full((extra,), _ALWAYS))),
    )
    found = RuntimeRouter(source=router, weights=weights, bias=bias, extra=extra)
    found.follow()
    return found
