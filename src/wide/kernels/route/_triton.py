"""Routers in Triton.

Many rows: a program reads its rows once and multiplies them by both parts of the bottleneck matrix on tensor cores.
Fewer rows: programs share out the channels of a tile of rows, and the last one to finish decides. Few rows: each row
has such programs of its own, so that all rows wait at the same time; where the norm comes along, each program measures
its row again for itself. Both are cheaper than another launch.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from wide.kernels.device import DeviceFacts, device_facts, halves_only, triton_obstacle
from wide.kernels.route.op import BACKENDS, MAX_FEW_ROWS, NORM_BACKENDS
from wide.kernels.route.weights import NUM_COUNTERS, RouteWeights

SMALLEST_BLOCK = 16
_SMALL_SHARED_MEMORY = (89, 120)
# Channels of a program of one row.
_FEW_BLOCK = 128
# Most programs that share out one tile of rows; the last one adds up as many parts.
_MAX_SHARES = 16
# Channels of a step of theirs, and entries of the bottleneck matrix that a step holds.
_SPLIT_CHANNELS, _SPLIT_ENTRIES = 256, 16384
# Entries of the second matrix that a program holds at a time.
_DIFFERENCES = 4096


class RouteTile(NamedTuple):
    """Tile of the kernel for many rows: channels of a pipeline stage, and groups decided at a time."""

    block_m: int
    block_k: int
    block_g: int
    num_warps: int
    num_stages: int


def default_tile(facts: DeviceFacts, num_rows: int) -> RouteTile:
    """Return the largest tile that still gives most multiprocessors rows of their own."""
    block_m = next((b for b in (128, 64, 32) if num_rows >= b * facts.num_sms * 3 // 4), SMALLEST_BLOCK)
    # Only warp-group products leave registers for 64 groups at a time.
    block_g = 64 if facts.capability == 90 else 32
    if facts.capability in _SMALL_SHARED_MEMORY:
        return RouteTile(min(block_m, 64), 64, block_g, 4, 3)
    return RouteTile(block_m, 128, block_g, 4 if block_m <= 64 else 8, 4 if block_m <= 64 else 3)


@BACKENDS.register("triton", needs=triton_obstacle, supports=halves_only)
def route(
    x: torch.Tensor, weights: RouteWeights, *, overlaps: bool, padding: torch.Tensor | None, counts: torch.Tensor | None
) -> torch.Tensor:
    """Run `route_reference` in the kernel for this number of rows."""
    extras: dict[str, Any] = {"padding": padding, "counts": counts}
    tile = default_tile(device_facts(x.device), x.shape[0])
    if x.shape[0] <= MAX_FEW_ROWS and not overlaps:
        return _few(x, None, weights, addend=None, **extras)[2]
    if x.shape[0] <= NUM_COUNTERS * SMALLEST_BLOCK and tile.block_m == SMALLEST_BLOCK:
        return route_split(x, weights, **extras)
    return route_many(x, weights, tile=tile, **extras)


@NORM_BACKENDS.register("triton", needs=triton_obstacle, supports=halves_only)
def norm_route(
    x: torch.Tensor,
    weight: torch.Tensor,
    weights: RouteWeights,
    *,
    addend: torch.Tensor | None,
    eps: float,
    unit_offset: bool,
    reads_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `norm_route_reference` in one kernel; sums exist with an addend."""
    options: dict[str, Any] = {"eps": eps, "unit_offset": unit_offset, "reads_residual": reads_residual}
    return _few(x, weight, weights, addend=addend, **options)


