"""Dense products with int8 weights in Triton, and their expansion.

Weights are the first operand: on Hopper that one may be multiplied from registers, where they are converted.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from wide.kernels.device import device_facts, elementwise_obstacle, half_obstacle
from wide.kernels.linear_int8.op import BACKENDS, EXPAND_BACKENDS

_EXPANDED_AT_ONCE = 4096


class Int8Tile(NamedTuple):
    """How one program is cut.

    Args:
        block_n: Output channels of a tile.
        block_k: Input channels of a pipeline stage.
        rows: Rows of a tile.
    """

    block_n: int
    block_k: int
    rows: int
    num_stages: int
    num_warps: int


def default_tile(num_rows: int, width: int, num_sms: int) -> Int8Tile:
    """Return a tile with which most multiprocessors have work: reading weights is what takes the time."""
    rows = min(128, max(16, triton.next_power_of_2(num_rows)))
    if rows <= 16 and width < 64 * num_sms:
        return Int8Tile(32, 256, rows, 4, 4)
    return Int8Tile(64 if width < 128 * num_sms else 128, 128, rows, 4 if rows <= 64 else 3, 4 if rows <= 64 else 8)


@triton.jit
def _linear_int8(
    X,
    WEIGHT,
    SCALE,
    BIAS,
    OUT,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_channel, is_row = channels < N, rows < M
    # Whatever is read beyond the last channel or row reaches no result.
    weight = WEIGHT + tl.where(is_channel, channels, 0).to(tl.int64)[:, None] * stride_wn
    x = X + tl.where(is_row, rows, 0).to(tl.int64)[None, :] * stride_xm
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(weight + ks[None, :])
            part = tl.load(x + ks[:, None])
        else:
            w = tl.load(weight + ks[None, :], mask=(ks < K)[None, :], other=0)
            part = tl.load(x + ks[:, None], mask=(ks < K)[:, None], other=0.0)
        total = tl.dot(w.to(part.dtype), part, total, input_precision="ieee")
    total *= tl.load(SCALE + channels, mask=is_channel, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(BIAS + channels, mask=is_channel, other=0.0).to(tl.float32)[:, None]
    out = OUT + rows.to(tl.int64)[None, :] * N + channels[:, None]
    tl.store(out, total.to(OUT.dtype.element_ty), mask=is_channel[:, None] & is_row[None, :])


@BACKENDS.register("triton", needs=half_obstacle)
def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, bias: torch.Tensor | None
) -> torch.Tensor:
    """Run `linear_int8_reference` in one kernel."""
    (num_rows, depth), width = x.shape, weight.shape[0]
    tile = default_tile(num_rows, width, device_facts(x.device).num_sms)
    out = x.new_empty(num_rows, width)
    _linear_int8[(triton.cdiv(width, tile.block_n), triton.cdiv(num_rows, tile.rows))](
        x,
        weight,
        scale,
        scale if bias is None else bias,
        out,
        num_rows,
        width,
        depth,
        x.stride(0),
        weight.stride(0),
        ROWS=tile.rows,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=depth % tile.block_k == 0,
        HAS_BIAS=bias is not None,
        num_stages=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return out


@triton.jit
def _expand_int8(WEIGHT, SCALE, OUT, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(WEIGHT + row * K + places, mask=places < K, other=0).to(tl.float32)
    tl.store(OUT + row * K + places, (weight * tl.load(SCALE + row)).to(OUT.dtype.element_ty), mask=places < K)


@EXPAND_BACKENDS.register("triton", needs=elementwise_obstacle)
def expand_int8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Run `expand_int8_reference` in one kernel."""
    width, depth = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    block = min(_EXPANDED_AT_ONCE, triton.next_power_of_2(depth))
    _expand_int8[(width, triton.cdiv(depth, block))](weight, scale, out, depth, BLOCK=block, num_warps=4)
    return out
