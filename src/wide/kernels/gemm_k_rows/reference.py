"""GEMM-K over rows in one order, in plain PyTorch."""

import torch

from wide.kernels.reordering import RowReordering


def gemm_k_rows_reference(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: RowReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y[m] = sum over the groups g that row m executes of h[m, channels of g] W[:, channels of g]^T + bias.

    Arguments as in `gemm_k_rows`.

    Source: paper, section 4.2 (K-axis operators).
    """
    num_groups = weight.shape[1] // group_size
    out = torch.zeros(h.shape[0], weight.shape[0], dtype=torch.float32, device=h.device)
    for group in range(num_groups):
        rows = order.index[order.words[group // 32] >> (group % 32) & 1 != 0].long()
        channels = slice(group * group_size, (group + 1) * group_size)
        out[rows] += h[rows, channels].float() @ weight[:, channels].float().t()
    if bias is not None:
        out += bias.float()
    return out.to(h.dtype)
