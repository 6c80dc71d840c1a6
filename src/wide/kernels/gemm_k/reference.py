"""GEMM-K in plain PyTorch: every group adds its product to the rows that execute it."""

import torch

from wide.kernels.reordering import PatternReordering, Reordering


def gemm_k_reference(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None = None,
    packed: Reordering | None = None,
    mask: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Return y[m] = sum over the groups g that row m executes of h[m, channels of g] W[:, channels of g]^T + bias.

    Args:
        h: [M, K], skipped channels unspecified; or, with `packed`, [M * N_G, G].
        weight: [N, K].
        order: Rows by pattern over super-blocks of groups.
        group_size: Channels of a group, G.
        bias: [N]; added to every row.
        packed: The reordering (with rank) by which `h` is packed; None means `h` is [M, K].
        mask: bool [M, N_G]; read by the dense backend only.
        out_dtype: Of the result; None means that of `h`.
        deterministic: The reference always is.

    Source: paper, section 4.2 (K-axis operators).
    """
    del mask, deterministic
    num_rows, num_groups = order.index.shape[1], weight.shape[1] // group_size
    out = torch.zeros(num_rows, weight.shape[0], dtype=torch.float32, device=h.device)
    for block, count in enumerate(order.counts.tolist()):
        first = block * order.groups_per_block
        for group in range(first, min(first + order.groups_per_block, num_groups)):
            executes = (order.patterns[block, :count] >> (group - first)) & 1 != 0
            rows = order.index[block, :count][executes].long()
            channels = slice(group * group_size, (group + 1) * group_size)
            values = h[rows, channels] if packed is None else h[packed.offsets[group] + packed.rank[rows, group]]
            out[rows] += values.float() @ weight[:, channels].float().t()
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype or h.dtype)