@triton.jit
def _decide(
    sums, lanes, rows, in_rows, is_real, DIFFERENCE, OFFSET, MASK, COUNTS, R: tl.constexpr, NUM_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Store which groups rows execute, by what is in the lanes of their bottleneck; count the pairs and the rows."""
    for g in range(0, NUM_GROUPS, BLOCK_G):
        groups = g + tl.arange(0, BLOCK_G)
        in_groups = (groups < NUM_GROUPS)[None, :]
        second = DIFFERENCE + groups[None, :] * R + lanes[:, None]
        difference = tl.load(second, mask=in_groups & (lanes < R)[:, None], other=0.0)
        # Three products of TF32 keep float32's accuracy, on tensor cores.
        margin = tl.dot(sums, difference, input_precision="tf32x3")
        if OFFSET is not None:
            margin += tl.load(OFFSET + groups[None, :], mask=in_groups, other=0.0)
        executes = (margin >= 0.0) & is_real & in_groups
        to = MASK + rows.to(tl.int64)[:, None] * NUM_GROUPS + groups[None, :]
        tl.store(to, executes.to(tl.uint8), mask=in_rows & in_groups)
        if COUNTS is not None:
            tl.atomic_add(COUNTS, tl.sum(executes.to(tl.int32)))
    if COUNTS is not None:
        tl.atomic_add(COUNTS + 1, tl.sum(tl.sum(is_real.to(tl.int32), 1), 0))


@triton.jit(do_not_specialize=["M"])
def _route(
    X, DOWN, DIFFERENCE, OFFSET, MASK, PADDING, COUNTS,
    M,
    stride_xm,
    D: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, PARTS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = (rows < M)[:, None]
    is_real = in_rows
    if PADDING is not None:
        is_real = in_rows & (tl.load(PADDING + rows, mask=rows < M, other=1) == 0)[:, None]
    # Row `place` of the tile is row `place % BLOCK_R` of part `place // BLOCK_R`.
    places = tl.arange(0, PARTS * BLOCK_R)
    lane = places % BLOCK_R
    in_lanes = lane < R
    down = DOWN + ((places // BLOCK_R) * R + lane)[None, :] * D
    x = X + rows.to(tl.int64)[:, None] * stride_xm
    acc = tl.zeros([BLOCK_M, PARTS * BLOCK_R], tl.float32)
    for k in range(0, D, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        if D % BLOCK_K == 0:
            values = tl.load(x + ks[None, :], mask=in_rows, other=0.0)
            weights = tl.load(down + ks[:, None], mask=in_lanes[None, :], other=0.0)
        else:
            values = tl.load(x + ks[None, :], mask=in_rows & (ks < D)[None, :], other=0.0)
            weights = tl.load(down + ks[:, None], mask=in_lanes[None, :] & (ks < D)[:, None], other=0.0)
        acc = tl.dot(values, weights, acc, input_precision="ieee")
    # The rows of the second matrix repeat for each part, so that its product also adds the parts up.
    _decide(acc, lane, rows, in_rows, is_real, DIFFERENCE, OFFSET, MASK, COUNTS, R, NUM_GROUPS, BLOCK_G)


@triton.jit(do_not_specialize=["M"])
def _route_split(
    X, DOWN, DIFFERENCE, OFFSET, PARTIAL, COUNTER, MASK, PADDING, COUNTS,
    M,
    stride_xm,
    D: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, PARTS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SHARE: tl.constexpr, NUM_SHARES: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    share = tl.program_id(1)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = (rows < M)[:, None]
    lanes = tl.arange(0, BLOCK_R)
    x = X + rows.to(tl.int64)[:, None] * stride_xm
    # Column `place` of the products is lane `place % BLOCK_R` of part `place // BLOCK_R`.
    places = tl.arange(0, PARTS * BLOCK_R)
    down = DOWN + ((places // BLOCK_R) * R + places % BLOCK_R)[None, :] * D
    in_places = (places % BLOCK_R < R)[None, :]
    acc = tl.zeros([BLOCK_M, PARTS * BLOCK_R], tl.float32)
    for k in tl.static_range(0, SHARE, BLOCK_K):
        own = share * SHARE + k + tl.arange(0, BLOCK_K)
        values = tl.load(x + own[None, :], mask=in_rows & (own < D)[None, :], other=0.0)
        weights = tl.load(down + own[:, None], mask=in_places & (own < D)[:, None], other=0.0)
        acc = tl.dot(values, weights, acc, input_precision="ieee")
    whole = tl.sum(tl.reshape(acc, [BLOCK_M, PARTS, BLOCK_R]), 1)
    SIZE: tl.constexpr = BLOCK_M * BLOCK_R
    partial = PARTIAL + tile * NUM_SHARES * SIZE
    tl.store(partial + share * SIZE + tl.arange(0, BLOCK_M)[:, None] * BLOCK_R + lanes[None, :], whole, mask=in_rows)
    # Everything that this program wrote must be seen before its count is.
    tl.debug_barrier()
    finished = tl.atomic_add(COUNTER + tile, 1, sem="acq_rel")
    if finished == NUM_SHARES - 1:
        shares = tl.arange(0, BLOCK_S)[:, None]
        inner = tl.arange(0, SIZE)[None, :]
        known = (shares < NUM_SHARES) & (tile * BLOCK_M + inner // BLOCK_R < M)
        # All parts at once, past the first-level cache: other multiprocessors wrote them.
        parts = tl.load(partial + shares * SIZE + inner, mask=known, other=0.0, cache_modifier=".cg")
        total = tl.reshape(tl.sum(parts, 0), [BLOCK_M, BLOCK_R])
        is_real = in_rows
        if PADDING is not None:
            is_real = in_rows & (tl.load(PADDING + rows, mask=rows < M, other=1) == 0)[:, None]
        _decide(total, lanes, rows, in_rows, is_real, DIFFERENCE, OFFSET, MASK, COUNTS, R, NUM_GROUPS, BLOCK_G)
        tl.store(COUNTER + tile, 0)


@triton.jit
def _route_few(
    X, ADDEND, WEIGHT, TOTAL, NORMED, DOWN, DIFFERENCE, OFFSET, PARTIAL, COUNTER, MASK, PADDING, COUNTS,
    eps,
    stride_xm, stride_ym,
    D: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, PARTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, SHARE: tl.constexpr, NUM_SHARES: tl.constexpr,
    BLOCK_S: tl.constexpr, UNIT_OFFSET: tl.constexpr, READS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0)
    row = tl.program_id(1)
    wide_row = row.to(tl.int64)
    own = share * SHARE + tl.arange(0, SHARE)
    in_own = own < D
    lanes = tl.arange(0, BLOCK_R)
    in_lanes = lanes < R
    cell = in_lanes[:, None] & in_own[None, :]
    dtype: tl.constexpr = X.dtype.element_ty
    down = tl.load(DOWN + lanes[:, None] * D + own[None, :], mask=cell, other=0.0).to(tl.float32)
    if PARTS == 2:
        down += tl.load(DOWN + (R + lanes)[:, None] * D + own[None, :], mask=cell, other=0.0).to(tl.float32)
    # Only the last program of a row decides, but then these are there already.
    groups = tl.arange(0, BLOCK_G)
    second = DIFFERENCE + groups[:, None] * R + lanes[None, :]
    difference = tl.load(second, mask=(groups < NUM_GROUPS)[:, None] & in_lanes[None, :], other=0.0)
    values = tl.load(X + wide_row * stride_xm + own, mask=in_own, other=0.0).to(tl.float32)
    if ADDEND is not None:
        added = tl.load(ADDEND + wide_row * stride_ym + own, mask=in_own, other=0.0).to(tl.float32)
        values = (values + added).to(dtype).to(tl.float32)
    total = values
    if WEIGHT is not None:
        columns = tl.arange(0, BLOCK_D)
        whole = tl.load(X + wide_row * stride_xm + columns, mask=columns < D, other=0.0).to(tl.float32)
        if ADDEND is not None:
            more = tl.load(ADDEND + wide_row * stride_ym + columns, mask=columns < D, other=0.0).to(tl.float32)
            whole = (whole + more).to(dtype).to(tl.float32)
        weight = tl.load(WEIGHT + own, mask=in_own, other=0.0).to(tl.float32)
        scaled = values * tl.rsqrt(tl.sum(whole * whole, 0) / D + eps)
        if UNIT_OFFSET:
            normed = (scaled * (1.0 + weight)).to(dtype)
        else:
            normed = (scaled.to(dtype).to(tl.float32) * weight).to(dtype)
        tl.store(NORMED + wide_row * D + own, normed, mask=in_own)
        if not READS_RESIDUAL:
            values = normed.to(tl.float32)
    if ADDEND is not None:
        # Not earlier: no load moves before a store.
        tl.store(TOTAL + wide_row * D + own, total.to(dtype), mask=in_own)
    partial = PARTIAL + row * NUM_SHARES * BLOCK_R
    tl.store(partial + share * BLOCK_R + lanes, tl.sum(down * values[None, :], 1))
    # Everything that this program wrote must be seen before its count is.
    tl.debug_barrier()
    finished = tl.atomic_add(COUNTER + row, 1, sem="acq_rel")
    if finished == NUM_SHARES - 1:
        shares = tl.arange(0, BLOCK_S)
        at = partial + shares[:, None] * BLOCK_R + lanes[None, :]
        # Past the first-level cache: other multiprocessors wrote this.
        parts = tl.load(at, mask=(shares < NUM_SHARES)[:, None], other=0.0, cache_modifier=".cg")
        bottleneck = tl.sum(parts, 0)
        is_real = row >= 0
        if PADDING is not None:
            is_real = tl.load(PADDING + row) == 0
        for g in tl.static_range(0, NUM_GROUPS, BLOCK_G):
            in_groups = g + groups < NUM_GROUPS
            if g > 0:
                difference = tl.load(second + g * R, mask=in_groups[:, None] & in_lanes[None, :], other=0.0)
            margin = tl.sum(difference * bottleneck[None, :], 1)
            if OFFSET is not None:
                margin += tl.load(OFFSET + g + groups, mask=in_groups, other=0.0)
            executes = (margin >= 0.0) & is_real & in_groups
            tl.store(MASK + wide_row * NUM_GROUPS + g + groups, executes.to(tl.uint8), mask=in_groups)
            if COUNTS is not None:
                tl.atomic_add(COUNTS, tl.sum(executes.to(tl.int32), 0))
        if COUNTS is not None:
            tl.atomic_add(COUNTS + 1, is_real.to(tl.int32))
        tl.store(COUNTER + row, 0)


def route_many(
    x: torch.Tensor,
    weights: RouteWeights,
    *,
    tile: RouteTile,
    padding: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `route_reference` in one kernel, with many rows a program."""
    down, difference, offset, _ = weights
    num_rows, width = x.shape
    num_groups, rank = difference.shape
    mask = torch.empty(num_rows, num_groups, dtype=torch.bool, device=x.device)
    _route[(triton.cdiv(num_rows, tile.block_m),)](
        x, down, difference, offset, mask.view(torch.uint8), None if padding is None else padding.view(torch.uint8),
        counts,
        num_rows,
        x.stride(0),
        D=width, R=rank, BLOCK_R=max(16, triton.next_power_of_2(rank)), PARTS=down.shape[0] // rank,
        NUM_GROUPS=num_groups, BLOCK_G=min(tile.block_g, max(16, triton.next_power_of_2(num_groups))),
        BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return mask


def route_split(
    x: torch.Tensor, weights: RouteWeights, *, padding: torch.Tensor | None = None, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """Run `route_reference` in one kernel whose programs share out the channels of each tile of rows."""
    down, difference, offset, counter = weights
    num_rows, width = x.shape
    num_groups, rank = difference.shape
    block_r = max(16, triton.next_power_of_2(rank))
    num_tiles = triton.cdiv(num_rows, SMALLEST_BLOCK)
    block_k = max(32, min(_SPLIT_CHANNELS, _SPLIT_ENTRIES // (block_r * down.shape[0] // rank)))
    share = block_k * triton.cdiv(triton.cdiv(width, _MAX_SHARES), block_k)
    num_shares = triton.cdiv(width, share)
    mask = torch.empty(num_rows, num_groups, dtype=torch.bool, device=x.device)
    partial = torch.empty(num_tiles, num_shares, SMALLEST_BLOCK, block_r, dtype=torch.float32, device=x.device)
    _route_split[(num_tiles, num_shares)](
        x, down, difference, offset, partial, counter, mask.view(torch.uint8),
        None if padding is None else padding.view(torch.uint8), counts,
        num_rows,
        x.stride(0),
        D=width, R=rank, BLOCK_R=block_r, PARTS=down.shape[0] // rank, NUM_GROUPS=num_groups,
        BLOCK_G=max(16, min(triton.next_power_of_2(num_groups), _DIFFERENCES // block_r)), BLOCK_M=SMALLEST_BLOCK,
        BLOCK_K=block_k, SHARE=share, NUM_SHARES=num_shares, BLOCK_S=triton.next_power_of_2(num_shares),
        num_warps=min(16, max(4, block_r // 8)),
    )  # fmt: skip
    return mask


def _few(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    weights: RouteWeights,
    *,
    addend: torch.Tensor | None,
    eps: float = 0.0,
    unit_offset: bool = False,
    reads_residual: bool = True,
    padding: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `norm_route_reference` (without a weight: `route_reference`) in one kernel; sums exist with an addend."""
    down, difference, offset, counter = weights
    num_rows, width = x.shape
    num_groups, rank = difference.shape
    num_shares = triton.cdiv(width, _FEW_BLOCK)
    block_r = triton.next_power_of_2(rank)
    mask = torch.empty(num_rows, num_groups, dtype=torch.bool, device=x.device)
    partial = torch.empty(num_rows, num_shares, block_r, dtype=torch.float32, device=x.device)
    total = x.new_empty((num_rows, width) if addend is not None else 0)
    normed = x.new_empty((num_rows, width) if weight is not None else 0)
    # No smaller than that each thread holds a product of its own.
    block_g = max(min(triton.next_power_of_2(num_groups), _DIFFERENCES // block_r), triton.cdiv(128, block_r))
    _route_few[(num_shares, num_rows)](
        x, addend, weight, total, normed, down, difference, offset, partial, counter, mask.view(torch.uint8),
        None if padding is None else padding.view(torch.uint8), counts,
        eps,
        x.stride(0), x.stride(0) if addend is None else addend.stride(0),
        D=width, BLOCK_D=triton.next_power_of_2(width), R=rank, BLOCK_R=block_r, PARTS=down.shape[0] // rank,
        NUM_GROUPS=num_groups, BLOCK_G=block_g, SHARE=_FEW_BLOCK, NUM_SHARES=num_shares,
        BLOCK_S=triton.next_power_of_2(num_shares), UNIT_OFFSET=unit_offset, READS_RESIDUAL=reads_residual,
        num_warps=4 if block_r <= 64 else 8,
    )  # fmt: skip
    return total, normed, mask
