"""GEMM-K for Hopper in CUDA C++ (gemm_k_rows.cu), over one order of rows: stored once, nothing is reduced."""

from pathlib import Path

import torch

from wide.kernels.device import device_facts
from wide.kernels.native.launch import product
from wide.kernels.reordering import RowReordering

SOURCE = Path(__file__).with_name("gemm_k_rows.cu")
# A box of weights in shared memory: rows, and elements of a 128-byte line.
_BOX = (256, 64)


def gemm_k_rows(
    h: torch.Tensor, weight: torch.Tensor, order: RowReordering, *, group_size: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Run `gemm_k_rows_reference`."""
    num_rows, width = h.shape[0], weight.shape[0]
    out = h.new_empty(num_rows, width)
    variant = {"HAS_BIAS": int(bias is not None), "FLOAT16": int(h.dtype == torch.float16)}
    kernel = product(SOURCE, "dense", WORDS=order.words.shape[0], **variant)
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
