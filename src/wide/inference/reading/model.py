"""A Hugging Face causal LM as the engine's weights, and the proof that the engine computes the same."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wide.errors import UnsupportedModelError
from wide.inference.operators.products import LinearWeights
from wide.inference.reading.pruned import padded_basis, subspaces
from wide.inference.reading.quantising import Weights
from wide.inference.reading.weights import LayerWeights, Norm, read_layer, read_norm, require_known, require_plain
from wide.models.attach import attachment
from wide.models.block_spec import BlockSpec
from wide.models.discovery import scale_and_cap
from wide.models.having import having
from wide.models.pretrained import peft_adapters
from wide.plan import EMBEDDING_BASIS, Following, Plan, Routed, Skipped

# Kinds of positions whose table does not depend on the length of the sequence at hand.
_ROPE_TYPES = ("default", "llama3", "linear", "yarn")
_LAYER_KINDS = (None, "full_attention", "sliding_attention")
_INPUT_MULTIPLIER = "embedding_multiplier"
_PROBE_TOKENS = 8
# Longer contexts run masked: their table of positions alone would take hundreds of megabytes.
_MAX_LENGTH = 131072
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """A causal LM as the engine computes it.

    Args:
        embedding: [V, D].
        head: The output projection, N = V.
        norm: Before the head.
        embedding_scale: Factor of embedded tokens, or None.
        input_scale: Factor of what enters the first layer, embeddings of the caller's own included, or None.
        entry: What projects the stream before the first layer, [D', D], or None.
        logit_scale: Factor of the logits, or None.
        logit_cap: Bound of the logits, or None.
        max_length: Largest position plus one.
    """

    specs: tuple[BlockSpec, ...]
    layers: tuple[LayerWeights, ...]
    embedding: Tensor
    head: LinearWeights
    norm: Norm
    embedding_scale: float | None
    input_scale: float | None
    entry: Tensor | None
    logit_scale: float | None
    logit_cap: float | None
    max_length: int
    taken: Weights


def read_model(model: nn.Module, max_length: int | None = None, weights: str = "model") -> ModelWeights:
    """Return the weights of a model, in one of `WEIGHTS`; without `max_length` with as many positions as it has.

    Raises UnsupportedModelError if a part is missing, unknown or not at hand, or positions depend on the sequence's
    length. Projections then are as they were.
    """
    whole: Any = model
    if any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules()):
        raise UnsupportedModelError(
            "this model is sharded by FSDP, and the engine reads whole weights; optimise the model before sharding, or "
            "load the checkpoint without FSDP"
        )
    state = attachment(model)
    plan, specs = state.plan, state.specs
    tensors = {} if plan.stream is None else state.static_parameters()
    require_readable(plan, is_replaced=state.replaced is not None, weights=weights)
    if peft_adapters(model):
        raise UnsupportedModelError("the engine reads plain weights; merge LoRA first: wide.merge_lora(model)")
    base = whole.base_model
    for name in ("norm", "rotary_emb"):
        if getattr(base, name, None) is None:
            raise UnsupportedModelError(f"{type(base).__name__} has no {name}; the engine runs Llama-like models")
    if len({(spec.attention.num_kv_heads, spec.attention.head_dim) for spec in specs}) > 1:
        raise UnsupportedModelError("the layers' keys differ in shape, and the engine's cache holds one shape")
    embed, head, config = whole.get_input_embeddings(), whole.get_output_embeddings(), base.config
    lists = [part for part in base.children() if specs[0].layer in part.children()]
    require_known(base, (embed, base.norm, *lists), type(base).__name__, _INPUT_MULTIPLIER)
    embedding = embed.weight.detach()
    scale, cap = scale_and_cap(whole.config)
    if max_length is None:
        max_length = _longest(config)
    norm = read_norm(base.norm, "last norm")
    assert norm is not None
    angles = _angles(base.rotary_emb, embedding, max_length, [_kind(config, spec.index) for spec in specs])
    taken = Weights(weights, embed.weight, specs)
    try:
        devices = sorted({str(parameter.device) for parameter in model.parameters()})
        if len(devices) > 1:
            raise UnsupportedModelError(f"the model's weights lie on {len(devices)} devices, {devices}, not on one")
        owned = [part.weight for spec in specs for part in (*spec.attention.linears(), *require_plain(spec).linears())]
        if len({id(weight) for weight in owned}) < len(owned):
            raise UnsupportedModelError(
                "layers share the weight of a projection, and the engine takes each layer's own; give each a copy "
                "(linear.weight = nn.Parameter(linear.weight.detach().clone())), or run the model masked"
            )
        spaces = [(None, None) if plan.stream is None else subspaces(spec, tensors, len(specs)) for spec in specs]
        layers = tuple(map(read_layer, specs, angles, [taken] * len(specs), plan.layers, spaces))
        last = LinearWeights(head.weight.detach(), None if head.bias is None else head.bias.detach())
        if weights != "model" and type(head) is nn.Linear:
            # A token reads as much of it as of five layers half of which is skipped, and perplexity stays.
            last = taken.take([head], "output head", rounds=False)
        if taken.quantised:
            # Others are to have the memory that the model's own weights took.
            torch.cuda.empty_cache()
        return ModelWeights(
            specs=specs,
            layers=layers,
            embedding=embedding,
            head=last,
            norm=norm,
            embedding_scale=_embedding_scale(embed),
            input_scale=_unless_one(getattr(base, _INPUT_MULTIPLIER, None)),
            entry=None if plan.stream is None else padded_basis(tensors[EMBEDDING_BASIS]).T.to(embedding),
            logit_scale=_unless_one(scale),
            logit_cap=cap,
            max_length=max_length,
            taken=taken,
        )
    except BaseException:
        taken.give_back(drops=True)
        raise


def require_readable(plan: Plan, *, is_replaced: bool, weights: str) -> None:
    """Refuse plans of which the engine knows a part only.

    Raises UnsupportedModelError if a plan with routers also prunes for every token or replaces base weights, one
    without is to run in int8, a half follows another or is left out beside a projected stream, or a router is not a
    bottleneck over its own sublayer's stream, evicts keys and values, or protects first tokens.
    """
    if plan.is_routed and (plan.is_static or is_replaced):
        raise UnsupportedModelError(
            "this plan has routers and also prunes the same for every token; the engine runs the one or the other, so "
            "run the model as it is, masked"
        )
    if (plan.is_static or is_replaced) and weights != "model":
        raise UnsupportedModelError(
            f"weights={weights!r} is for routers, and this plan prunes the same for every token; leave it out"
        )
    halves = [half for *_, half in plan.halves()]
    routed = [half for half in halves if isinstance(half, Routed)]
    forms = sorted({half.form for half in routed} - {"bottleneck"})
    what = [
        "an attention that evicts keys and values" if any(half.evicts for half in routed) else None,
        "first tokens that always execute" if any(half.first_tokens for half in routed) else None,
        f"routers of the form {forms[0]!r}" if forms else None,
        "an FFN that follows the attention's router" if any(isinstance(half, Following) for half in halves) else None,
        "routers that read the layer's input" if any(half.router_input == "layer_input" for half in routed) else None,
        "sublayers left out of a projected stream"
        if plan.stream is not None and any(isinstance(half, Skipped) for half in halves)
        else None,
    ]
    found = next((reason for reason in what if reason is not None), None)
    if found is not None:
        raise UnsupportedModelError(
            f"this plan has {found}; the engine knows a bottleneck router for each half and static plans, so run the "
            "model as it is, masked"
        )


def require_same_outputs(model: nn.Module, runs: Callable[[Tensor], Tensor], max_length: int) -> None:
    """Compare logits of a few tokens with an attached model's own, dense ones where it has routers.

    Raises UnsupportedModelError if they differ by more than rounding: the model has a part that was overlooked.
    """
    whole: Any = model
    weight = whole.get_input_embeddings().weight
    if weight.dtype not in _TOLERANCE:
        raise UnsupportedModelError(f"the model is in {weight.dtype}; the engine takes {sorted(map(str, _TOLERANCE))}")
    ids = torch.randint(
        0, weight.shape[0], (1, min(_PROBE_TOKENS, max_length)), generator=torch.Generator().manual_seed(0)
    )
    ids = ids.to(weight.device)
    state = attachment(model)
    with torch.no_grad(), having(state.control, enabled=not state.plan.is_routed):
        wanted = whole(ids, use_cache=False).logits.float()
    error = ((runs(ids).float() - wanted).norm() / wanted.norm()).item()
    if not error <= _TOLERANCE[weight.dtype]:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes something that the engine does not know: logits differ by {error:.1%}"
        )


def _longest(config: Any) -> int:
    """Return for how many tokens a model has positions, as far as the engine goes."""
    length = min(int(getattr(config, "max_position_embeddings", None) or _MAX_LENGTH), _MAX_LENGTH)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("llama_4_scaling_beta"):
        # Beyond, queries grow with their position.
        length = min(length, int(rope["original_max_position_embeddings"]))
    return length


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
