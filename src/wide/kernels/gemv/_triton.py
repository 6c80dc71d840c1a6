"""Decode GEMMs in Triton: one launch, weights streamed once, groups that no row executes never read.

There is no list of active groups to build first: a program whose group is skipped ends at once and the hardware gives
its place to the next (N-axis); along the K-axis a program walks the set bits of the mask. Both cost less than the
launch of a kernel that compacts groups.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from wide.kernels.device import DeviceFacts, device_facts, elementwise_obstacle, halves_only
from wide.kernels.dispatch import listed
from wide.kernels.gemm_mn._triton import activate
from wide.kernels.gemv.op import K_BACKENDS, MN_BACKENDS

# Channels that the K-axis kernel treats as one piece of a group.
_MAX_SEGMENT = 512
# Input channels from which a sum takes many steps.
_LONG_SUM = 8192


class GemvTile(NamedTuple):
    """How one program of a decode GEMM is cut.

    Args:
        block_n: Output channels that a program owns; cut down to a divisor of the group where groups lie along them.
        block_k: Input channels in one step; a power of two. Along the K-axis, as many have their weights under way
            at once.
    """

    block_n: int
    block_k: int
    num_warps: int


_TILES = tuple(
    GemvTile(block_n=n, block_k=k, num_warps=w)
    for n, k, w in (
        (4, 2048, 4), (2, 4096, 4), (4, 1024, 2), (2, 1024, 2), (2, 2048, 4), (4, 1024, 4), (2, 1024, 1), (1, 2048, 2),
        (2, 512, 1), (4, 512, 1), (4, 2048, 8), (8, 512, 2), (8, 1024, 4), (4, 4096, 8), (1, 4096, 4),
    )
)  # fmt: skip
candidates = listed(_TILES, few=8)


def default_mn_tile(facts: DeviceFacts, *, is_gated: bool) -> GemvTile:
    """Return the N-axis tile for a device; small ones, so that many programs keep many loads in flight."""
    if facts.capability == 0:
        return GemvTile(block_n=8, block_k=64, num_warps=4)
    return GemvTile(block_n=2 if is_gated else 4, block_k=2048, num_warps=4)


def default_k_tile(facts: DeviceFacts, *, is_long: bool) -> GemvTile:
    """Return the K-axis tile for a device; a long sum takes many steps, as that of a down projection does."""
    if facts.capability == 0:
        return GemvTile(block_n=8, block_k=64, num_warps=4)
    return GemvTile(block_n=2, block_k=1024, num_warps=1) if is_long else GemvTile(block_n=4, block_k=1024, num_warps=2)


@triton.jit
def _gemv_mn(
    X, WEIGHT, UP_WEIGHT, BIAS, UP_BIAS, SCALE, UP_SCALE, MASK, OUT,
    stride_xm, stride_wn, stride_un, stride_mm,
    N, K,
    G: tl.constexpr, ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, ZERO_SKIPPED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    rows = tl.arange(0, ROWS_PAD)
    runs = rows < ROWS
    if MASK is not None:
        runs = tl.load(MASK + rows * stride_mm + first // G, mask=rows < ROWS, other=0) != 0
    channels = first + tl.arange(0, BLOCK_N)
    out = OUT + rows[None, :] * N + channels[:, None]
    cell = (rows < ROWS)[None, :] & (channels < N)[:, None]
    if tl.max(runs.to(tl.int32), 0) == 0:
        if ZERO_SKIPPED:
            tl.store(out, tl.zeros([BLOCK_N, ROWS_PAD], OUT.dtype.element_ty), mask=cell)
        return
    offsets_k = tl.arange(0, BLOCK_K)
    weight = WEIGHT + channels.to(tl.int64)[:, None] * stride_wn
    up_weight = UP_WEIGHT + channels.to(tl.int64)[:, None] * stride_un
    acc = tl.zeros([BLOCK_N, ROWS_PAD], tl.float32)
    up_acc = tl.zeros([BLOCK_N, ROWS_PAD], tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + offsets_k
        if EVEN_K:
            w = tl.load(weight + ks[None, :], eviction_policy="evict_first").to(tl.float32)
        else:
            w = tl.load(weight + ks[None, :], mask=(ks < K)[None, :], other=0.0).to(tl.float32)
        if IS_GATED:
            if EVEN_K:
                u = tl.load(up_weight + ks[None, :], eviction_policy="evict_first").to(tl.float32)
            else:
                u = tl.load(up_weight + ks[None, :], mask=(ks < K)[None, :], other=0.0).to(tl.float32)
        for row in tl.static_range(ROWS):
            x = tl.load(X + row * stride_xm + ks, mask=ks < K, other=0.0).to(tl.float32)
            here = (rows == row)[None, :]
            acc += tl.where(here, tl.sum(w * x[None, :], 1)[:, None], 0.0)
            if IS_GATED:
                up_acc += tl.where(here, tl.sum(u * x[None, :], 1)[:, None], 0.0)
    if SCALE is not None:
        acc *= tl.load(SCALE + channels)[:, None]
        if IS_GATED:
            up_acc *= tl.load(UP_SCALE + channels)[:, None]
    if BIAS is not None:
        acc += tl.load(BIAS + channels).to(tl.float32)[:, None]
    acc = activate(acc, ACTIVATION)
    if IS_GATED:
        if BIAS is not None:
            up_acc += tl.load(UP_BIAS + channels).to(tl.float32)[:, None]
        acc = acc * up_acc
    if ZERO_SKIPPED:
        acc = tl.where(runs[None, :], acc, 0.0)
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=cell)


@triton.jit
def _lowest(bits):
    """Return the place of the lowest set bit of a positive int64 scalar; 0 where none is set."""
    # A power of two is exact in float32, and its exponent is its place.
    lowest = (bits & -bits).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum((lowest >> 23) - 127, 0)


@triton.jit
def _input(H, MASK, row: tl.constexpr, group, inside, at, stride_hm, stride_mm, ROWS: tl.constexpr):
    """Return a segment of a row; zeros where the row skips its group, whose channels may hold anything."""
    if ROWS > 1:
        inside = tl.load(MASK + row * stride_mm + group, mask=inside, other=0) != 0
    return tl.load(H + row * stride_hm + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _gemv_k(
    H, WEIGHT, BIAS, SCALE, MASK, OUT,
    stride_hm, stride_wn, stride_mm,
    N, num_segments,
    G: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_channel = channels < N
    inner = tl.arange(0, SEGMENT)
    weight = WEIGHT + channels.to(tl.int64)[:, None] * stride_wn + inner[None, :]
    # Inputs are read in the shape of the weights, again for every channel: cheaper than a barrier that spreads them.
    spread = tl.zeros([BLOCK_N, 1], tl.int32) + inner[None, :]
    # One sum a thread and row until the end, so that nothing waits inside the loop but for weights.
    sums0 = tl.zeros([BLOCK_N, SEGMENT], tl.float32)
    sums1 = tl.zeros([BLOCK_N, SEGMENT], tl.float32)
    sums2 = tl.zeros([BLOCK_N, SEGMENT], tl.float32)
    sums3 = tl.zeros([BLOCK_N, SEGMENT], tl.float32)
    lanes = tl.arange(0, 64)
    for first in range(0, num_segments, 62):
        # The segments that some row executes, as bits of a scalar: walking them needs neither a list nor a barrier.
        segments = first + lanes
        known = (lanes < 62) & (segments < num_segments)
        runs = tl.zeros([64], tl.int64)
        for row in tl.static_range(ROWS):
            runs |= (tl.load(MASK + row * stride_mm + segments * SEGMENT // G, mask=known, other=0) != 0).to(tl.int64)
        bits = tl.sum(runs << lanes.to(tl.int64), 0)
        while bits != 0:
            for _ in tl.static_range(UNROLL):
                inside = bits != 0
                segment = first + _lowest(bits)
                bits = bits & (bits - 1)
                at = segment * SEGMENT
                group = at // G
                w = tl.load(
                    weight + at, mask=is_channel[:, None] & inside, other=0.0, eviction_policy="evict_first"
                ).to(tl.float32)
                sums0 += w * _input(H, MASK, 0, group, inside, spread + at, stride_hm, stride_mm, ROWS)
                if ROWS > 1:
                    sums1 += w * _input(H, MASK, 1, group, inside, spread + at, stride_hm, stride_mm, ROWS)
                if ROWS > 2:
                    sums2 += w * _input(H, MASK, 2, group, inside, spread + at, stride_hm, stride_mm, ROWS)
                if ROWS > 3:
                    sums3 += w * _input(H, MASK, 3, group, inside, spread + at, stride_hm, stride_mm, ROWS)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if BIAS is not None:
        bias += tl.load(BIAS + channels, mask=is_channel, other=0.0).to(tl.float32)
    scale = tl.full([BLOCK_N], 1.0, tl.float32)
    if SCALE is not None:
        scale = tl.load(SCALE + channels, mask=is_channel, other=0.0)
    out = OUT + channels
    tl.store(out, (tl.sum(sums0, 1) * scale + bias).to(OUT.dtype.element_ty), mask=is_channel)
    if ROWS > 1:
        tl.store(out + N, (tl.sum(sums1, 1) * scale + bias).to(OUT.dtype.element_ty), mask=is_channel)
    if ROWS > 2:
        tl.store(out + 2 * N, (tl.sum(sums2, 1) * scale + bias).to(OUT.dtype.element_ty), mask=is_channel)
    if ROWS > 3:
        tl.store(out + 3 * N, (tl.sum(sums3, 1) * scale + bias).to(OUT.dtype.element_ty), mask=is_channel)


@MN_BACKENDS.register("triton", needs=elementwise_obstacle, supports=halves_only, candidates=candidates)
def gemv_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    zero_skipped: bool,
    scale: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `gemv_mn_reference` in one kernel; the tile is a `GemvTile`."""
    chosen = GemvTile(*tile) if tile else default_mn_tile(device_facts(x.device), is_gated=up_weight is not None)
    num_rows, width_in = x.shape
    width = weight.shape[0]
    group_size = width if mask is None else width // mask.shape[1]
    block_n = math.gcd(chosen.block_n, group_size)
    block_k = min(chosen.block_k, triton.next_power_of_2(width_in))
    up = weight if up_weight is None else up_weight
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    _gemv_mn[(width // block_n,)](
        x, weight, up, bias, up_bias, scale, up_scale, None if mask is None else mask.view(torch.uint8), out,
        x.stride(0), weight.stride(0), up.stride(0), 0 if mask is None else mask.stride(0),
        width, width_in,
        G=group_size, ROWS=num_rows, ROWS_PAD=triton.next_power_of_2(num_rows), BLOCK_N=block_n, BLOCK_K=block_k,
        EVEN_K=width_in % block_k == 0, IS_GATED=up_weight is not None, ACTIVATION=activation,
        ZERO_SKIPPED=zero_skipped, num_warps=chosen.num_warps,
    )  # fmt: skip
    return out


@K_BACKENDS.register("triton", needs=elementwise_obstacle, supports=halves_only, candidates=candidates)
def gemv_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None = None,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `gemv_k_reference` in one kernel; the tile is a `GemvTile`."""
    chosen = GemvTile(*tile) if tile else default_k_tile(device_facts(h.device), is_long=h.shape[1] > _LONG_SUM)
    num_rows, width_in = h.shape
    group_size = width_in // mask.shape[1]
    width = weight.shape[0]
    # The largest power of two that divides a group.
    segment = min(group_size & -group_size, _MAX_SEGMENT, chosen.block_k)
    num_segments = width_in // segment
    out = torch.empty(num_rows, width, dtype=h.dtype, device=h.device)
    _gemv_k[(triton.cdiv(width, chosen.block_n),)](
        h, weight, bias, scale, mask.view(torch.uint8), out,
        h.stride(0), weight.stride(0), mask.stride(0),
        width, num_segments,
        G=group_size, SEGMENT=segment, ROWS=num_rows, BLOCK_N=chosen.block_n,
        UNROLL=max(1, min(chosen.block_k // segment, num_segments)), num_warps=chosen.num_warps,
    )  # fmt: skip
    return out
