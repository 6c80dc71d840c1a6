"""Give a model the shape that is left of it: the one path from a dense structure to a sliced one.

Materialising runs it on real weights with the heads and channels that a plan keeps; loading a checkpoint runs it on
empty modules, whose values come from the file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wide.errors import AdapterError
from wide.models.block_spec import BlockSpec
from wide.models.discovery import discover
from wide.models.materialise.absent import counting_layers
from wide.models.materialise.narrow import (
    leave_out_attention,
    leave_out_ffn,
    narrow_attention,
    narrow_ffn,
)
from wide.models.materialise.parts import LayerParts, layer_parts
from wide.models.materialise.shape import LayerShape, ModelShape
from wide.models.materialise.stream import identity_bases, rotate_embedding, rotate_layer


def cut(
    model: nn.Module,
    specs: Sequence[BlockSpec],
    parts: Sequence[LayerParts],
    shape: ModelShape,
    channels: Mapping[int, Tensor],
) -> None:
    """Cut every layer's heads and channels to what is left, in place; the residual stream is not touched.

    Args:
        model: A Hugging Face causal LM.
        specs: Its decoder layers.
        parts: The attribute names of each layer's parts.
        shape: What is left of each layer.
        channels: Intermediate channels that are left, int64, by layer; the first ones where a layer is not named.

    Raises:
        UnsupportedModelError: If the structure does not allow it.
    """
    config: Any = model.config
    counting = counting_layers(getattr(config.get_text_config(), "layer_types", None))
    for position, (spec, part, left) in enumerate(zip(specs, parts, shape.layers, strict=True)):
        _cut_attention(spec, part, left, counts_tokens=position in counting)
        _cut_ffn(spec, part, left, channels.get(position))


def cut_empty(model: nn.Module, shape: ModelShape) -> None:
    """Give a dense model of a family the shape of a checkpoint, in place; its values mean nothing afterwards.

    Raises:
        AdapterError: If the shape belongs to another model.
    """
    specs = discover(model)
    if len(shape.layers) != len(specs):
        raise AdapterError(f"the checkpoint's shape has {len(shape.layers)} layers, its configuration {len(specs)}")
    parts = [layer_parts(spec) for spec in specs]
    for spec, left in zip(specs, shape.layers, strict=True):
        _check_range(spec, left)
    if shape.stream is not None:
        width = specs[0].hidden_size
        device = next(specs[0].layer.parameters()).device
        bases, first = identity_bases(len(specs), width, shape.stream, device)
        rotate_embedding(model, first)
        for spec, part, around in zip(specs, parts, bases, strict=True):
            rotate_layer(spec, part, around, None)
    cut(model, specs, parts, shape, {})


def _cut_attention(spec: BlockSpec, parts: LayerParts, left: LayerShape, *, counts_tokens: bool) -> None:
    if left.query_heads == "dense":
        return
    if left.query_heads:
        narrow_attention(spec, left.query_heads)
        return
    leave_out_attention(
        spec,
        parts,
        counts_tokens=counts_tokens,
        ffn_reads_norm=parts.shares_norm and left.channels not in (None, 0),
        keep_bias=left.query_heads is not None,
    )


def _cut_ffn(spec: BlockSpec, parts: LayerParts, left: LayerShape, channels: Tensor | None) -> None:
    if left.channels == "dense":
        return
    if left.channels:
        kept = torch.arange(left.channels) if channels is None else channels
        narrow_ffn(spec, kept.to(next(spec.layer.parameters()).device))
        return
    leave_out_ffn(
        spec,
        parts,
        attention_reads_norm=parts.shares_norm and left.query_heads not in (None, ()),
        keep_bias=left.channels is not None,
    )


def _check_range(spec: BlockSpec, left: LayerShape) -> None:
    heads = left.query_heads if isinstance(left.query_heads, tuple) else ()
    channels = left.channels if isinstance(left.channels, int) else 0
    width = 0 if spec.ffn is None else spec.ffn.width
    if any(head >= spec.attention.num_query_heads for head in heads) or channels > width:
        raise AdapterError(
            f"layer {spec.index} of the checkpoint's shape has query heads {heads} and {channels} channels; its "
            f"configuration has {spec.attention.num_query_heads} heads and {width} channels"
        )
