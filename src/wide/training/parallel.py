"""Data parallelism under torchrun: each process has its share of a batch, and the few trainable parameters are summed.

The base is whole on every process, or sharded by FSDP2 (`wide.models.sharding`), which gathers its layers by itself:
what is trained lies beside it, the same everywhere, so that nothing here depends on which of the two it is.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class DataParallel:
    """One process of a data-parallel run, of this rank, from 0; a run of one process needs no process group.

    Collectives run on `device`. Under torchrun use `from_environment`.
    """

    def __init__(self, *, rank: int = 0, world: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self.world = world
        self.device = torch.device(device)

    @classmethod
    def from_environment(cls, device: torch.device) -> "DataParallel":
        """Return the process that torchrun's variables (RANK, WORLD_SIZE) describe and join its group.

        With the model on CUDA it speaks NCCL, on the CPU gloo.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls(device=device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            # With a device, NCCL binds to it at once instead of guessing it at the first collective. Flags go through
            # gloo on the CPU, so that asking all processes never waits for a GPU.
            on_gpu = device.type == "cuda"
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
        return cls(rank=dist.get_rank(), world=dist.get_world_size(), device=device)

    @property
    def is_first(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes, outside the graph."""
        if self.world == 1:
            return tensor.detach()
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def broadcast(self, tensors: Iterable[Tensor], *, source: int = 0) -> None:
        """Overwrite tensors with those of one process, the first unless told otherwise."""
        if self.world == 1:
            return
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=source)

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients over all processes in one collective."""
        if self.world == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.world
        for gradient, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))

    def any(self, flag: bool) -> bool:
        """Return whether any process raises the flag."""
        if self.world == 1:
            return flag
        has_gloo = "gloo" in dist.get_backend_config()
        return bool(self.sum(torch.tensor(float(flag), device="cpu" if has_gloo else self.device)) > 0)

    def agree(self, value: T) -> T:
        """Return what the first process has, of which the others may have more or less."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return what each process has, on all of them."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all processes."""
        self.any(False)
