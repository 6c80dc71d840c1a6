"""Rotate every projection into the subspaces of a Stream plan and cut the residual stream to D' dimensions.

Between two sublayers the residual stream is x = Q r, with Q [D, D'] the orthonormal basis of the sublayer before and r
the D' numbers that are kept. A sublayer reads W x / rms(x) = (W diag(gamma) Q) r / rms(r), where rms divides by D, not
D'; it leaves r' = Q'^T (Q r + out) = (Q'^T Q) r + (Q'^T W_out) h. The last FFN leaves all D dimensions, for the final
norm and the output head, which stay as they are.

Source: SliceGPT (Ashkboos et al., 2024).
"""

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wide.errors import UnsupportedModelError
from wide.models.block_spec import BlockSpec, feed_forward, plain_linear
from wide.plan import EMBEDDING_BASIS, basis_name

# A vocabulary in float64 would need several times the memory of the model's embedding.
_ROWS_AT_ONCE = 8192

Bases = tuple[Tensor, Tensor, Tensor | None]
"""Orthonormal columns `[D, D']` before a layer, after its attention and after its FFN (None: all of D stays)."""


class CutRMSNorm(nn.Module):
    """An RMS norm without weight over the kept dimensions of a stream; the sum of squares is divided by its width D."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width = width
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return `[..., D']` normed, computed in float32 at least."""
        values = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        mean_square = values.square().sum(-1, keepdim=True) / self.width
        return (values * torch.rsqrt(mean_square + self.eps)).to(hidden_states.dtype)


class CutStreamForward:
    """The forward of a pre-norm decoder layer whose residual stream changes its basis after each sublayer."""

    names: list[str]
    attention_shortcut: nn.Linear
    ffn_shortcut: nn.Linear

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the residual stream after this layer, `[B, T, D']`, or `[B, T, D]` after the last one."""
        attention_norm, attention, ffn_norm, ffn = (getattr(self, name) for name in self.names)
        output = attention(attention_norm(hidden_states), *args, **kwargs)[0]
        hidden_states = self.attention_shortcut(hidden_states) + output
        return self.ffn_shortcut(hidden_states) + ffn(ffn_norm(hidden_states))


def bases_around(tensors: Mapping[str, Tensor], index: int, num_layers: int) -> Bases:
    """Return the bases around a layer from the tensors of a Stream plan."""
    before = EMBEDDING_BASIS if index == 0 else basis_name(index - 1, "ffn")
    after = None if index == num_layers - 1 else tensors[basis_name(index, "ffn")]
    return tensors[before], tensors[basis_name(index, "attention")], after


def check_lossless(spec: BlockSpec) -> None:
    """Raise UnsupportedModelError if a layer drops values of its stream at random; `attach` has checked the rest."""
    for name, child in spec.layer.named_children():
        if isinstance(child, nn.Dropout) and child.p:
            raise UnsupportedModelError(
                f"layer {spec.index}: {name} drops values of the stream at random (p={child.p:g}), so it cannot "
                "be rotated; set it to 0 in the model's configuration"
            )


def rotate_layer(spec: BlockSpec, bases: Bases, scales: tuple[Tensor, Tensor] | None = None) -> None:
    """Rotate and cut one layer's projections and norms, in place, and give it its two shortcuts.

    `scales` are `norm_scales` of the layer, folded into the projections that read its norms; None leaves the
    projections' values without meaning, where only the shapes are wanted.
    """
    layer, device = spec.layer, next(spec.layer.parameters()).device
    wide = [None if basis is None else basis.to(device=device, dtype=torch.float64) for basis in bases]
    sublayers: tuple[Any, ...] = spec.attention, feed_forward(spec)
    known = {child: name for name, child in layer.named_children()}
    names = [known[child] for part in sublayers for child in (part.pre_norm, part.module)]
    for position, part in enumerate(sublayers):
        before, after = wide[position : position + 2]
        assert before is not None
        *reading, output = [plain_linear(linear, spec.index) for linear in part.linears()]
        for linear in reading:
            weight = linear.weight.detach().double()
            weight = weight if scales is None else weight * scales[position].to(device)
            replace(linear, weight @ before)
        shortcut = before
        if after is not None:
            bias = None if output.bias is None else after.T @ output.bias.detach().double()
            replace(output, after.T @ output.weight.detach().double(), bias)
            shortcut = after.T @ before
        norm = CutRMSNorm(spec.hidden_size, _eps(part.pre_norm, spec.index))
        setattr(layer, names[2 * position], norm.train(layer.training))
        past = nn.Linear(shortcut.shape[1], shortcut.shape[0], bias=False, device="meta")
        past.weight = nn.Parameter(shortcut.to(output.weight.dtype).contiguous(), requires_grad=False)
        setattr(layer, ("attention_shortcut", "ffn_shortcut")[position], past)
    layer.names = names  # type: ignore[assignment]
    layer.__class__ = _with_cut_stream(type(layer))  # type: ignore[arg-type]


def rotate_embedding(model: nn.Module, basis: Tensor) -> None:
    """Rotate and cut the embedding by orthonormal columns `[D, D']`, in place, and untie the output head from it."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    old = embedding.weight
    if head.weight is old:
        head.weight = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
        config: Any = model.config
        config.get_text_config().tie_word_embeddings = False
        config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}  # type: ignore[assignment]
    columns = basis.to(device=old.device, dtype=torch.float64)
    rows = [(part.double() @ columns).to(old.dtype) for part in old.detach().split(_ROWS_AT_ONCE)]
    embedding.weight = nn.Parameter(torch.cat(rows), requires_grad=old.requires_grad)
    embedding.embedding_dim = basis.shape[1]


def replace(linear: nn.Linear, weight: Tensor, bias: Tensor | None = None) -> None:
    """Put in another weight `[out, in]`, and bias `[out]` if one is given, in dtype and on the device of the old."""
    old = linear.weight
    linear.weight = nn.Parameter(weight.to(old.device, old.dtype).contiguous(), requires_grad=old.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(old.device, old.dtype).contiguous(), requires_grad=old.requires_grad)
    linear.out_features, linear.in_features = weight.shape


def norm_scales(spec: BlockSpec) -> tuple[Tensor, Tensor]:
    """Return the weights `[D]` of a layer's two norms, attention's first, as they multiply; float64.

    Raises UnsupportedModelError if one is not an RMS norm with a weight (as it is, or added to 1).
    """
    return _norm_scale(spec, spec.attention.pre_norm), _norm_scale(spec, feed_forward(spec).pre_norm)


@functools.cache
def _with_cut_stream(layer_class: type[nn.Module]) -> type[nn.Module]:
    # The name stays: transformers finds the layers that must not be split over devices by it.
    members = {"__module__": __name__, "__doc__": CutStreamForward.__doc__}
    return type(layer_class.__name__, (CutStreamForward, layer_class), members)


def _eps(norm: nn.Module, index: int) -> float:
    for name in ("variance_epsilon", "eps"):
        value = getattr(norm, name, None)
        if isinstance(value, float):
            return value
    raise UnsupportedModelError(f"layer {index}: {type(norm).__name__} names no eps")


def _norm_scale(spec: BlockSpec, norm: Any) -> Tensor:
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
