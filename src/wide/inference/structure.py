"""The ends of a causal LM (embedding, last norm, head, positions), and the proof that the runtime computes the same."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wide.errors import UnsupportedModelError
from wide.inference.optimize_checks import require_routing_alone
from wide.inference.weights import Norm, read_norm
from wide.models.attach import attachment, is_attached
from wide.models.block_spec import BlockSpec
from wide.models.discovery import discover
from wide.models.observe import bypass

# Kinds of positions whose table does not depend on the length of the sequence at hand.
_ROPE_TYPES = ("default", "llama3", "linear", "yarn")
_PROBE_TOKENS = 8
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """Everything of a causal LM around its layers.

    Args:
        specs: The layers' parts.
        embedding: [V, D].
        head: [V, D].
        head_bias: [V] or None.
        norm: Before the head.
        cos: Cosines by position, [max_length, d].
        sin: Sines, as `cos`.
    """

    specs: tuple[BlockSpec, ...]
    embedding: Tensor
    head: Tensor
    head_bias: Tensor | None
    norm: Norm
    cos: Tensor
    sin: Tensor


def read_ends(model: nn.Module, max_length: int) -> Ends:
    """Return the ends of a model.

    Raises:
        UnsupportedModelError: If a part is missing, or positions or windows depend on the sequence's length.
    """
    whole: Any = model
    if is_attached(model):
        state = attachment(model)
        require_routing_alone(state)
        if any(router.reads_layer_input for router in state.routers()):
            raise UnsupportedModelError(
                "the runtime's routers read the stream of their own half; for router_input='layer_input' use "
                "wide.optimize(model) instead"
            )
        if state.lora is not None and not state.lora.merged:
            raise UnsupportedModelError("the runtime reads plain weights; merge LoRA first: wide.merge_lora(model)")
        specs = state.specs
    else:
        specs = discover(model)
    base = whole.base_model
    for name in ("norm", "rotary_emb"):
        if getattr(base, name, None) is None:
            raise UnsupportedModelError(f"{type(base).__name__} has no {name}; the runtime runs Llama-like models")
    _require_full_attention(specs, max_length)
    head = whole.get_output_embeddings()
    embedding = whole.get_input_embeddings().weight.detach()
    cos, sin = _angles(base.rotary_emb, embedding, max_length, specs[0].attention.head_dim)
    return Ends(
        specs=specs,
        embedding=embedding,
        head=head.weight.detach(),
        head_bias=None if head.bias is None else head.bias.detach(),
        norm=read_norm(base.norm, "last norm"),
        cos=cos,
        sin=sin,
    )


def require_same_outputs(model: nn.Module, runs: Callable[[Tensor], Tensor], max_length: int) -> None:
    """Compare dense logits of a few tokens with the model's own.

    Raises:
        UnsupportedModelError: If they differ by more than rounding: the model has a part that was overlooked.
    """
    whole: Any = model
    weight = whole.get_input_embeddings().weight
    ids = torch.randint(
        0, weight.shape[0], (1, min(_PROBE_TOKENS, max_length)), generator=torch.Generator().manual_seed(0)
    )
    ids = ids.to(weight.device)
    with torch.no_grad(), bypass(model) if is_attached(model) else nullcontext():
        wanted = whole(ids, use_cache=False).logits.float()
    error = ((runs(ids).float() - wanted).norm() / wanted.norm()).item()
    if not error <= _TOLERANCE[weight.dtype]:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a plain pre-norm decoder: the runtime's logits differ by {error:.1%}. "
            "Multipliers, norms after the sub-layers, parallel halves, soft caps and layers without positions are not "
            "supported; use wide.optimize(model) instead"
        )


def _require_full_attention(specs: tuple[BlockSpec, ...], max_length: int) -> None:
    for spec in specs:
        window = getattr(spec.attention.module, "sliding_window", None)
        window = window or getattr(getattr(spec.attention.module, "config", None), "sliding_window", None)
        kinds = getattr(getattr(spec.attention.module, "config", None), "layer_types", None)
        slides = kinds is None or kinds[spec.index] == "sliding_attention"
        if window is not None and slides and window < max_length:
            raise UnsupportedModelError(
                f"layer {spec.index} attends within a window of {window} tokens; the runtime attends to all, so "
                f"max_length must be at most {window}, got {max_length}"
            )


def _angles(rotary: Any, like: Tensor, max_length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    kind = getattr(rotary, "rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise UnsupportedModelError(f"positions of type {kind!r} depend on the length; the runtime takes {_ROPE_TYPES}")
    places = torch.arange(max_length, device=like.device)[None]
    with torch.no_grad():
        cos, sin = rotary(like[:1], position_ids=places)
    if cos.shape[-1] != head_dim:
        raise UnsupportedModelError(f"only {cos.shape[-1]} of {head_dim} channels of a head are turned by position")
    return cos[0].contiguous(), sin[0].contiguous()
