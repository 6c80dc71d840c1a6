"""Find the BlockSpec of every decoder layer by structure, never by class name; refuse with the reason."""

from typing import Any

from torch import nn

from wide.errors import UnsupportedModelError
from wide.models.block_spec import AttentionSpec, BlockSpec, FeedForwardSpec, NormScope

_ATTENTION_PRE_NORMS = ("input_layernorm", "attention_layernorm")
_FFN_PRE_NORMS = ("pre_feedforward_layernorm", "feedforward_layernorm")
_ATTENTION_POST_NORMS = ("post_self_attn_layernorm", "post_attention_layernorm")
# Gemma 4 norms the sum with experts once more.
_FFN_POST_NORMS = ("post_mlp_layernorm", "post_feedforward_layernorm_1", "post_feedforward_layernorm")
_LATENT_PARTS = ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "kv_a_proj", "kv_proj_with_mqa")
_SUB_NORMS = ("attn_sub_norm", "ffn_sub_norm", "inner_attn_ln", "groupnorm")


def discover(model: nn.Module) -> tuple[BlockSpec, ...]:
    """Return the spec of every decoder layer of a causal language model.

    Raises UnsupportedModelError if a part cannot be placed, naming the layer, what was seen and why it cannot be
    routed, or if the model is sliced.
    """
    if getattr(model, "wide_is_sliced", False):
        raise UnsupportedModelError(
            f"this {type(model).__name__} is sliced already, and routers or another plan need the whole layers of its "
            "base; load the base, and attach one Plan there that says both"
        )
    config = _text_config(model)
    layers = _decoder_layers(model, _setting(config, "num_hidden_layers", type(model).__name__))
    return tuple(_block(index, layer, config) for index, layer in enumerate(layers))


def scale_and_cap(config: Any) -> tuple[float, float | None]:
    """Return what a causal LM's configuration says that it does to its logits: their factor and their bound."""
    config = config.get_text_config()
    factor = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return factor, getattr(config, "final_logit_softcapping", None)


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no transformers configuration; wide routes Hugging Face causal LMs. "
            "For another structure, pass your own BlockSpecs to attach(..., specs=...)"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{type(model).__name__} has an encoder and a decoder; wide routes decoders alone")
    try:
        return config.get_text_config()
    except ValueError as error:
        raise UnsupportedModelError(f"{type(model).__name__} has no decoder that stands out: {error}") from error


def _setting(config: Any, key: str, where: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int):
        raise UnsupportedModelError(
            f"{where}: neither the module nor the configuration says {key}; families with names of their own, such as "
            "OPT and GPT-J, need your own BlockSpecs: attach(..., specs=...)"
        )
    return value


def _decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    # Of a model with a vision or an audio encoder, the part that writes text.
    decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
    found = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    found = [m for m in found if any(_attention_module(layer) is not None for layer in m)]
    if len(found) == 1:
        return found[0]
    seen = f"{len(found)} lists of {num_layers} layers with an attention module"
    names = ", ".join(sorted({type(child).__name__ for child in model.children()}))
    raise UnsupportedModelError(
        f"cannot find the decoder layers of {type(model).__name__} (children: {names}): expected exactly one list, "
        f"found {seen}. Encoder-decoder, state-space and hybrid models, and layers "
        "whose projections have other names, are not supported"
    )


def _attention_module(layer: nn.Module) -> nn.Module | None:
    for child in layer.children():
        found = _find(child, "o_proj", "dense", "out_proj"), _find(child, "q_proj", "qkv_proj")
        if None not in found or any(hasattr(child, part) for part in _LATENT_PARTS):
            return child
    return None


def _find(module: nn.Module, *names: str) -> nn.Module | None:
    parts = (getattr(module, name, None) for name in names)
    return next((part for part in parts if isinstance(part, nn.Module)), None)


def _block(index: int, layer: nn.Module, config: Any) -> BlockSpec:
    attention = _attention_module(layer)
    if attention is None:
        names = ", ".join(name for name, _ in layer.named_children())
        raise UnsupportedModelError(
            f"layer {index} ({type(layer).__name__}) has no attention module with projections named q_proj or "
            f"qkv_proj and o_proj (children: {names}); hybrid and non-standard layers need your own BlockSpec"
        )
    rest = [child for child in layer.children() if child is not attention]
    found = (c for c in rest if _find(c, "down_proj") is not None or hasattr(c, "experts") or hasattr(c, "router"))
    ffn_module = next(found, None)
    ffn, reason = None, f"layer {index} has no FFN with a down_proj"
    if ffn_module is not None:
        ffn, reason = _feed_forward(index, layer, ffn_module)
    spec = _attention(index, layer, attention, config)
    return BlockSpec(
        index=index, layer=layer, hidden_size=_features(spec.query)[0], attention=spec, ffn=ffn, ffn_reason=reason
    )


