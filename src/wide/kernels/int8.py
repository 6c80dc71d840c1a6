"""Int8 weights and rows: how weights are made, what both stand for, and what products of them are given."""

from typing import Any

import torch

from wide.errors import ShapeError
from wide.kernels.dispatch import Backends
from wide.kernels.registration import check_tensor

LARGEST = 127
LEAST = torch.finfo(torch.float32).tiny
"""Of a scale, so that one over it is a number."""


def quantise_int8(
    weight: torch.Tensor, known: torch.Tensor | None = None, rotation: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 weights [N, K] and float32 scales [N]; their product is off by half a scale at most.

    `known` scales, [N] or [1], are taken if these weights may be their int8 values; blocks of K are multiplied by a
    `rotation` first (`hadamard`). A row of zeros has a scale above zero. A row that holds NaN or infinity has a scale
    that is not finite.
    """
    values = rotated(weight.detach().float(), rotation)
    if known is not None and known.numel() in (1, len(values)):
        scale = known.to(values).expand(len(values)).contiguous()
        found = (values / scale[:, None]).round_().clamp_(-128, LARGEST)
        rounding = max(torch.finfo(each.dtype).eps for each in (weight, known))
        if torch.allclose(found * scale[:, None], values, rtol=rounding, atol=0):
            return found.to(torch.int8), scale
    scale = (values.abs().amax(1) / LARGEST).clamp_min(LEAST)
    return (values / scale[:, None]).round_().to(torch.int8), scale


def hadamard(channels: int, like: torch.Tensor) -> torch.Tensor | None:
    """Return what rotates blocks of channels, [64, 64] or [16, 16] in the dtype of `like`; None if none fits.

    It is a Hadamard matrix over the root of its size: symmetric, its own inverse, and exact in half precision. It
    spreads a value over its block, so that one that stands out raises the scale of its row less.
    """
    size = next((size for size in (64, 16) if channels % size == 0), None)
    if size is None:
        return None
    signs = like.new_ones(1, 1, dtype=torch.float32)
    while len(signs) < size:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    return (signs / size**0.5).to(like.dtype)


def rotated(x: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
    """Return [M, K] with each block of channels multiplied by a matrix [b, b]; b divides K. None = as it is."""
    if rotation is None:
        return x
    return (x.unflatten(1, (-1, len(rotation))) @ rotation.to(x.dtype)).flatten(1)


def turned(
    backends: Backends, backend: str, x: torch.Tensor, rotation: torch.Tensor | None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return rows and options for a backend: it rotates rows as it reads them, or gets rotated ones."""
    if rotation is None:
        return x, {}
    check_tensor(backends.operator, "rotation", rotation, rotation.dtype, (len(rotation),) * 2)
    if backends.takes(backend, "rotation"):
        return x, {"rotation": rotation}
    return rotated(x, rotation), {}


def widened(
    x: torch.Tensor, weight: torch.Tensor, *, x_scale: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return int8 rows and weights as what they stand for, in float32, and the dtype of their product."""
    return x * x_scale[:, None], weight * scale[:, None], dtype


def int8_options(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor | None,
    scale: torch.Tensor | None,
    dtype: torch.dtype | None,
    *,
    up_weight: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return what a product of int8 rows and weights hands to backends, nothing for other products.

    Raises ShapeError if int8 rows come without scales or the dtype of their product, or others with them.
    """
    is_int8 = x.dtype == torch.int8
    given = {"x_scale": x_scale, "scale": scale, "dtype": dtype}
    if any((value is not None) != is_int8 for value in given.values()) or (up_scale is not None) != (
        is_int8 and up_weight is not None
    ):
        raise ShapeError(
            f"{name}: int8 rows and weights go with their scales and a dtype, got rows of {x.dtype} with "
            f"{[key for key, value in (given | {'up_scale': up_scale}).items() if value is not None]}"
        )
    if not is_int8:
        return {}
    check_tensor(name, "scale of rows", x_scale, torch.float32, x.shape[:1])
    for factor in (scale, up_scale):
        check_tensor(name, "scale of weights", factor, torch.float32, weight.shape[:1])
    return given if up_scale is None else given | {"up_scale": up_scale}
