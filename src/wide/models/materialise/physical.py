"""Make a static plan physical: what the gates multiply by zero is taken out of the weights."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from wide.data.progress import progress
from wide.errors import ConfigError, NotAttachedError, UnsupportedModelError
from wide.models.attach import attachment, detach
from wide.models.block_spec import BlockSpec
from wide.models.lora import merge_lora
from wide.models.materialise.checkpoint import SlicedMixin, become_ordinary, become_sliced, family_of, sliced_classes
from wide.models.materialise.cut import cut
from wide.models.materialise.fold import (
    check_foldable,
    fold_attention,
    fold_ffn,
    per_channel,
    silence_attention,
    silence_ffn,
)
from wide.models.materialise.layers import check_deletable, delete_layers
from wide.models.materialise.narrow import check_attention, check_ffn
from wide.models.materialise.parts import LayerParts, layer_parts
from wide.models.materialise.shape import ChannelsLeft, HeadsLeft, LayerShape, ModelShape
from wide.models.materialise.stream import bases_of, check_plain, norm_scales, rotate_embedding, rotate_layer
from wide.plan import EMBEDDING_BASIS, Dense, Half, Kept, LayerPlan, Plan, Skipped, scale_name

ModelT = TypeVar("ModelT", bound=nn.Module)
How = Literal["sliced", "masked"]
_WHOLE = LayerPlan(attention=Dense(), ffn=Dense())
_GONE = LayerPlan(attention=Skipped(), ffn=Skipped())


def materialise(model: ModelT, how: How = "sliced") -> ModelT:
    """Take what a static plan prunes out of a model for good, in place, and return the same object, detached.

    LoRA is merged first. The function computed stays the same up to rounding; scales other than 0 and 1 are folded
    into the columns of the output projection and the rows of up. The result saves with `save_pretrained`:

    - 'sliced': layers that are skipped whole are deleted; what is left of the others are smaller matrices. Where only
      whole layers go, the result is an ordinary checkpoint of the family. Otherwise it is of a generated class
      (`Sliced<Base>`), which `wide.register_auto_classes()` makes known to transformers' Auto classes.
    - 'masked': all shapes stay, zeros stand for what was pruned. An ordinary checkpoint, which saves no work.

    Args:
        model: A model with a static plan attached (`wide.attach` or `wide.load`).
        how: 'sliced' or 'masked'.

    Raises:
        ConfigError: If `how` is neither, the plan is routed, or it skips every layer.
        NotAttachedError: If the model carries no plan or is optimised.
        UnsupportedModelError: If the structure cannot be cut, or a cut stream is to be masked. The model is then as
            it was, except that LoRA may be merged.
    """
    if how not in get_args(How):
        raise ConfigError(f"how must be one of {list(get_args(How))}, got {how!r}")
    state = attachment(model)
    if isinstance(model, SlicedMixin):
        raise UnsupportedModelError("this model is sliced already; materialise its base under both plans at once")
    plan, specs = state.plan, state.specs
    _check_static(plan, how)
    if state.fused:
        raise NotAttachedError("this model is optimised; call wide.deoptimize(model) first")
    parts = _check_structure(model, plan, specs, how)
    merge_lora(model)
    tensors = {name: tensor.detach() for name, tensor in state.static_parameters().items()}
    tensors |= {scale_name(gate.layer_index, gate.half_layer): gate.factors().detach() for gate in state.static_gates()}
    # What LoRA and the method made of the weights stays in them.
    state.lora, state.replaced = None, None
    detach(model)
    become_ordinary(model)
    if how == "masked":
        _mask(plan, specs, tensors)
    else:
        _slice(model, plan, specs, parts, tensors)
    return model


def _check_static(plan: Plan, how: How) -> None:
    for index, layer in enumerate(plan.layers):
        for half in (layer.attention, layer.ffn):
            if not isinstance(half, Dense | Skipped | Kept):
                raise ConfigError(
                    f"layer {index} of the plan is {type(half).__name__}: which tokens execute is decided anew in each "
                    "forward, so nothing can be taken out. Save it with wide.save or wide.save_checkpoint; "
                    "wide.optimize makes it fast"
                )
    if how == "masked" and plan.stream is not None:
        raise UnsupportedModelError(
            "a residual stream that changes its basis cannot be written as zeros in the dense shapes; use how='sliced'"
        )
    if all(layer == _GONE for layer in plan.layers):
        raise ConfigError("the plan skips every layer; a model needs at least one, so lower the sparsity")


def _check_structure(model: nn.Module, plan: Plan, specs: Sequence[BlockSpec], how: How) -> list[LayerParts]:
    parts = [layer_parts(spec) for spec in specs]
    for spec, layer in zip(specs, plan.layers, strict=True):
        check_foldable(spec, layer)
    if how == "masked":
        return parts
    for spec, part, layer in zip(specs, parts, plan.layers, strict=True):
        if plan.stream is not None:
            check_plain(spec, part)
            norm_scales(spec)
        if plan.stream is not None or isinstance(layer.attention, Kept):
            check_attention(spec)
        if plan.stream is not None or isinstance(layer.ffn, Kept):
            check_ffn(spec)
    kept = _layers_left(plan)
    if len(kept) < len(specs):
        check_deletable(model, len(specs), kept)
    if plan.stream is not None or any(layer not in (_WHOLE, _GONE) for layer in plan.layers):
        sliced_classes(family_of(model))
    return parts


def _mask(plan: Plan, specs: Sequence[BlockSpec], tensors: Mapping[str, Tensor]) -> None:
    for spec, layer in _each_layer(plan, specs):
        _fold(spec, layer, tensors)
        if isinstance(layer.attention, Skipped):
            silence_attention(spec)
        if isinstance(layer.ffn, Skipped):
            silence_ffn(spec)


def _slice(
    model: nn.Module,
    plan: Plan,
    specs: Sequence[BlockSpec],
    parts: Sequence[LayerParts],
    tensors: Mapping[str, Tensor],
) -> None:
    bases = None if plan.stream is None else bases_of(tensors, len(specs))
    for spec, layer in _each_layer(plan, specs):
        _fold(spec, layer, tensors)
        if bases is not None:
            rotate_layer(spec, parts[spec.index], bases[spec.index], norm_scales(spec))
    if plan.stream is not None:
        rotate_embedding(model, tensors[EMBEDDING_BASIS])
    kept = _layers_left(plan)
    if len(kept) < len(specs):
        delete_layers(model, specs, kept)
    layers, channels = [], {}
    for position, index in enumerate(kept):
        left, kept_channels = _shape_left(specs[index], plan.layers[index], tensors)
        layers.append(left)
        if kept_channels is not None:
            channels[position] = kept_channels
    shape = ModelShape(layers=tuple(layers), stream=None if plan.stream is None else plan.stream.kept)
    cut(model, [specs[index] for index in kept], [parts[index] for index in kept], shape, channels)
    if not shape.is_ordinary:
        become_sliced(model, shape)


def _each_layer(plan: Plan, specs: Sequence[BlockSpec]) -> Iterator[tuple[BlockSpec, LayerPlan]]:
    pairs = zip(specs, plan.layers, strict=True)
    return progress(pairs, title="materialise", total=len(specs), unit="layer")


def _layers_left(plan: Plan) -> list[int]:
    # A layer that adds nothing to a projected stream still changes its basis.
    return [index for index, layer in enumerate(plan.layers) if plan.stream is not None or layer != _GONE]


def _fold(spec: BlockSpec, layer: LayerPlan, tensors: Mapping[str, Tensor]) -> None:
    if isinstance(layer.attention, Kept):
        fold_attention(spec, tensors[scale_name(spec.index, "attention")])
    if isinstance(layer.ffn, Kept):
        fold_ffn(spec, tensors[scale_name(spec.index, "ffn")])


def _shape_left(spec: BlockSpec, layer: LayerPlan, tensors: Mapping[str, Tensor]) -> tuple[LayerShape, Tensor | None]:
    heads = _units_left(spec, layer.attention, "attention", spec.attention.num_query_heads, tensors)
    query_heads: HeadsLeft = tuple(heads.tolist()) if isinstance(heads, Tensor) else heads
    width = 0 if spec.ffn is None else spec.ffn.width
    left = _units_left(spec, layer.ffn, "ffn", width, tensors)
    channels: ChannelsLeft = left.numel() if isinstance(left, Tensor) else left
    return LayerShape(query_heads=query_heads, channels=channels), left if isinstance(left, Tensor) else None


def _units_left(
    spec: BlockSpec, half: Half, name: str, number: int, tensors: Mapping[str, Tensor]
) -> Tensor | Literal["dense"] | None:
    """Return the heads or channels whose scale is not 0, int64 ascending; 'dense' for all, None where skipped."""
    if isinstance(half, Skipped):
        return None
    if not isinstance(half, Kept):
        return "dense"
    left = torch.nonzero(per_channel(tensors[scale_name(spec.index, name)], number)).flatten()
    return "dense" if left.numel() == number else left
