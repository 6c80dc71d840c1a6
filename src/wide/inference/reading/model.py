"""The ends of a causal LM (embedding, last norm, head, positions), and the proof that the engine computes the same."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wide.errors import UnsupportedModelError
from wide.inference.reading.checks import require_routing_alone
from wide.inference.reading.weights import Norm, read_norm, require_known
from wide.models.attach import attachment, is_attached
from wide.models.block_spec import BlockSpec
from wide.models.discovery import discover, scale_and_cap
from wide.models.observe import bypass

# Kinds of positions whose table does not depend on the length of the sequence at hand.
_ROPE_TYPES = ("default", "llama3", "linear", "yarn")
_LAYER_KINDS = (None, "full_attention", "sliding_attention")
_INPUT_MULTIPLIER = "embedding_multiplier"
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
        angles: For each layer cosines and sines by position, [max_length, r].
        embedding_scale: Factor of embedded tokens, or None.
        input_scale: Factor of what enters the first layer, embeddings of the caller's own included, or None.
        logit_scale: Factor of the logits, or None.
        logit_cap: Bound of the logits, or None.
    """

    specs: tuple[BlockSpec, ...]
    embedding: Tensor
    head: Tensor
    head_bias: Tensor | None
    norm: Norm
    angles: tuple[tuple[Tensor, Tensor], ...]
    embedding_scale: float | None
    input_scale: float | None
    logit_scale: float | None
    logit_cap: float | None


def read_ends(model: nn.Module, max_length: int) -> Ends:
    """Return the ends of a model.

    Raises:
        UnsupportedModelError: If a part is missing or unknown, or positions depend on the sequence's length.
    """
    whole: Any = model
    if is_attached(model):
        state = attachment(model)
        require_routing_alone(state)
        if any(router.reads_layer_input for router in state.routers()):
            raise UnsupportedModelError(
                "the engine's routers read the stream of their own sublayer; for router_input='layer_input' use "
                "wide.optimize(model) instead"
            )
        if state.lora is not None and not state.lora.merged:
            raise UnsupportedModelError("the engine reads plain weights; merge LoRA first: wide.merge_lora(model)")
        specs = state.specs
    else:
        specs = discover(model)
    base = whole.base_model
    for name in ("norm", "rotary_emb"):
        if getattr(base, name, None) is None:
            raise UnsupportedModelError(f"{type(base).__name__} has no {name}; the engine runs Llama-like models")
    if len({(spec.attention.num_kv_heads, spec.attention.head_dim) for spec in specs}) > 1:
        raise UnsupportedModelError("the layers' keys differ in shape, and the engine's cache holds one shape")
    embed, head, config = whole.get_input_embeddings(), whole.get_output_embeddings(), base.config
    layers = [part for part in base.children() if specs[0].layer in part.children()]
    require_known(base, (embed, base.norm, *layers), type(base).__name__, _INPUT_MULTIPLIER)
    embedding = embed.weight.detach()
    scale, cap = scale_and_cap(model)
    return Ends(
        specs=specs,
        embedding=embedding,
        head=head.weight.detach(),
        head_bias=None if head.bias is None else head.bias.detach(),
        norm=read_norm(base.norm, "last norm"),
        angles=_angles(base.rotary_emb, embedding, max_length, [_kind(config, spec.index) for spec in specs]),
        embedding_scale=_embedding_scale(embed),
        input_scale=_unless_one(getattr(base, _INPUT_MULTIPLIER, None)),
        logit_scale=_unless_one(scale),
        logit_cap=cap,
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
            f"{type(model).__name__} computes something that the engine does not know: logits differ by {error:.1%}; "
            "its layers run one by one"
        )


def _kind(config: Any, index: int) -> str | None:
    """Return which kind of layer a configuration says, None if it says none."""
    kinds: Any = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] not in _LAYER_KINDS:
        raise UnsupportedModelError(
            f"layer {index} is of the kind {kinds[index]!r}; the engine knows {_LAYER_KINDS[1:]}"
        )
    return None if kinds is None else str(kinds[index])


def _angles(
    rotary: Any, like: Tensor, max_length: int, kinds: Sequence[str | None]
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return cosines and sines for each layer; layers of one kind share theirs, all do where kinds do not matter."""
    by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    tables: dict[str | None, tuple[Tensor, Tensor]] = {}
    places = torch.arange(max_length, device=like.device)[None]
    for kind in {each if by_kind else None for each in kinds}:
        found = getattr(rotary, "rope_type", "default")
        found = found[kind] if isinstance(found, dict) else found
        if found not in _ROPE_TYPES:
            raise UnsupportedModelError(
                f"positions of type {found!r} depend on the length; the engine takes {_ROPE_TYPES}"
            )
        with torch.no_grad():
            cos, sin = rotary(like[:1], position_ids=places, **({"layer_type": kind} if by_kind else {}))
        tables[kind] = cos[0].contiguous(), sin[0].contiguous()
    return tuple(tables[kind if by_kind else None] for kind in kinds)


def _embedding_scale(embed: Any) -> float | None:
    """Return the factor of an embedding's rows, found out by trying it."""
    weight = embed.weight.detach()
    scale = getattr(embed, "embed_scale", None)
    factor = None if scale is None else float(torch.as_tensor(scale).to(weight.dtype))
    ids = torch.arange(min(2, weight.shape[0]), device=weight.device)
    with torch.no_grad():
        if not torch.equal(embed(ids), weight[ids] if factor is None else weight[ids] * factor):
            raise UnsupportedModelError(f"{type(embed).__name__} computes more than an embedding and its embed_scale")
    return _unless_one(factor)


def _unless_one(factor: float | None) -> float | None:
    return None if factor is None or factor == 1 else float(factor)
