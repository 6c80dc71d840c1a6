"""GEMM-K in Triton: tiles of pattern-sorted rows run the union of their groups, then write or reduce once.

Programs of one launch never wait for each other: everything that must be finished first (zeros, the reductions of a
slab) is an earlier launch on the same stream.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from wide.kernels.device import device_facts
from wide.kernels.gemm_k._drain import drain
from wide.kernels.reordering import PatternReordering, Reordering

# Shared memory through which a finished tile is rearranged for wide writes; larger tiles leave in pieces.
_REARRANGED_BYTES = 32768
# How a finished tile reaches the output.
_STORE, _REDUCE, _ADD = 0, 1, 2


class _Launch(NamedTuple):
    """One launch: where its columns start and end in W and in `out`, and which super-block (_ADD only)."""

    out: torch.Tensor
    column: int
    out_column: int
    num_columns: int
    writes: int
    bias: torch.Tensor | None = None
    block: int = 0


def gemm_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None,
    packed: Reordering | None,
    out_dtype: torch.dtype,
    deterministic: bool,
    tile: tuple[int, ...],
) -> torch.Tensor:
    """Run `gemm_k_reference`; `tile` holds the fields of `KTile`."""
    num_rows, width = order.index.shape[1], weight.shape[0]
    num_blocks = order.counts.numel()
    out = torch.empty(num_rows, width, dtype=out_dtype, device=h.device)
    run = _Runner(h, weight, order, group_size, packed, tile)
    if num_blocks == 1 and order.keeps_empty:
        # One sort covers all groups: every row is in exactly one tile and is written once.
        run(_Launch(out, 0, 0, width, _STORE, bias))
        return out
    if deterministic:
        total = torch.zeros(num_rows, width, dtype=torch.float32, device=h.device)
        for block in range(num_blocks):
            run(_Launch(total, 0, 0, width, _ADD, block=block))
        drain(total, out, 0, bias, clears=False)
        return out
    slab = min(tile[6] or width, width)
    if out_dtype == torch.float32:
        out.zero_() if bias is None else out.copy_(bias.expand_as(out))
        for column in range(0, width, slab):
            run(_Launch(out, column, column, min(slab, width - column), _REDUCE))
        return out
    # One float32 slab is reused for all columns, so that reductions stay in the second-level cache.
    total = torch.zeros(num_rows, slab, dtype=torch.float32, device=h.device)
    for column in range(0, width, slab):
        columns = min(slab, width - column)
        run(_Launch(total, column, 0, columns, _REDUCE))
        drain(total[:, :columns], out, column, bias, clears=column + slab < width)
    return out


class _Runner(NamedTuple):
    """What all launches of one call share."""

    h: torch.Tensor
    weight: torch.Tensor
    order: PatternReordering
    group_size: int
    packed: Reordering | None
    tile: tuple[int, ...]

    def __call__(self, launch: _Launch) -> None:
        """Launch the kernel for some columns."""
        block_n, block_k, num_stages, num_warps, ctas_per_sm, weights_by, _, run = self.tile
        order, packed = self.order, self.packed
        tma = weights_by == 1
        parts = launch.num_columns // block_n
        # The last slab may be narrower: its run must divide it too.
        run = math.gcd(parts, run)
        pieces = triton.cdiv(order.block_m * block_n * 4, _REARRANGED_BYTES)
        capacity = order.tiles.shape[0] if launch.writes != _ADD else triton.cdiv(order.index.shape[1], order.block_m)
        grid = (min(capacity * parts // run, ctas_per_sm * device_facts(self.h.device).num_sms),)
        _gemm_k_kernel[grid](
            self.h,
            TensorDescriptor.from_tensor(self.weight, [block_n, block_k]) if tma else self.weight,
            launch.out,
            self.weight if launch.bias is None else launch.bias,
            order.index,
            order.patterns,
            order.counts,
            order.tiles,
            order.num_tiles,
            order.counts if packed is None else packed.offsets,
            order.counts if packed is None else packed.rank,
            order.index.shape[1],
            self.weight.shape[1] // self.group_size,
            parts // run,
            launch.column,
            launch.out_column,
            launch.block,
            self.h.stride(0),
            self.weight.stride(0),
            launch.out.stride(0),
            S=order.groups_per_block,
            G=self.group_size,
            BLOCK_M=order.block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            RUN=run,
            PIECES=min(4, pieces),
            WRITES=launch.writes,
            PACKED=packed is not None,
            HAS_BIAS=launch.bias is not None,
            BY_TMA=tma,
            PRECISION="ieee" if self.h.dtype == torch.float32 else "tf32",
            num_stages=num_stages,
            num_warps=num_warps,
        )


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _union_of(pattern, S: tl.constexpr):
    # Four bits for each group of the union, so that the product loop finds its group without a load.
    union = tl.reduce(pattern, 0, _either)
    groups = 0
    num_groups = 0
    for bit in tl.static_range(S):
        executes = (union >> bit) & 1
        groups |= (bit * executes) << (4 * num_groups)
        num_groups += executes
    return groups, num_groups


@triton.jit
def _write(
    OUT, BIAS, values, targets, inside, column, first, WRITES: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr
):
    channels = first + tl.arange(0, WIDTH)
    out = OUT + targets[:, None] + channels[None, :]
    if WRITES == 1:
        tl.atomic_add(out, values, mask=inside[:, None], sem="relaxed")
    else:
        if WRITES == 2:
            values += tl.load(out, mask=inside[:, None], other=0.0)
        if HAS_BIAS:
            values += tl.load(BIAS + column + channels).to(tl.float32)[None, :]
        tl.store(out, values.to(OUT.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _halves(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return values.reshape(ROWS, 2, WIDTH // 2).permute(0, 2, 1).split()


@triton.jit
def _write_tile(
    OUT, BIAS, total, targets, inside, column, WRITES: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    # A thread holds columns of every piece, so that cutting a tile moves nothing.
    if PIECES == 1:
        _write(OUT, BIAS, total, targets, inside, column, 0, WRITES, HAS_BIAS, WIDTH)
    else:
        HALF: tl.constexpr = WIDTH // 2
        left, right = _halves(total, ROWS, WIDTH)
        if PIECES == 2:
            _write(OUT, BIAS, left, targets, inside, column, 0, WRITES, HAS_BIAS, HALF)
            _write(OUT, BIAS, right, targets, inside, column, HALF, WRITES, HAS_BIAS, HALF)
        else:
            QUARTER: tl.constexpr = WIDTH // 4
            first, second = _halves(left, ROWS, HALF)
            third, fourth = _halves(right, ROWS, HALF)
            _write(OUT, BIAS, first, targets, inside, column, 0, WRITES, HAS_BIAS, QUARTER)
            _write(OUT, BIAS, second, targets, inside, column, QUARTER, WRITES, HAS_BIAS, QUARTER)
            _write(OUT, BIAS, third, targets, inside, column, HALF, WRITES, HAS_BIAS, QUARTER)
            _write(OUT, BIAS, fourth, targets, inside, column, HALF + QUARTER, WRITES, HAS_BIAS, QUARTER)


@triton.jit
def _gemm_k_kernel(
    H,
    W,
    OUT,
    BIAS,
    INDEX,
    PATTERNS,
    COUNTS,
    TILES,
    NUM_TILES,
    OFFSETS,
    RANK,
    M,
    N_G,
    runs,
    first_column,
    first_out_column,
    only_block,
    stride_h,
    stride_w,
    stride_out,
    S: tl.constexpr,
    G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
    PIECES: tl.constexpr,
    WRITES: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    STEPS: tl.constexpr = G // BLOCK_K
    ks = tl.arange(0, BLOCK_K)
    channels = tl.arange(0, BLOCK_N)
    if WRITES == 2:
        num_items = tl.cdiv(tl.load(COUNTS + only_block), BLOCK_M) * runs
    else:
        num_items = tl.load(NUM_TILES) * runs
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row_tile = item // runs
        block = only_block
        if WRITES != 2:
            block = tl.load(TILES + 2 * (item // runs))
            row_tile = tl.load(TILES + 2 * (item // runs) + 1)
        count = tl.load(COUNTS + block)
        places = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = places < count
        listed = block * M + places
        rows = tl.load(INDEX + listed, mask=inside, other=0).to(tl.int64)
        pattern = tl.load(PATTERNS + listed, mask=inside, other=0)
        groups, num_groups = _union_of(pattern, S)
        wide_pattern = tl.broadcast_to(pattern[:, None], (BLOCK_M, BLOCK_K))
        first_channel = block * (S * G)
        h_places = H + rows[:, None] * stride_h + ks[None, :]
        if not PACKED:
            h_places += first_channel
        # A tile without any group still writes its zeros: it multiplies nothing but masked rows.
        num_steps = tl.maximum(num_groups, 1) * STEPS
        part = (item % runs) * (RUN * BLOCK_N)
        step = 0
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # One loop over all column parts: the loads of the next part run while this one is written.
        for _ in range(0, num_steps * RUN):
            member = (groups >> (4 * (step // STEPS))) & 15
            channel = (step % STEPS) * BLOCK_K
            column = first_column + part
            if PACKED:
                executes = ((pattern >> member) & 1) != 0
                group = block * S + member
                packed_rows = tl.load(RANK + rows * N_G + group, mask=executes, other=0) + tl.load(OFFSETS + group)
                a_places = H + packed_rows.to(tl.int64)[:, None] * stride_h + (channel + ks)[None, :]
            else:
                a_places = h_places + (member * G + channel)
            a = tl.load(a_places, mask=((wide_pattern >> member) & 1) != 0, other=0.0)
            if BY_TMA:
                b = W.load([column, first_channel + member * G + channel])
            else:
                w_places = W + (column + channels).to(tl.int64)[:, None] * stride_w
                b = tl.load(w_places + (first_channel + member * G + channel + ks)[None, :])
            total = tl.dot(a, b.T, total, input_precision=PRECISION)
            step += 1
            if RUN > 1:
                ends = step == num_steps
                if ends:
                    targets = rows * stride_out + first_out_column + part
                    _write_tile(
                        OUT, BIAS, total, targets, inside, column, WRITES, HAS_BIAS, BLOCK_M, BLOCK_N, PIECES
                    )  # fmt: skip
                    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                step = tl.where(ends, 0, step)
                part = tl.where(ends, part + BLOCK_N, part)
        if RUN == 1:
            targets = rows * stride_out + first_out_column + part
            _write_tile(
                OUT, BIAS, total, targets, inside, first_column + part, WRITES, HAS_BIAS, BLOCK_M, BLOCK_N, PIECES
            )  # fmt: skip
