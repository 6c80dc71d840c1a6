"""Rows and columns of a linear layer: selected, scaled, replaced, in place."""

import torch
from torch import Tensor, nn

from wide.errors import UnsupportedModelError


def plain_linear(module: nn.Module, where: str) -> nn.Linear:
    """Return the module if it is an unquantised linear layer with its weight at hand.

    Raises:
        UnsupportedModelError: If it is quantised or wrapped.
    """
    if (
        isinstance(module, nn.Linear)
        and module.weight.is_floating_point()
        and tuple(module.weight.shape) == (module.out_features, module.in_features)
    ):
        return module
    raise UnsupportedModelError(
        f"{where} is a {type(module).__name__}, whose weight cannot be cut; load the model unquantised and without "
        "wrappers, materialise it, and quantise the result"
    )


def select_rows(linear: nn.Linear, rows: Tensor) -> None:
    """Keep these output rows, `[n]` int64, with their biases."""
    replace(linear, linear.weight.detach().index_select(0, rows.to(linear.weight.device)), _picked(linear, rows))


def select_columns(linear: nn.Linear, columns: Tensor) -> None:
    """Keep these input columns, `[n]` int64; the bias stays."""
    bias = None if linear.bias is None else linear.bias.detach()
    replace(linear, linear.weight.detach().index_select(1, columns.to(linear.weight.device)), bias)


def scale_rows(linear: nn.Linear, scale: Tensor) -> None:
    """Multiply every output, bias included, by `scale`, float32 `[out_features]`; a factor of 1 changes no bit."""
    with torch.no_grad():
        # Type promotion makes the product float32 at least; only the result is rounded.
        factor = scale.to(linear.weight.device)
        linear.weight.copy_(linear.weight * factor.unsqueeze(1))
        if linear.bias is not None:
            linear.bias.copy_(linear.bias * factor)


def scale_columns(linear: nn.Linear, scale: Tensor) -> None:
    """Multiply every input by `scale`, float32 `[in_features]`; a factor of 1 changes no bit."""
    with torch.no_grad():
        linear.weight.copy_(linear.weight * scale.to(linear.weight.device))


def silence(linear: nn.Linear) -> None:
    """Set weight and bias to zero, so that the output is zero."""
    with torch.no_grad():
        linear.weight.zero_()
        if linear.bias is not None:
            linear.bias.zero_()


def replace(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Put in another weight `[out, in]` and bias `[out]`, in the dtype and on the device of the old ones."""
    old = linear.weight
    linear.weight = nn.Parameter(weight.to(old.device, old.dtype).contiguous(), requires_grad=old.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(old.device, old.dtype).contiguous(), requires_grad=old.requires_grad)
    linear.out_features, linear.in_features = weight.shape


def _picked(linear: nn.Linear, rows: Tensor) -> Tensor | None:
    return None if linear.bias is None else linear.bias.detach().index_select(0, rows.to(linear.weight.device))
