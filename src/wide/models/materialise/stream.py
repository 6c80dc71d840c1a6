"""Rotate every projection into the subspaces of a Stream plan and cut the residual stream to D' dimensions.

Between two half-layers the residual stream is x = Q r, with Q [D, D'] the orthonormal basis of the half before and r
the D' numbers that are kept. A half-layer reads W x / rms(x) = (W diag(gamma) Q) r / rms(r), where rms divides by D,
not D'; it leaves r' = Q'^T (Q r + out) = (Q'^T Q) r + (Q'^T W_out) h. The last FFN leaves all D dimensions, for the
final norm and the output head, which stay as they are.

Source: SliceGPT (Ashkboos et al., 2024).
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wide.errors import UnsupportedModelError
from wide.models.block_spec import BlockSpec
from wide.models.materialise.linear import plain_linear, replace
from wide.models.materialise.narrow import feed_forward
from wide.models.materialise.parts import LayerParts
from wide.models.stream import STREAM_NAME

# A vocabulary in float64 would need several times the memory of the model's embedding.
_ROWS_AT_ONCE = 8192
_cut_classes: dict[type[nn.Module], type[nn.Module]] = {}


class CutRMSNorm(nn.Module):
    """An RMS norm without weight over the kept dimensions of a residual stream.

    Args:
        width: Dimensions of the whole stream, D, by which the sum of squares is divided.
        eps: Added to the mean square.
    """

    def __init__(self, width: int, eps: float) -> None:
        """Keep the two numbers."""
        super().__init__()
        self.width = width
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return `[..., D']` normed, computed in float32 at least."""
        values = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        mean_square = values.square().sum(-1, keepdim=True) / self.width
        return (values * torch.rsqrt(mean_square + self.eps)).to(hidden_states.dtype)


class CutStreamForward:
    """The forward of a pre-norm decoder layer whose residual stream changes its basis after each half."""

    parts: LayerParts
    attention_shortcut: nn.Linear
    ffn_shortcut: nn.Linear

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the residual stream after this layer, `[B, T, D']`, or `[B, T, D]` after the last one."""
        parts = self.parts
        assert parts.attention_norm is not None
        assert parts.ffn_norm is not None
        assert parts.ffn is not None
        normed = getattr(self, parts.attention_norm)(hidden_states)
        output = getattr(self, parts.attention)(normed, *args, **kwargs)[0]
        hidden_states = self.attention_shortcut(hidden_states) + output
        output = getattr(self, parts.ffn)(getattr(self, parts.ffn_norm)(hidden_states))
        return self.ffn_shortcut(hidden_states) + output


@dataclass(frozen=True, kw_only=True, slots=True)
class Bases:
    """Orthonormal columns `[D, D']` before a layer, after its attention and after its FFN (None: all of D stays)."""

    before: Tensor
    after_attention: Tensor
    after_ffn: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NormScales:
    """The weights `[D]` of a layer's two norms, as they multiply; float64."""

    attention: Tensor
    ffn: Tensor


def bases_of(tensors: Any, num_layers: int) -> list[Bases]:
    """Return the bases around every layer from the tensors of a Stream plan."""
    after_ffn = [tensors[f"layers.{index}.ffn.basis"] for index in range(num_layers - 1)]
    return [
        Bases(before=before, after_attention=tensors[f"layers.{index}.attention.basis"], after_ffn=after)
        for index, (before, after) in enumerate(
            zip([tensors["stream.embedding"], *after_ffn], [*after_ffn, None], strict=True)
        )
    ]


def check_plain(spec: BlockSpec, parts: LayerParts) -> None:
    """Check that a layer is x + attention(norm(x)), then x + ffn(norm(x)), and nothing else.

    Raises:
        UnsupportedModelError: If it has norms after its halves, shares one, drops values at random, or has parts that
            are not known here.
    """
    where = f"layer {spec.index} ({type(spec.layer).__name__})"
    norms = [parts.attention_norm, parts.ffn_norm]
    odd = [name for name in (parts.attention_post_norm, parts.ffn_post_norm) if name is not None]
    odd += [
        name
        for name, child in spec.layer.named_children()
        if name not in (parts.attention, parts.ffn, *norms, STREAM_NAME)
        and not (isinstance(child, nn.Dropout) and child.p == 0)
    ]
    if None in norms or parts.ffn is None or parts.shares_norm or odd:
        raise UnsupportedModelError(
            f"{where} is not a plain pre-norm layer (norms {norms}, further parts {odd}), so its residual stream "
            "cannot be rotated"
        )


def norm_scales(spec: BlockSpec) -> NormScales:
    """Return the weights of a layer's two norms.

    Raises:
        UnsupportedModelError: If one is not an RMS norm with a weight (as it is, or added to 1).
    """
    half = feed_forward(spec)
    assert spec.attention.pre_norm is not None
    assert half.pre_norm is not None
    return NormScales(attention=_norm_scale(spec, spec.attention.pre_norm), ffn=_norm_scale(spec, half.pre_norm))


