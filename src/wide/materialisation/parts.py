"""What of a decoder layer is cut: the attribute names of its modules, and rows and columns of its linear layers."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from wide.errors import UnsupportedModelError
from wide.models.block_spec import BlockSpec

_ATTENTION_POST_NORMS = ("post_self_attn_layernorm", "post_attention_layernorm")
_FFN_POST_NORMS = ("post_mlp_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, kw_only=True, slots=True)
class SublayerNames:
    """Attribute names of one sublayer in its decoder layer; a norm is None where the family has none.

    Args:
        module: The attention or FFN.
        norm: The norm that it reads through; parallel blocks share one.
        post_norm: The norm of its output.
    """

    module: str
    norm: str | None
    post_norm: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParts:
    """Attribute names of one decoder layer's sublayers; `ffn` is None where it cannot be cut (mixture of experts)."""

    attention: SublayerNames
    ffn: SublayerNames | None

    @property
    def shares_norm(self) -> bool:
        """Whether both sublayers read through one norm."""
        return self.ffn is not None and self.attention.norm is not None and self.attention.norm == self.ffn.norm


def layer_parts(spec: BlockSpec) -> LayerParts:
    """Return the attribute names of a decoder layer's parts.

    Raises:
        UnsupportedModelError: If an output norm adds a bias, so that a sublayer without output would not add zero.
    """
    attention = _names(spec, spec.attention, _ATTENTION_POST_NORMS)
    return LayerParts(attention=attention, ffn=None if spec.ffn is None else _names(spec, spec.ffn, _FFN_POST_NORMS))


def _names(spec: BlockSpec, part: Any, post_norms: tuple[str, ...]) -> SublayerNames:
    names = {id(child): name for name, child in spec.layer.named_children()}
    return SublayerNames(
        module=names[id(part.module)],
        norm=None if part.pre_norm is None else names[id(part.pre_norm)],
        post_norm=_post_norm(spec, post_norms),
    )


def _post_norm(spec: BlockSpec, candidates: tuple[str, ...]) -> str | None:
    pre_norms = [spec.attention.pre_norm, None if spec.ffn is None else spec.ffn.pre_norm]
    # 'post_attention_layernorm' is the FFN's own norm in Llama and the attention's output norm in Gemma 2.
    for name in candidates:
        norm = getattr(spec.layer, name, None)
        if isinstance(norm, nn.Module) and not any(norm is other for other in pre_norms):
            if getattr(norm, "bias", None) is not None:
                raise UnsupportedModelError(
                    f"layer {spec.index}: {name} has a bias, so a sublayer without output would still add it"
                )
            return name
    return None


def select_rows(linear: nn.Linear, rows: Tensor) -> None:
    """Keep these output rows, `[n]` int64, with their biases."""
    rows = rows.to(linear.weight.device)
    bias = None if linear.bias is None else linear.bias.detach().index_select(0, rows)
    replace(linear, linear.weight.detach().index_select(0, rows), bias)


def select_columns(linear: nn.Linear, columns: Tensor) -> None:
    """Keep these input columns, `[n]` int64; the bias stays."""
    bias = None if linear.bias is None else linear.bias.detach()
    replace(linear, linear.weight.detach().index_select(1, columns.to(linear.weight.device)), bias)


def replace(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Put in another weight `[out, in]` and bias `[out]`, in the dtype and on the device of the old ones."""
    old = linear.weight
    linear.weight = nn.Parameter(weight.to(old.device, old.dtype).contiguous(), requires_grad=old.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(old.device, old.dtype).contiguous(), requires_grad=old.requires_grad)
    linear.out_features, linear.in_features = weight.shape
