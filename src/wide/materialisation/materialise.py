"""Make a static plan physical: what the gates multiply by zero is taken out of the weights."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from wide.data.progress import progress
from wide.errors import ConfigError, UnsupportedModelError
from wide.materialisation.checkpoint import (
    SlicedMixin,
    become_sliced,
    family_of,
    generated_classes,
    ordinary_classes,
    take_own_config,
)
from wide.materialisation.cut import check_cuttable, cut
from wide.materialisation.shape import ChannelsLeft, HeadsLeft, LayerShape, ModelShape
from wide.materialisation.stream import bases_around, check_lossless, norm_scales, rotate_embedding, rotate_layer
from wide.models.attach import TRAINED_ON, attachment, detach, trained_on
from wide.models.block_spec import BlockSpec, feed_forward, plain_linear, require_own_keys
from wide.models.discovery import discover
from wide.models.lora import merge_lora
from wide.models.pretrained import require_in_memory
from wide.plan import EMBEDDING_BASIS, GONE, Dense, Half, Kept, LayerPlan, Plan, Skipped, scale_name

ModelT = TypeVar("ModelT", bound=nn.Module)
How = Literal["sliced", "masked"]
# Deleting layers sets them anew, or they say nothing about what a layer computes.
_FREE = ("training", "layer_idx")


def materialise(model: ModelT, how: How = "sliced") -> ModelT:
    """Take what a static plan prunes out of a model for good, in place, and return the same object, detached.

    LoRA is merged first. The function computed stays the same up to rounding; scales other than 0 and 1 are folded
    into the columns of the output projection and the rows of up. The result saves with `save_pretrained`:

    - 'sliced': layers that are skipped whole are deleted; what is left of the others are smaller matrices. Where only
      whole layers go, the result is an ordinary checkpoint of the family. Otherwise it is of a generated class
      (`Sliced<Base>`), which transformers' Auto classes know after `import wide`.
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
    if isinstance(model, SlicedMixin):
        raise UnsupportedModelError("this model is sliced already; materialise its base under both plans at once")
    state = attachment(model)
    plan, specs = state.plan, state.specs
    _check_static(plan, how)
    require_in_memory(model, "cutting weights out")
    state.require_not_optimised()
    _check_structure(model, plan, specs, how)
    merge_lora(model)
    tensors = {name: tensor.detach() for name, tensor in state.static_parameters().items()}
    tensors |= {scale_name(gate.layer_index, gate.half_layer): gate.factors().detach() for gate in state.static_gates()}
    stages = trained_on(model)
    # What LoRA and the method made of the weights stays in them.
    state.lora, state.replaced = None, None
    detach(model)
    take_own_config(model)
    setattr(model.config, TRAINED_ON, stages)
    if how == "masked":
        _mask(plan, specs, tensors)
    else:
        _slice(model, plan, specs, tensors)
    return model


def _check_static(plan: Plan, how: How) -> None:
    for index, _, half in plan.halves():
        if not isinstance(half, Dense | Skipped | Kept):
            raise ConfigError(
                f"layer {index} of the plan is {type(half).__name__}: which tokens execute is decided anew in each "
                "forward, so nothing can be taken out. Save it with wide.save or wide.save_checkpoint (wide export "
                "without --how); wide.optimize makes it fast"
            )
    if how == "masked" and plan.stream is not None:
        raise UnsupportedModelError(
            "a residual stream that changes its basis cannot be written as zeros in the dense shapes; use how='sliced'"
        )
    if all(layer == GONE for layer in plan.layers):
        raise ConfigError("the plan skips every layer; a model needs at least one, so lower the sparsity")


def _check_structure(model: nn.Module, plan: Plan, specs: Sequence[BlockSpec], how: How) -> None:
    for spec in specs:
        for _, part in spec.sublayers():
            if getattr(part.post_norm, "bias", None) is not None:
                raise UnsupportedModelError(
                    f"layer {spec.index}: {type(part.post_norm).__name__} after a sublayer has a bias, which would "
                    "still be added where the sublayer gives nothing"
                )
    for spec, layer in zip(specs, plan.layers, strict=True):
        if isinstance(layer.attention, Kept | Skipped):
            plain_linear(spec.attention.output, spec.index)
        if isinstance(layer.ffn, Kept | Skipped):
            plain_linear(feed_forward(spec).up, spec.index)
            plain_linear(feed_forward(spec).down, spec.index)
    if how == "masked":
        return
    if any(isinstance(layer.attention, Kept | Skipped) for layer in plan.layers):
        require_own_keys(specs, "no head can be cut out. Use how='masked'")
    for spec, layer in zip(specs, plan.layers, strict=True):
        if plan.stream is not None:
            check_lossless(spec)
            norm_scales(spec)
        for name, half in layer.halves():
            if plan.stream is not None or isinstance(half, Kept):
                check_cuttable(spec, name)
    kept = _layers_left(plan)
    if len(kept) < len(specs):
        _check_deletable(model, len(specs), kept)
    if plan.stream is not None or any(layer not in (LayerPlan(), GONE) for layer in plan.layers):
        generated_classes(family_of(model), SlicedMixin)


def _mask(plan: Plan, specs: Sequence[BlockSpec], tensors: Mapping[str, Tensor]) -> None:
    for spec, layer in _each_layer(plan, specs):
        _fold(spec, layer, tensors)
        for name, part in spec.sublayers():
            if isinstance(getattr(layer, name), Skipped):
                for parameter in plain_linear(part.linears()[-1], spec.index).parameters():
                    parameter.detach().zero_()


