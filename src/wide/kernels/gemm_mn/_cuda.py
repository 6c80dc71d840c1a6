"""GEMM-MN for Hopper in CUDA C++ (gemm_mn.cu): clusters of two programs share weights."""

from pathlib import Path

import torch

from wide.kernels.clear_skipped import cleared
from wide.kernels.device import device_facts
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.gemm_mn.tiles import CLUSTER_TILE
from wide.kernels.native.launch import product
from wide.kernels.reorder._triton import row_tiles
from wide.kernels.reordering import Reordering

SOURCE = Path(__file__).with_name("gemm_mn.cu")
# A box of weights in shared memory: rows, and elements of a 128-byte line.
_BOX = (64, 64)


def gemm_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Reordering,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Run `gemm_mn_reference`."""
    num_rows, depth = x.shape
    out = x.new_empty(num_rows, weight.shape[0])
    kernel = product(
        SOURCE,
        "triton",
        GATED=int(up_weight is not None),
        ACTIVATION=ACTIVATIONS.index(activation),
        HAS_BIAS=int(bias is not None),
        HAS_UP_BIAS=int(up_bias is not None),
        FLOAT16=int(x.dtype == torch.float16),
    )
    kernel(
        x.device,
        device_facts(x.device).num_sms // 2 * 2,
        kernel.tensor_map(weight, *_BOX),
        kernel.tensor_map(weight if up_weight is None else up_weight, *_BOX),
        x,
        out,
        out if bias is None else bias,
        out if up_bias is None else up_bias,
        order.index,
        order.counts,
        *row_tiles(order, CLUSTER_TILE[0]),
        num_rows,
        depth,
        weight.shape[0] // order.counts.numel(),
        x.stride(0),
        out.stride(0),
    )
    return out if mask is None else cleared(out, mask)
