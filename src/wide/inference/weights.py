"""What the runtime reads of a Hugging Face model: the same tensors, arranged for the operators, never copied twice."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wide.errors import UnsupportedModelError
from wide.inference.stacking import stack_linears
from wide.kernels.rms_norm import rms_norm
from wide.kernels.route import RouteWeights, split_weights
from wide.models.block_spec import AttentionSpec, BlockSpec, FeedForwardSpec
from wide.models.gates import ROUTER_NAME
from wide.models.router import Router

_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}
# At least any threshold: the offset of a row of the router that always executes.
_ALWAYS = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """An RMSNorm: weight [D], its epsilon, and whether the factor is 1 + weight."""

    weight: Tensor
    eps: float
    unit_offset: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeRouter:
    """A router ready for the operators.

    Args:
        weights: With `extra` always-executing groups at the end.
        threshold: In logits.
        reads_residual: Whether it reads the stream before the norm.
        num_groups: N_G, without the extra ones.
        extra: Groups of key and value rows behind the query's, so that one product makes all three.
    """

    weights: RouteWeights
    threshold: float
    reads_residual: bool
    num_groups: int
    extra: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """The attention half of a layer.

    Args:
        norm: Before it.
        qkv: Query, key and value rows, [(H_q + 2 H_k) d, D].
        qkv_bias: Their biases or None.
        output: [D, H_q d].
        output_bias: [D] or None.
        q_norm: Weight of the per-head query norm, [d], or None.
        k_norm: The same for keys.
        head_eps: Of both.
        num_query_heads: H_q.
        num_kv_heads: H_k.
        head_dim: d.
        scale: Factor of the scores.
        router: None where attention is not routed.
    """

    norm: Norm
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    head_eps: float
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    router: RuntimeRouter | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardWeights:
    """The FFN half of a layer.

    Args:
        norm: Before it.
        gate: Rows under the activation, [F, D].
        up: Rows that multiply it, right behind `gate` in memory; None without a gate.
        gate_bias: [F] or None.
        up_bias: [F] or None.
        down: [D, F].
        down_bias: [D] or None.
        activation: In the operators' words.
        router: None where the FFN is not routed.
    """

    norm: Norm
    gate: Tensor
    up: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    activation: str
    router: RuntimeRouter | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention: AttentionWeights
    ffn: FeedForwardWeights


def read_layer(spec: BlockSpec) -> LayerWeights:
    """Return a layer's weights; separate projections are moved into one buffer that their modules then view.

    Raises:
        UnsupportedModelError: If the layer has a part that the runtime does not know; the message names it.
    """
    if spec.ffn is None:
        raise UnsupportedModelError(f"the runtime needs a plain FFN in every layer: {spec.ffn_reason}")
    return LayerWeights(attention=_attention(spec, spec.attention), ffn=_feed_forward(spec, spec.ffn))


def read_norm(module: nn.Module | None, where: str) -> Norm:
    """Return an RMSNorm's weight and constants, found out by trying it.

    Raises:
        UnsupportedModelError: If there is no such norm or it computes something else.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if module is None or not isinstance(weight, Tensor) or eps is None:
        raise UnsupportedModelError(f"{where}: the runtime needs an RMSNorm here, found {type(module).__name__}")
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(3, weight.numel(), generator=generator).to(device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        wanted = module(probe).float()
        for unit_offset in (False, True):
            found = rms_norm(probe, weight, eps=float(eps), unit_offset=unit_offset, backend="torch")[1].float()
            if (found - wanted).norm() <= 1e-2 * wanted.norm() + 1e-6:
                return Norm(weight=weight.detach(), eps=float(eps), unit_offset=unit_offset)
    raise UnsupportedModelError(f"{where}: {type(module).__name__} does not compute an RMSNorm")


def _attention(spec: BlockSpec, part: AttentionSpec) -> AttentionWeights:
    where = f"layer {spec.index}: attention"
    module: Any = part.module
    if part.q_norm == "width":
        raise UnsupportedModelError(f"{where} norms queries over their whole width; skipped rows would change it")
    for name in ("attn_logit_softcapping", "sinks"):
        if getattr(module, name, None) is not None:
            raise UnsupportedModelError(f"{where} has {name}, which the runtime does not compute")
    if not getattr(module, "use_rope", True):
        raise UnsupportedModelError(f"{where} has no positions, and the runtime turns every layer's queries and keys")
    query, output = _plain(part.query, where), _plain(part.output, where)
    if part.key is not None and part.value is not None:
        qkv, qkv_bias = stack_linears([query, _plain(part.key, where), _plain(part.value, where)], where)
    else:
        qkv, qkv_bias = query.weight.detach(), _detached(query.bias)
    head_norms = [_head_norm(module, name, part, where) for name in ("q_norm", "k_norm")]
    return AttentionWeights(
        norm=read_norm(part.pre_norm, where),
        qkv=qkv,
        qkv_bias=qkv_bias,
        output=output.weight.detach(),
        output_bias=_detached(output.bias),
        q_norm=None if head_norms[0] is None else head_norms[0].weight,
        k_norm=None if head_norms[1] is None else head_norms[1].weight,
        head_eps=1e-6 if head_norms[0] is None else head_norms[0].eps,
        num_query_heads=part.num_query_heads,
        num_kv_heads=part.num_kv_heads,
        head_dim=part.head_dim,
        scale=float(getattr(module, "scaling", part.head_dim**-0.5)),
        router=_router(part.module, qkv.dtype, part.query_width, 2 * part.num_kv_heads * part.head_dim),
    )


def _head_norm(module: nn.Module, name: str, part: AttentionSpec, where: str) -> Norm | None:
    if part.q_norm == "none":
        return None
    norm = read_norm(getattr(module, name, None), f"{where}, {name}")
    if norm.unit_offset or norm.weight.numel() != part.head_dim:
        raise UnsupportedModelError(f"{where}: {name} is not an RMSNorm over {part.head_dim} channels of a head")
    return norm


def _feed_forward(spec: BlockSpec, part: FeedForwardSpec) -> FeedForwardWeights:
    where = f"layer {spec.index}: FFN"
    activation = _ACTIVATIONS.get(type(part.activation).__name__)
    if activation is None:
        raise UnsupportedModelError(f"{where}: no operator for the activation {type(part.activation).__name__}")
    up, down = _plain(part.up, where), _plain(part.down, where)
    both: Tensor
    if part.gate is not None:
        both, bias = stack_linears([_plain(part.gate, where), up], where)
    else:
        both, bias = up.weight.detach(), _detached(up.bias)
    is_gated = part.gate is not None or part.fused_gate
    width = part.width
    return FeedForwardWeights(
        norm=read_norm(part.pre_norm, where),
        gate=both[:width],
        up=both[width:] if is_gated else None,
        gate_bias=None if bias is None else bias[:width],
        up_bias=None if bias is None or not is_gated else bias[width:],
        down=down.weight.detach(),
        down_bias=_detached(down.bias),
        activation=activation,
        router=_router(part.module, both.dtype, width, 0),
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
    bias = None if router.bias is None else router.bias.detach()
    # Other forms than the bottleneck have been refused with the model.
    assert router.down is not None
    weights = split_weights(router.down, router.up, bias, dtype=dtype)
    if extra:
        difference = weights.difference
        known = difference.new_zeros(router.num_groups) if weights.offset is None else weights.offset
        weights = weights._replace(
            difference=torch.cat((difference, difference.new_zeros(extra, difference.shape[1]))),
            offset=torch.cat((known, known.new_full((extra,), _ALWAYS))),
        )
    return RuntimeRouter(
        weights=weights,
        threshold=float(router.threshold),
        reads_residual=router.reads_residual,
        num_groups=router.num_groups,
        extra=extra,
    )
