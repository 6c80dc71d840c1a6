"""GEMM-MN in plain PyTorch: one product per group over the rows that execute it."""

from typing import Any

import torch
from torch.nn.functional import gelu, linear, relu, silu

from wide.kernels.int8 import widened
from wide.kernels.reordering import Reordering

ACTIVATIONS = ("none", "silu", "gelu_tanh", "relu2")


def activate(values: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the activation of float32 values."""
    if activation == "silu":
        return silu(values)
    if activation == "gelu_tanh":
        return gelu(values, approximate="tanh")
    return relu(values).square() if activation == "relu2" else values


def gemm_mn_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Reordering,
    *,
    up_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str = "none",
    mask: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    **int8: Any,
) -> torch.Tensor:
    """Compute the channels of executing (row, group) pairs, group by group; arguments as in `gemm_mn`.

    Source: paper, section 4.2 (N-axis operators).
    """
    if int8:
        up_weight = None if up_weight is None or up_scale is None else up_weight * up_scale[:, None]
        x, weight, dtype = widened(x, weight, **int8)
    else:
        dtype = x.dtype
    num_rows, width = x.shape[0], weight.shape[0]
    num_groups = order.counts.numel()
    size = width // num_groups
    out = x.new_empty(num_rows, width, dtype=dtype)
    if mask is not None:
        out.zero_()
    for group, count in enumerate(order.counts.tolist()):
        rows = order.index[group, :count].long()
        channels = slice(group * size, (group + 1) * size)
        values = _product(x[rows], weight, bias, channels)
        values = activate(values, activation)
        if up_weight is not None:
            values = values * _product(x[rows], up_weight, up_bias, channels)
        out[rows, channels] = values.to(dtype)
    return out


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, channels: slice) -> torch.Tensor:
    return linear(x.float(), weight[channels].float(), None if bias is None else bias[channels].float())
