"""GEMM-K for Hopper in CUDA C++ (gemm_k.cu), over one sort of all groups: stored once, nothing is reduced."""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from wide.kernels.device import device_facts
from wide.kernels.gemm_k.tile_list._triton import describe
from wide.kernels.native.build import HOPPER, cubin
from wide.kernels.native.launch import Kernel
from wide.kernels.reordering import PatternReordering
from wide.kernels.tuning import default_path

# Consumers of a program, 64 rows each.
_UNITS = 2
# A ring of four stages of 48 KB, 32 KB in which finished rows are rearranged, barriers.
_SHARED_BYTES = 4 * 48 * 1024 + 32 * 1024 + 64
_THREADS = 384
# A box of weights in shared memory: rows, and elements of a 128-byte line.
_BOX = (256, 64)


class Variant(NamedTuple):
    """What is compiled in, as gemm_k.cu names it."""

    HAS_BIAS: int
    FLOAT16: int


def machine_code(variant: Variant, folder: Path) -> bytes:
    """Return the compiled kernel, from `folder` if it was compiled before."""
    macros = {**variant._asdict(), "SHARED_BYTES": _SHARED_BYTES}
    source = Path(__file__).with_name("gemm_k.cu")
    return cubin(source, folder, architecture="sm_90a", macros=macros, header=HOPPER)


@functools.cache
def _kernel(variant: Variant) -> Kernel:
    code = machine_code(variant, default_path().parent / "kernels")
    return Kernel(code, "gemm_k", threads=_THREADS, shared_bytes=_SHARED_BYTES, instead="triton")


def gemm_k(
    h: torch.Tensor, weight: torch.Tensor, order: PatternReordering, *, group_size: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Run `gemm_k_reference` where `order` has one super-block that keeps empty rows."""
    num_rows, width = order.index.shape[1], weight.shape[0]
    out = h.new_empty(num_rows, width)
    work = describe(order, _UNITS)
    kernel = _kernel(Variant(HAS_BIAS=int(bias is not None), FLOAT16=int(h.dtype == torch.float16)))
    kernel(
        h.device,
        device_facts(h.device).num_sms,
        kernel.tensor_map(weight, *_BOX),
        h,
        out,
        out if bias is None else bias,
        order.index,
        order.patterns,
        work.items,
        work.num_items,
        num_rows,
        width,
        group_size,
        h.stride(0),
        out.stride(0),
    )
    return out
