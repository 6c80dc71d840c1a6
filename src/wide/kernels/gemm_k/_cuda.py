"""GEMM-K for Hopper in CUDA C++: each row is stored once, and nothing is reduced through memory.

Over one sort of few groups, or over rows in one order of many.
"""

from pathlib import Path

import torch

from wide.kernels.device import device_facts
from wide.kernels.gemm_k._triton import in_one_order
from wide.kernels.native.launch import product
from wide.kernels.reordering import PatternReordering, RowReordering

SOURCE = Path(__file__).with_name("gemm_k.cu")
# A box of weights in shared memory: rows, and elements of a 128-byte line.
_BOX = (256, 64)


def gemm_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering | RowReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Run `gemm_k_reference`; rows by patterns are in one super-block, which keeps empty ones."""
    num_rows, width = h.shape[0], weight.shape[0]
    out = h.new_empty(num_rows, width)
    instead = "torch" if isinstance(order, RowReordering) else "triton"
    order = in_one_order(order)
    kernel = product(
        SOURCE,
        instead,
        WORDS=order.words.shape[0],
        HAS_BIAS=int(bias is not None),
        FLOAT16=int(h.dtype == torch.float16),
    )
    kernel(
        h.device,
        device_facts(h.device).num_sms,
        kernel.tensor_map(weight, *_BOX),
        h,
        out,
        out if bias is None else bias,
        *order,
        num_rows,
        width,
        group_size,
        h.stride(0),
        out.stride(0),
    )
    return out
