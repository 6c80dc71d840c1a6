"""What a model looks like while it is trained, and the way back: who is trainable, who samples, who recomputes.

Also a rehearsal of what runs until it reads text.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from wide.data.progress import without_bars
from wide.errors import ConfigError
from wide.models.attach import attachment


def trainable_parameters(model: nn.Module, *, routers: bool) -> dict[str, nn.Parameter]:
    """Return the LoRA matrices of an attached model, if any, and its routers' parameters, if wanted, by name."""
    state = attachment(model)
    wanted = set() if state.lora is None else {id(parameter) for parameter in state.lora.parameters()}
    if routers:
        wanted |= {id(parameter) for router in state.routers() for parameter in router.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in wanted}


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Leave the caller's random state, on the CPU and on this device, as it was."""
    # Without a list, torch saves the state of every GPU of the host, and warns about it.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextmanager
def training_mode(model: nn.Module, *, routers: bool, gradient_checkpointing: bool) -> Iterator[None]:
    """Freeze all but routers and LoRA, and put only these into training mode; everything is put back afterwards.

    The base stays in evaluation mode, so that dropout it may have is off: it is frozen and has nothing to regularise.

    Args:
        model: An attached model.
        routers: Whether the routers are trained; otherwise they decide as at inference.
        gradient_checkpointing: Whether layers are recomputed in the backward, never in the reentrant form.

    Raises:
        ConfigError: If reentrant checkpointing is on already, or the model cannot be checkpointed.
    """
    flags = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    chosen = {id(parameter) for parameter in trainable_parameters(model, routers=routers).values()}
    model.eval()
    for name, module in model.named_modules():
        if name.endswith("lora_dropout"):
            module.train()
    if routers:
        for router in attachment(model).routers():
            router.train()
    for parameter, _ in gradients:
        parameter.requires_grad_(id(parameter) in chosen)
    try:
        with recomputation(model, enable=gradient_checkpointing):
            yield
    finally:
        for module, training in flags:
            module.training = training
        for parameter, requires_grad in gradients:
            parameter.requires_grad_(requires_grad)


def forward_precision(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which LoRA multiplies in bfloat16 beside a bfloat16 base on a GPU; its matrices stay float32.

    In float32, the two small products of LoRA would cost more than the base layer. Routers compute in float32 anyway.

    Args:
        model: An attached model, with or without LoRA.
    """
    weight = next(model.parameters())
    if attachment(model).lora is None or weight.dtype != torch.bfloat16 or weight.device.type != "cuda":
        return nullcontext()
    return torch.autocast(weight.device.type, dtype=torch.bfloat16)


@contextmanager
def recomputation(model: nn.Module, *, enable: bool) -> Iterator[None]:
    """Recompute decoder layers in the backward, never in the reentrant form; everything is put back afterwards.

    Args:
        model: An attached model.
        enable: Whether to; where it is on already it stays on.

    Raises:
        ConfigError: As for `training_mode`.
    """
    layers = [spec.layer for spec in attachment(model).specs]
    was_on = any(getattr(layer, "gradient_checkpointing", False) for layer in layers)
    if was_on and not all(_is_not_reentrant(layer) for layer in layers):
        raise ConfigError(
            "gradient checkpointing is on in its reentrant form, which silently loses the sparsity gradient; call "
            "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
        )
    if not enable and not was_on:
        yield
        return
    typed: Any = model
    if not was_on:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ConfigError(f"{type(model).__name__} has no gradient checkpointing; set gradient_checkpointing=false")
        typed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # A layer recomputes only while it is itself in training mode; its children, with their dropout, stay in evaluation.
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode
        if not was_on:
            typed.gradient_checkpointing_disable()


def _is_not_reentrant(layer: nn.Module) -> bool:
    function = getattr(layer, "_gradient_checkpointing_func", None)
    return isinstance(function, partial) and not function.keywords.get("use_reentrant", True)


class _TextIsReadError(Exception):
    """Raised in the place of the first embedding."""


@contextmanager
def rehearsal(model: Any) -> Iterator[None]:
    """Leave the block quietly where the model would embed its first tokens.

    What raises before that does so as ever; layers may be probed on numbers of their own. Whatever runs inside must
    take back on an exception what it changed. A compiled model cannot be rehearsed. No progress bar is shown: it would
    never move.

    Args:
        model: The Hugging Face model that the block works on.
    """
    handle = model.get_input_embeddings().register_forward_pre_hook(_stop)
    try:
        with without_bars():
            yield
    except _TextIsReadError:
        return
    finally:
        handle.remove()


def _stop(_module: object, _args: object) -> NoReturn:
    raise _TextIsReadError
