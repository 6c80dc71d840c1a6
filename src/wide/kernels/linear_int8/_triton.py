"""Dense products with int8 weights in Triton, their expansion, and rows in int8.

Weights are the first operand: on Hopper that one may be multiplied from registers, where they are converted.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from wide.kernels.device import DeviceFacts, device_facts, elementwise_obstacle, half_obstacle, triton_obstacle
from wide.kernels.linear_int8.op import BACKENDS, EXPAND_BACKENDS, QUANTISE_BACKENDS

_EXPANDED_AT_ONCE = 4096
# Most channels of a row that neighbours in memory are read in one piece of.
_MAX_SEGMENT = 256


class Int8Tile(NamedTuple):
    """How one program is cut: output channels and rows of a tile, and input channels of a pipeline stage."""

    block_n: int
    block_k: int
    rows: int
    num_stages: int
    num_warps: int


def default_tile(num_rows: int, width: int, facts: DeviceFacts, *, int8_rows: bool = False) -> Int8Tile:
    """Return a tile with which most multiprocessors have work: reading weights is what takes the time of few rows."""
    rows = min(128, max(16, triton.next_power_of_2(num_rows)))
    if int8_rows:
        tile = Int8Tile(128, 128, 128, 3, 8) if rows == 128 else Int8Tile(64, 256, rows, 4, 4)
    elif rows <= 32:
        tile = Int8Tile(32, 512, rows, 3, 4)
    elif rows <= 64 and width < 40 * facts.num_sms:
        tile = Int8Tile(32, 256, rows, 4, 4)
    else:
        tile = Int8Tile(64, 128, rows, 5, 4)
    # Shared memory holds one stage less, which sm_89 and sm_120 have less of.
    stage = tile.block_k * (tile.block_n + tile.rows * (1 if int8_rows else 2))
    return tile._replace(num_stages=min(tile.num_stages, max(2, 1 + facts.shared_memory_bytes // stage)))


@triton.jit(do_not_specialize=["M"])
def _linear_int8(
    X, WEIGHT, SCALE, BIAS, X_SCALE, OUT,
    M, N, K,
    stride_xm, stride_wn,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_channel, is_row = channels < N, rows < M
    # Whatever is read beyond the last channel or row reaches no result.
    weight = WEIGHT + tl.where(is_channel, channels, 0).to(tl.int64)[:, None] * stride_wn
    x = X + tl.where(is_row, rows, 0).to(tl.int64)[None, :] * stride_xm
    SUM: tl.constexpr = tl.int32 if X_SCALE is not None else tl.float32
    total = tl.zeros((BLOCK_N, ROWS), SUM)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(weight + ks[None, :])
            part = tl.load(x + ks[:, None])
        else:
            w = tl.load(weight + ks[None, :], mask=(ks < K)[None, :], other=0)
            part = tl.load(x + ks[:, None], mask=(ks < K)[:, None], other=0)
        total = tl.dot(w.to(part.dtype), part, total, input_precision="ieee", out_dtype=SUM)
    total = total.to(tl.float32)
    if X_SCALE is not None:
        total *= tl.load(X_SCALE + rows, mask=is_row, other=0.0)[None, :]
    total *= tl.load(SCALE + channels, mask=is_channel, other=0.0)[:, None]
    if BIAS is not None:
        total += tl.load(BIAS + channels, mask=is_channel, other=0.0).to(tl.float32)[:, None]
    out = OUT + rows.to(tl.int64)[None, :] * N + channels[:, None]
    tl.store(out, total.to(OUT.dtype.element_ty), mask=is_channel[:, None] & is_row[None, :])


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    return triton_obstacle(device) if dtype == torch.int8 else half_obstacle(device, dtype)


@BACKENDS.register("triton", needs=_obstacle)
def linear_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Run `linear_int8_reference` in one kernel."""
    (num_rows, depth), width = x.shape, weight.shape[0]
    tile = default_tile(num_rows, width, device_facts(x.device), int8_rows=x_scale is not None)
    out = x.new_empty(num_rows, width, dtype=dtype or x.dtype)
    _linear_int8[(triton.cdiv(width, tile.block_n), triton.cdiv(num_rows, tile.rows))](
        x, weight, scale, bias, x_scale, out,
        num_rows, width, depth,
        x.stride(0), weight.stride(0),
        ROWS=tile.rows, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN_K=depth % tile.block_k == 0,
        num_stages=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip
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


@triton.jit
def _quantise_rows(
    X, MASK, ROTATION, OUT, SCALE,
    K, stride_xm, stride_mm, stride_mg,
    G: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, MASKED: tl.constexpr, ROTATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    starts = tl.arange(0, SEGMENTS) * SEGMENT
    counts = starts < K
    places = starts[:, None] + tl.arange(0, SEGMENT)[None, :]
    stored = tl.broadcast_to(counts[:, None], (SEGMENTS, SEGMENT))
    if MASKED:
        executes = tl.load(MASK + row * stride_mm + (starts // G) * stride_mg, mask=counts, other=0)
        counts = counts & (executes != 0)
    x = tl.load(X + row * stride_xm + places, mask=tl.broadcast_to(counts[:, None], (SEGMENTS, SEGMENT)), other=0.0)
    if ROTATES:
        inner = tl.arange(0, SEGMENT)
        rotation = tl.load(ROTATION + inner[:, None] * SEGMENT + inner[None, :])
        x = tl.dot(x, rotation, input_precision="ieee")
    x = x.to(tl.float32)
    # As integers, bits of absolute values are in their order and NaN is above all; a maximum of floats would lose it.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    peak = tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True)
    # 127 times the least normal number.
    peak = tl.where(peak < 1.4928778e-36, 1.4928778e-36, peak)
    # Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
    rounded = x * tl.div_rn(127.0, peak) + 12582912.0
    tl.store(OUT + row * K + places, (rounded - 12582912.0).to(tl.int8), mask=stored)
    tl.store(SCALE + row, peak * (1 / 127))


@QUANTISE_BACKENDS.register("triton", needs=elementwise_obstacle)
def quantise_rows(
    x: torch.Tensor, mask: torch.Tensor | None, rotation: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `quantise_rows_reference` in one kernel that reads everything once."""
    num_rows, depth = x.shape
    size = depth if mask is None else depth // mask.shape[1]
    # The largest power of two that divides a group.
    segment = min(size & -size, _MAX_SEGMENT) if rotation is None else len(rotation)
    segments = max(1 if rotation is None else 16, triton.next_power_of_2(depth // segment))
    out = x.new_empty(num_rows, depth, dtype=torch.int8)
    scale = x.new_empty(num_rows, dtype=torch.float32)
    raw = out if mask is None else mask.view(torch.uint8)
    _quantise_rows[(num_rows,)](
        x, raw, x if rotation is None else rotation, out, scale,
        depth, x.stride(0), *raw.stride(),
        G=size, SEGMENT=segment, SEGMENTS=segments, MASKED=mask is not None, ROTATES=rotation is not None,
        num_warps=min(16, max(1, segment * segments // 1024)),
    )  # fmt: skip
    return out, scale
