"""GEMM-K for Hopper in CUDA C++ (gemm_k.cu), over one sort of all groups: stored once, nothing is reduced."""

from pathlib import Path

import torch

from wide.kernels.device import device_facts
from wide.kernels.gemm_k._triton import describe
from wide.kernels.native.launch import product
from wide.kernels.reordering import PatternReordering

SOURCE = Path(__file__).with_name("gemm_k.cu")
# A box of weights in shared memory: rows, and elements of a 128-byte line.
_BOX = (256, 64)


def gemm_k(
    h: torch.Tensor, weight: torch.Tensor, order: PatternReordering, *, group_size: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Run `gemm_k_reference` where `order` has one super-block that keeps empty rows."""
    num_rows, width = order.index.shape[1], weight.shape[0]
    out = h.new_empty(num_rows, width)
    kernel = product(SOURCE, "triton", HAS_BIAS=int(bias is not None), FLOAT16=int(h.dtype == torch.float16))
    kernel(
        h.device,
        device_facts(h.device).num_sms,
        kernel.tensor_map(weight, *_BOX),
        h,
        out,
        out if bias is None else bias,
        order.index,
        order.patterns,
        *describe(order),
        num_rows,
        width,
        group_size,
        h.stride(0),
        out.stride(0),
    )
    return out