def _slice(model: nn.Module, plan: Plan, specs: Sequence[BlockSpec], tensors: Mapping[str, Tensor]) -> None:
    for spec, layer in _each_layer(plan, specs):
        _fold(spec, layer, tensors)
        if plan.stream is not None:
            rotate_layer(spec, bases_around(tensors, spec.index, len(specs)), norm_scales(spec))
    if plan.stream is not None:
        rotate_embedding(model, tensors[EMBEDDING_BASIS])
        specs = discover(model)
    kept = _layers_left(plan)
    if len(kept) < len(specs):
        _delete_layers(model, specs, kept)
    layers, channels = [], {}
    for position, index in enumerate(kept):
        left, kept_channels = _shape_left(specs[index], plan.layers[index], tensors)
        layers.append(left)
        if kept_channels is not None:
            channels[position] = kept_channels
    shape = ModelShape(layers=tuple(layers), stream=None if plan.stream is None else plan.stream.kept)
    cut(model, [specs[index] for index in kept], shape, channels)
    if not shape.is_ordinary:
        become_sliced(model, shape)


def _each_layer(plan: Plan, specs: Sequence[BlockSpec]) -> Iterator[tuple[BlockSpec, LayerPlan]]:
    return progress(zip(specs, plan.layers, strict=True), title="materialise", total=len(specs), unit="layer")


def _layers_left(plan: Plan) -> list[int]:
    # A layer that adds nothing to a projected stream still changes its basis.
    return [index for index, layer in enumerate(plan.layers) if plan.stream is not None or layer != GONE]


def _fold(spec: BlockSpec, layer: LayerPlan, tensors: Mapping[str, Tensor]) -> None:
    """Fold a plan's scales into the weights, in place: the dense shapes compute the pruned function.

    Scales of heads go into the columns of the output projection, scales of channels into the rows of up; without a
    gate, where up feeds the activation, into the columns of down.
    """
    if isinstance(layer.attention, Kept):
        scale = _per_channel(tensors[scale_name(spec.index, "attention")], spec.attention.query_width)
        _multiply(plain_linear(spec.attention.output, spec.index).weight, scale)
    if isinstance(layer.ffn, Kept):
        ffn = feed_forward(spec)
        scale = _per_channel(tensors[scale_name(spec.index, "ffn")], ffn.width)
        if ffn.fused_gate:
            # The gate rows come first; they feed the activation.
            _scale_rows(plain_linear(ffn.up, spec.index), torch.cat([torch.ones_like(scale), scale]))
        elif ffn.gate is not None:
            _scale_rows(plain_linear(ffn.up, spec.index), scale)
        else:
            _multiply(plain_linear(ffn.down, spec.index).weight, scale)


def _per_channel(scale: Tensor, width: int) -> Tensor:
    """Return `scale` `[units]` repeated for the contiguous channels of each unit, `[width]`."""
    return scale.repeat_interleave(width // scale.numel())


def _scale_rows(linear: nn.Linear, scale: Tensor) -> None:
    """Multiply every output, bias included, by `scale`, float32 `[out_features]`; a factor of 1 changes no bit."""
    _multiply(linear.weight, scale.unsqueeze(1))
    if linear.bias is not None:
        _multiply(linear.bias, scale)


def _multiply(parameter: Tensor, scale: Tensor) -> None:
    with torch.no_grad():
        # Type promotion makes the product float32 at least; only the result is rounded.
        parameter.copy_(parameter * scale.to(parameter.device))


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
    left = torch.nonzero(_per_channel(tensors[scale_name(spec.index, name)], number)).flatten()
    return "dense" if left.numel() == number else left


def _delete_layers(model: Any, specs: Sequence[BlockSpec], kept: Sequence[int]) -> None:
    """Keep these decoder layers, ascending, at least one, and make the configuration say so."""
    parent, name = _list_of_layers(model, specs[0].layer)
    layers = nn.ModuleList(specs[index].layer for index in kept)
    module: Any
    for position, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position
    setattr(parent, name, layers.train(model.training))
    _trim_config(model.config.get_text_config(), len(specs), kept)


def _check_deletable(model: nn.Module, num_layers: int, kept: Sequence[int]) -> None:
    """Check that the model's class builds the layers that stay from a shortened configuration alone.

    Where something depends on the number of a layer in a way that no configuration can say, a checkpoint would load
    without an error and compute something else.
    """
    config_class, model_class = ordinary_classes(model)
    long: Any = copy.deepcopy(model.config)
    long.__class__ = config_class
    short = copy.deepcopy(long)
    _trim_config(short.get_text_config(), num_layers, kept)
    with torch.device("meta"):
        before, after = discover(model_class(long)), discover(model_class(short))
    for spec, index in zip(after, kept, strict=True):
        found, wanted = _settings(spec.layer), _settings(before[index].layer)
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise UnsupportedModelError(
                    f"layer {index}: {name} is {wanted.get(name)!r}, but as layer {spec.index} of a shorter "
                    f"{model_class.__name__} it would be {found.get(name)!r}, so the layers before it cannot be "
                    "deleted. Use how='masked'"
                )


def _list_of_layers(model: nn.Module, layer: nn.Module) -> tuple[nn.Module, str]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and any(entry is layer for entry in child):
                return parent, name
    raise UnsupportedModelError(f"the decoder layers of {type(model).__name__} lie in no list")


def _trim_config(config: Any, num_layers: int, kept: Sequence[int]) -> None:
    for key, value in list(vars(config).items()):
        if "layer" in key and isinstance(value, list | tuple) and len(value) == num_layers:
            setattr(config, key, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)


def _settings(layer: nn.Module) -> dict[str, Any]:
    """Return the shapes of a layer's tensors and the plain attributes of its modules, by name."""
    facts: dict[str, Any] = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    for path, module in layer.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and key not in _FREE and isinstance(value, bool | int | float | str | None):
                facts[f"{path}.{key}".lstrip(".")] = value
    return facts
