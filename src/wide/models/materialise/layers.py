"""Delete whole decoder layers: what is left is an ordinary model of its family with fewer layers."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from wide.errors import UnsupportedModelError
from wide.models.block_spec import BlockSpec
from wide.models.discovery import discover
from wide.models.materialise.checkpoint import ordinary_classes

# Deleting sets them anew, or they say nothing about what a layer computes.
_FREE = ("training", "layer_idx")


def delete_layers(model: nn.Module, specs: Sequence[BlockSpec], kept: Sequence[int]) -> None:
    """Keep these decoder layers and make the configuration say so.

    Args:
        model: A Hugging Face causal LM.
        specs: Its decoder layers.
        kept: Layers that stay, ascending; at least one.
    """
    parent, name = _list_of_layers(model, specs[0].layer)
    layers = nn.ModuleList(specs[index].layer for index in kept)
    module: Any
    for position, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position
    setattr(parent, name, layers.train(model.training))
    config: Any = model.config
    _trim_config(config.get_text_config(), len(specs), kept)


def check_deletable(model: nn.Module, num_layers: int, kept: Sequence[int]) -> None:
    """Check that the model's class builds the layers that stay from a shortened configuration alone.

    Where something depends on the number of a layer in a way that no configuration can say, a checkpoint would load
    without an error and compute something else.

    Args:
        model: A Hugging Face causal LM; nothing is deleted yet.
        num_layers: Its decoder layers.
        kept: Layers that would stay, ascending.

    Raises:
        UnsupportedModelError: With the first shape or setting that differs.
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