def rotate_layer(spec: BlockSpec, parts: LayerParts, bases: Bases, scales: NormScales | None) -> None:
    """Rotate and cut one layer's projections and norms, in place, and give it its two shortcuts.

    Args:
        spec: The layer; `check_plain` has passed.
        parts: The attribute names of its parts.
        bases: Around the layer.
        scales: Weights of its norms, folded into the projections that read them; None leaves the projections'
            values without meaning, where only the shapes are wanted.
    """
    attention, half = spec.attention, feed_forward(spec)
    where = f"layer {spec.index}: a projection"
    output = plain_linear(attention.output, where)
    device, dtype, layer = output.weight.device, output.weight.dtype, spec.layer
    before, middle = _wide(bases.before, device), _wide(bases.after_attention, device)
    after = None if bases.after_ffn is None else _wide(bases.after_ffn, device)
    for module in (attention.query, attention.key, attention.value):
        if module is not None:
            _rotate_inputs(plain_linear(module, where), before, None if scales is None else scales.attention)
    for module in (half.gate, half.up):
        if module is not None:
            _rotate_inputs(plain_linear(module, where), middle, None if scales is None else scales.ffn)
    _rotate_outputs(output, middle)
    if after is not None:
        _rotate_outputs(plain_linear(half.down, where), after)
    for name, norm in ((parts.attention_norm, attention.pre_norm), (parts.ffn_norm, half.pre_norm)):
        assert name is not None
        assert norm is not None
        setattr(layer, name, CutRMSNorm(spec.hidden_size, _eps(norm, spec.index)).train(layer.training))
    layer.attention_shortcut = _shortcut(middle.T @ before, dtype)
    layer.ffn_shortcut = _shortcut(middle if after is None else after.T @ middle, dtype)
    layer.parts = parts  # type: ignore[assignment]
    layer.__class__ = _with_cut_stream(type(layer))


def rotate_embedding(model: nn.Module, basis: Tensor) -> None:
    """Rotate and cut the embedding, in place, and untie the output head, which stays whole.

    Args:
        model: A Hugging Face causal LM.
        basis: `[D, D']`, orthonormal columns.
    """
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    old = embedding.weight
    if head.weight is old:
        head.weight = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
        config: Any = model.config
        config.get_text_config().tie_word_embeddings = False
        config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}  # type: ignore[assignment]
    rows = [(part.double() @ _wide(basis, old.device)).to(old.dtype) for part in old.detach().split(_ROWS_AT_ONCE)]
    embedding.weight = nn.Parameter(torch.cat(rows), requires_grad=old.requires_grad)
    embedding.embedding_dim = basis.shape[1]


def identity_bases(num_layers: int, width: int, kept: int, device: torch.device) -> tuple[list[Bases], Tensor]:
    """Return bases of the right shapes that keep the first dimensions, where only the shapes are wanted."""
    basis = torch.eye(width, kept, device=device)
    middle = Bases(before=basis, after_attention=basis, after_ffn=basis)
    last = Bases(before=basis, after_attention=basis, after_ffn=None)
    return [middle] * (num_layers - 1) + [last], basis


def _rotate_inputs(linear: nn.Linear, basis: Tensor, scale: Tensor | None) -> None:
    weight = linear.weight.detach().double()
    weight = weight if scale is None else weight * scale.to(weight.device)
    replace(linear, weight @ basis, None if linear.bias is None else linear.bias.detach())


def _rotate_outputs(linear: nn.Linear, basis: Tensor) -> None:
    bias = None if linear.bias is None else basis.T @ linear.bias.detach().double()
    replace(linear, basis.T @ linear.weight.detach().double(), bias)


def _shortcut(weight: Tensor, dtype: torch.dtype) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.to(dtype).contiguous(), requires_grad=False)
    return linear


def _with_cut_stream(layer_class: type[nn.Module]) -> type[nn.Module]:
    if layer_class not in _cut_classes:
        # The name stays: transformers finds the layers that must not be split over devices by it.
        members = {"__module__": __name__, "__doc__": CutStreamForward.__doc__}
        _cut_classes[layer_class] = type(layer_class.__name__, (CutStreamForward, layer_class), members)
    return _cut_classes[layer_class]


def _eps(norm: nn.Module, index: int) -> float:
    for name in ("variance_epsilon", "eps"):
        value = getattr(norm, name, None)
        if isinstance(value, float):
            return value
    raise UnsupportedModelError(f"layer {index}: {type(norm).__name__} names no eps")


def _norm_scale(spec: BlockSpec, norm: nn.Module) -> Tensor:
    weight = getattr(norm, "weight", None)
    eps = _eps(norm, spec.index)
    if isinstance(weight, Tensor) and weight.dim() == 1 and not weight.is_meta and getattr(norm, "bias", None) is None:
        probe = torch.randn(2, spec.hidden_size, generator=torch.Generator().manual_seed(0)) + 0.5
        normed = probe * torch.rsqrt(probe.square().mean(-1, keepdim=True) + eps)
        with torch.no_grad():
            seen = copy.deepcopy(norm).float().cpu()(probe)
        plain = weight.detach().double().cpu()
        for scale in (plain, 1 + plain):
            if torch.allclose(seen.double(), normed.double() * scale, rtol=1e-3, atol=1e-4):
                return scale
    raise UnsupportedModelError(
        f"layer {spec.index}: {type(norm).__name__} is not an RMS norm with one weight per channel, so it does not "
        "commute with a rotation"
    )


def _wide(basis: Tensor, device: torch.device) -> Tensor:
    return basis.to(device=device, dtype=torch.float64)
