"""GEMM-MN for Hopper in CUDA C++ (gemm_mn.cu): clusters of two programs share weights, which Gluon 3.6 cannot say."""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from wide.kernels.clear_skipped import cleared
from wide.kernels.device import device_facts
from wide.kernels.gemm_mn.reference import ACTIVATIONS
from wide.kernels.native.build import HOPPER, cubin
from wide.kernels.native.launch import Kernel
from wide.kernels.reorder.tile_list._triton import row_tiles
from wide.kernels.reordering import Reordering
from wide.kernels.tuning import default_path

# Rows of a tile: two programs of two consumers of 64.
TILE_ROWS = 256
# A ring of four stages of 48 KB, 32 KB in which finished rows are rearranged, barriers.
_SHARED_BYTES = 4 * 48 * 1024 + 32 * 1024 + 64
_THREADS = 384
# A box of weights in shared memory: rows, and elements of a 128-byte line.
_BOX = (64, 64)


class Variant(NamedTuple):
    """What is compiled in, as gemm_mn.cu names it."""

    GATED: int
    ACTIVATION: int
    HAS_BIAS: int
    HAS_UP_BIAS: int
    PACKED: int
    FLOAT16: int


def machine_code(variant: Variant, folder: Path) -> bytes:
    """Return the compiled kernel, from `folder` if it was compiled before."""
    macros = {**variant._asdict(), "SHARED_BYTES": _SHARED_BYTES}
    source = Path(__file__).with_name("gemm_mn.cu")
    return cubin(source, folder, architecture="sm_90a", macros=macros, header=HOPPER)


@functools.cache
def _kernel(variant: Variant) -> Kernel:
    code = machine_code(variant, default_path().parent / "kernels")
    return Kernel(code, "gemm_mn", threads=_THREADS, shared_bytes=_SHARED_BYTES, instead="triton")


def gemm_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Reordering,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    packed: bool,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Run `gemm_mn_reference`."""
    num_rows, num_groups = x.shape[0], order.counts.numel()
    size = weight.shape[0] // num_groups
    out = x.new_empty((num_rows * num_groups, size) if packed else (num_rows, weight.shape[0]))
    variant = Variant(
        GATED=int(up_weight is not None),
        ACTIVATION=ACTIVATIONS.index(activation),
        HAS_BIAS=int(bias is not None),
        HAS_UP_BIAS=int(up_bias is not None),
        PACKED=int(packed),
        FLOAT16=int(x.dtype == torch.float16),
    )
    tiles, num_tiles = row_tiles(order, TILE_ROWS)
    kernel = _kernel(variant)
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
        order.offsets,
        tiles,
        num_tiles,
        num_rows,
        x.shape[1],
        size,
        x.stride(0),
        out.stride(0),
    )
    return out if mask is None else cleared(out, mask)
