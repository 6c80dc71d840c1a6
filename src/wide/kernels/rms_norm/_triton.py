"""RMSNorm in Triton: one program a row, everything read once."""

import torch
import triton
import triton.language as tl

from wide.kernels.device import elementwise_obstacle
from wide.kernels.rms_norm.op import BACKENDS

_MAX_WARPS, _ELEMENTS_PER_WARP = 16, 1024


@triton.jit
def _rms_norm(
    X, ADDEND, WEIGHT, TOTAL, OUT,
    eps,
    stride_xm, stride_ym,
    D: tl.constexpr, BLOCK_D: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    total = tl.load(X + row * stride_xm + columns, mask=inside, other=0.0)
    dtype = OUT.dtype.element_ty
    if ADDEND is not None:
        addend = tl.load(ADDEND + row * stride_ym + columns, mask=inside, other=0.0)
        total = (total.to(tl.float32) + addend.to(tl.float32)).to(dtype)
        tl.store(TOTAL + row * D + columns, total, mask=inside)
    weight = tl.load(WEIGHT + columns, mask=inside, other=0.0).to(tl.float32)
    total = total.to(tl.float32)
    scaled = total * tl.rsqrt(tl.sum(total * total, 0) / D + eps)
    # Rounded where transformers rounds.
    if UNIT_OFFSET:
        normed = (scaled * (1.0 + weight)).to(dtype)
    else:
        normed = (scaled.to(dtype).to(tl.float32) * weight).to(dtype)
    tl.store(OUT + row * D + columns, normed, mask=inside)


@BACKENDS.register("triton", needs=elementwise_obstacle)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, addend: torch.Tensor | None, eps: float, unit_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `rms_norm_reference` in one kernel; the sum is empty without an addend."""
    num_rows, width = x.shape
    total = x.new_empty(0) if addend is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(width)
    _rms_norm[(num_rows,)](
        x, addend, weight, total, out,
        eps,
        x.stride(0), x.stride(0) if addend is None else addend.stride(0),
        D=width, BLOCK_D=block, UNIT_OFFSET=unit_offset, num_warps=min(_MAX_WARPS, max(1, block // _ELEMENTS_PER_WARP)),
    )  # fmt: skip
    return total, out
