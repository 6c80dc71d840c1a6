"""GEMM-K in plain PyTorch: every group adds its product to the rows that execute it."""

from collections.abc import Iterator
from typing import Any

import torch

from wide.kernels.int8 import widened
from wide.kernels.reordering import PatternReordering, RowReordering


def gemm_k_reference(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering | RowReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
    **int8: Any,
) -> torch.Tensor:
    """Return y[m] = sum over the groups g that row m executes of h[m, channels of g] W[:, channels of g]^T + bias.

    Arguments as in `gemm_k` and `gemm_k_rows`.

    Source: paper, section 4.2 (K-axis operators).
    """
    h, weight, dtype = widened(h, weight, **int8) if int8 else (h, weight, h.dtype)
    out = torch.zeros(h.shape[0], weight.shape[0], dtype=torch.float32, device=h.device)
    for group, rows in enumerate(_executing(order, weight.shape[1] // group_size)):
        channels = slice(group * group_size, (group + 1) * group_size)
        out[rows] += h[rows, channels].float() @ weight[:, channels].float().t()
    if bias is not None:
        out += bias.float()
    return out.to(dtype)


def _executing(order: PatternReordering | RowReordering, num_groups: int) -> Iterator[torch.Tensor]:
    """Yield the rows that execute each group."""
    for group in range(num_groups):
        if isinstance(order, RowReordering):
            yield order.index[order.words[group // 32] >> (group % 32) & 1 != 0].long()
        else:
            block, bit = divmod(group, order.groups_per_block)
            count = int(order.counts[block])
            executes = (order.patterns[block, :count] >> bit) & 1 != 0
            yield order.index[block, :count][executes].long()
