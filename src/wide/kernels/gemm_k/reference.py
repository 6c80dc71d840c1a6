"""GEMM-K in plain PyTorch: every group adds its product to the rows that execute it."""

import torch

from wide.kernels.reordering import PatternReordering


def gemm_k_reference(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y[m] = sum over the groups g that row m executes of h[m, channels of g] W[:, channels of g]^T + bias.

    Arguments as in `gemm_k`.

    Source: paper, section 4.2 (K-axis operators).
    """
    num_rows, num_groups = order.index.shape[1], weight.shape[1] // group_size
    out = torch.zeros(num_rows, weight.shape[0], dtype=torch.float32, device=h.device)
    for block, count in enumerate(order.counts.tolist()):
        first = block * order.groups_per_block
        for group in range(first, min(first + order.groups_per_block, num_groups)):
            executes = (order.patterns[block, :count] >> (group - first)) & 1 != 0
            rows = order.index[block, :count][executes].long()
            channels = slice(group * group_size, (group + 1) * group_size)
            out[rows] += h[rows, channels].float() @ weight[:, channels].float().t()
    if bias is not None:
        out += bias.float()
    return out.to(h.dtype)
