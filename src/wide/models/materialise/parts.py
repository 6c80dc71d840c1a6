"""The attributes of a decoder layer under which its halves and their norms lie."""

from dataclasses import dataclass

from torch import nn

from wide.errors import UnsupportedModelError
from wide.models.block_spec import BlockSpec

_ATTENTION_POST_NORMS = ("post_self_attn_layernorm", "post_attention_layernorm")
_FFN_POST_NORMS = ("post_mlp_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParts:
    """Attribute names of one decoder layer; a norm is None where the family has none.

    Args:
        attention: The attention module.
        attention_norm: The norm that the attention reads through; it may be the FFN's too (parallel blocks).
        attention_post_norm: The norm of the attention's output.
        ffn: The FFN module; None where it cannot be cut (mixture of experts).
        ffn_norm: The norm that the FFN reads through.
        ffn_post_norm: The norm of the FFN's output.
    """

    attention: str
    attention_norm: str | None
    attention_post_norm: str | None
    ffn: str | None
    ffn_norm: str | None
    ffn_post_norm: str | None

    @property
    def shares_norm(self) -> bool:
        """Whether both halves read through one norm."""
        return self.attention_norm is not None and self.attention_norm == self.ffn_norm


def layer_parts(spec: BlockSpec) -> LayerParts:
    """Return the attribute names of a decoder layer's parts.

    Raises:
        UnsupportedModelError: If an output norm adds a bias, so that a half without output would not add zero.
    """
    names = {id(child): name for name, child in spec.layer.named_children()}
    pre_norms = [spec.attention.pre_norm, spec.ffn.pre_norm if spec.ffn is not None else None]
    return LayerParts(
        attention=names[id(spec.attention.module)],
        attention_norm=_name(names, pre_norms[0]),
        attention_post_norm=_post_norm(spec, _ATTENTION_POST_NORMS, pre_norms),
        ffn=None if spec.ffn is None else names[id(spec.ffn.module)],
        ffn_norm=_name(names, pre_norms[1]),
        ffn_post_norm=_post_norm(spec, _FFN_POST_NORMS, pre_norms),
    )


def _name(names: dict[int, str], module: nn.Module | None) -> str | None:
    return None if module is None else names[id(module)]


def _post_norm(spec: BlockSpec, candidates: tuple[str, ...], pre_norms: list[nn.Module | None]) -> str | None:
    # 'post_attention_layernorm' is the FFN's own norm in Llama and the attention's output norm in Gemma 2.
    for name in candidates:
        norm = getattr(spec.layer, name, None)
        if isinstance(norm, nn.Module) and not any(norm is other for other in pre_norms):
            if getattr(norm, "bias", None) is not None:
                raise UnsupportedModelError(
                    f"layer {spec.index}: {name} has a bias, so a half without output would still add it"
                )
            return name
    return None
