"""Int8 weights in plain PyTorch: how they are made, and what they stand for."""

import torch

_LARGEST = 127


def quantise_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 weights [N, K] and float32 scales [N]; their product is off by half a scale at most.

    A row of zeros has a scale above zero. A row that holds NaN or infinity has a scale that is not finite.
    """
    values = weight.detach().float()
    scale = (values.abs().amax(1) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (values / scale[:, None]).round_().to(torch.int8), scale


def expand_int8_reference(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return weight times scale; arguments as in `expand_int8`."""
    return (weight * scale[:, None]).to(dtype)


def linear_int8_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply in float32; arguments as in `linear_int8`."""
    product = x.float() @ weight.float().t() * scale
    return (product if bias is None else product + bias.float()).to(x.dtype)