def _attention(index: int, layer: nn.Module, module: nn.Module, config: Any) -> AttentionSpec:
    where = f"layer {index}: {type(module).__name__}"
    for part in _LATENT_PARTS:
        if hasattr(module, part):
            raise UnsupportedModelError(
                f"{where} has {part}: multi-head latent attention has no per-head keys and values, so head groups "
                "cannot be skipped"
            )
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{where} looks at later tokens, too: it is an encoder's; wide routes causal LMs")
    _refuse_sub_norms(where, module)
    query: Any = _find(module, "q_proj", "qkv_proj")
    output: Any = _find(module, "o_proj", "dense", "out_proj")
    num_heads = int(getattr(module, "num_heads", None) or _setting(config, "num_attention_heads", where))
    num_kv_heads = int(getattr(module, "num_key_value_heads", None) or _setting(config, "num_key_value_heads", where))
    head_dim = int(getattr(module, "head_dim", None) or _setting(config, "hidden_size", where) // num_heads)
    fused = query is _find(module, "qkv_proj")
    rows = (num_heads + 2 * num_kv_heads) * head_dim if fused else num_heads * head_dim
    if _features(query)[1] != rows or _features(output)[0] != num_heads * head_dim:
        raise UnsupportedModelError(
            f"{where}: expected {rows} query rows and {num_heads * head_dim} output columns for {num_heads} query "
            f"heads, {num_kv_heads} KV heads of {head_dim}; found {_features(query)[1]} and {_features(output)[0]} "
            "(gated or differential attention is not supported)"
        )
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(f"{where}: {num_heads} query heads do not divide into {num_kv_heads} KV heads")
    return AttentionSpec(
        module=module,
        query=query,
        key=None if fused else _find(module, "k_proj"),
        value=None if fused else _find(module, "v_proj"),
        output=output,
        num_query_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_norm=_norm_scope(module, head_dim, num_heads * head_dim),
        borrows=not fused and _find(module, "k_proj") is None,
        pre_norm=_find(layer, *_ATTENTION_PRE_NORMS),
        post_norm=_post_norm(layer, *_ATTENTION_POST_NORMS),
    )


def _norm_scope(module: nn.Module, head_dim: int, query_width: int) -> NormScope:
    norm = _find(module, "q_norm", "q_layernorm")
    weight = getattr(norm, "weight", None)
    if weight is None:
        return "none" if norm is None else "head"
    return "width" if weight.numel() == query_width and query_width != head_dim else "head"


def _feed_forward(index: int, layer: nn.Module, module: nn.Module) -> tuple[FeedForwardSpec | None, str]:
    where = f"layer {index}: {type(module).__name__}"
    if hasattr(module, "experts") or hasattr(module, "router"):
        return None, f"{where} is a mixture of experts, which routes tokens already"
    _refuse_sub_norms(where, module)
    down = _find(module, "down_proj")
    up = _find(module, "gate_up_proj", "up_proj")
    gate = _find(module, "gate_proj")
    activation = _find(module, "act_fn", "activation_fn", "act")
    if down is None or up is None:
        names = ", ".join(name for name, _ in module.named_children())
        raise UnsupportedModelError(
            f"{where}: expected up_proj (or gate_up_proj) and down_proj, found {names}; pass your own BlockSpec"
        )
    if activation is None:
        raise UnsupportedModelError(
            f"{where}: its activation is not a module of its own (act_fn), so there is no place for the mask"
        )
    width = _features(down)[0]
    fused = _find(module, "gate_up_proj") is not None
    if _features(up)[1] != (2 * width if fused else width):
        raise UnsupportedModelError(f"{where}: {_features(up)[1]} up rows do not fit {width} down columns")
    return (
        FeedForwardSpec(
            module=module,
            up=up,
            gate=gate,
            down=down,
            activation=activation,
            width=width,
            fused_gate=fused,
            pre_norm=_ffn_pre_norm(layer),
            post_norm=_post_norm(layer, *_FFN_POST_NORMS),
        ),
        "",
    )


def _ffn_pre_norm(layer: nn.Module) -> nn.Module | None:
    norm = _find(layer, *_FFN_PRE_NORMS)
    if norm is not None:
        return norm
    if hasattr(layer, "post_feedforward_layernorm"):
        # Norms only after the sublayers (OLMo 2, EXAONE 4): the FFN reads the residual stream itself.
        return None
    # One shared norm means a parallel block (Cohere 2): both sublayers read the same residual.
    return _find(layer, "post_attention_layernorm", "input_layernorm")


def _post_norm(layer: nn.Module, *names: str) -> nn.Module | None:
    # 'post_attention_layernorm' is the FFN's own norm in Llama and the attention's output norm in Gemma 2.
    norm = _find(layer, *names)
    return None if norm is _ffn_pre_norm(layer) else norm


def _refuse_sub_norms(where: str, module: nn.Module) -> None:
    for name in _SUB_NORMS:
        if hasattr(module, name):
            raise UnsupportedModelError(
                f"{where} has {name}, a norm between the gated activations and the output projection: skipped groups "
                "would change the norm of the kept ones"
            )


def _features(linear: nn.Module) -> tuple[int, int]:
    """Return (input, output) features of a linear-like module, quantised and LoRA-wrapped ones included."""
    inputs, outputs = getattr(linear, "in_features", None), getattr(linear, "out_features", None)
    if not isinstance(inputs, int) or not isinstance(outputs, int):
        raise UnsupportedModelError(
            f"{type(linear).__name__} is not linear-like (no in_features and out_features); convolutional projections "
            "such as those of GPT-2 are not supported"
        )
    return inputs, outputs
