"""Weights that FSDP2 shards over the processes of a run: read whole, written in shares, a layer gathered for a moment.

transformers shards while it reads (`load_pretrained(..., sharded=True)`); torch gathers each decoder layer before it
runs and frees it afterwards. Routers and LoRA, added later, are plain tensors and the same on all processes. Whatever
else touches base weights goes through here, and on all processes at once: reading a sharded weight whole, and so
attaching and saving, is a collective.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from wide.errors import UnsupportedModelError


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 shards the weights of a model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def is_first_process() -> bool:
    """Return whether this process is the one that writes: the first of its group, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def whole(weight: Tensor) -> Tensor:
    """Return a weight that may be sharded as a plain tensor; one that is not, itself."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def as_first_has_it(model: nn.Module, values: Tensor) -> Tensor:
    """Return numbers that decide which forwards of a sharded model are to come as the first process has them.

    Processes that round otherwise, on other GPUs, would decide otherwise, and wait for each other.
    """
    if not is_sharded(model):
        return values
    found = values.to(next(model.parameters()).device)
    dist.broadcast(found, src=0)
    return found.to(values.device)


@torch.no_grad()
def overwrite(parameter: nn.Parameter, value: Tensor) -> None:
    """Copy a whole tensor, the same on all processes, into a parameter that may be sharded."""
    if isinstance(parameter, DTensor):
        # Without a source nothing is sent: each process cuts its share out of its own copy.
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


@contextmanager
def gathered(layer: nn.Module) -> Iterator[None]:
    """Have the weights of a decoder layer whole inside the block, so that its parts can be called by themselves."""
    if isinstance(layer, FSDPModule):
        layer.unshard()
    try:
        yield
    finally:
        if isinstance(layer, FSDPModule):
            layer.reshard()


def reshard(model: nn.Module) -> None:
    """Put every parameter back into shares, those too that FSDP keeps whole after a forward (norm and head).

    Tied weights are one object again.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def require_unsharded(model: nn.Module, doing: str) -> None:
    """Raise UnsupportedModelError if a model is sharded; `doing` begins the message: what cannot be done with it."""
    if is_sharded(model):
        raise UnsupportedModelError(f"{doing} needs whole weights; load the model unsharded (--parallel replicate)")
