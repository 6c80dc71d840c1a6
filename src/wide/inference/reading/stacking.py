"""Projections that read the same input, laid one below the other in one buffer that their modules then view."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def unstack_linears(linears: Sequence[nn.Linear]) -> None:
    """Give every parameter memory of its own again, so that saving and sharding see independent tensors."""
    for linear in linears:
        for parameter in (linear.weight, linear.bias):
            if parameter is not None and parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.data.clone()


def stack(parameters: Sequence[Tensor]) -> Tensor:
    """Return weights [sum of N, ...] one below the other; the parameters become views of them.

    What is stacked already stays where it is, so memory holds the weights once.
    """
    first, sizes = parameters[0].detach(), [parameter.shape[0] for parameter in parameters]
    if len(parameters) == 1:
        return first
    if _lie_together(parameters):
        return first.as_strided((sum(sizes), *first.shape[1:]), first.stride(), first.storage_offset())
    both = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, piece in zip(parameters, both.split(sizes), strict=True):
        parameter.data = piece
    return both


def _lie_together(parameters: Sequence[Tensor]) -> bool:
    """Return whether each parameter follows the one before it in the same storage."""
    place = parameters[0].data_ptr()
    storage = parameters[0].untyped_storage().data_ptr()
    for parameter in parameters:
        if not parameter.is_contiguous() or parameter.untyped_storage().data_ptr() != storage:
            return False
        if parameter.data_ptr() != place:
            return False
        place += parameter.nbytes
    return True
