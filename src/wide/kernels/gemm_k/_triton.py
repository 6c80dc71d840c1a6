"""GEMM-K in Triton: tiles of pattern-sorted rows run the union of their groups, then write or reduce once."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from wide.kernels.device import device_facts
from wide.kernels.reordering import PatternReordering, Reordering

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
        _drain(total, out, 0, bias, clears=False)
        return out
    slab = min(tile[-1] or width, width)
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
        _drain(total[:, :columns], out, column, bias, clears=column + slab < width)
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
        block_n, block_k, num_stages, num_warps, ctas_per_sm, weights_by, _ = self.tile
        order, packed = self.order, self.packed
        tma = weights_by == 1
        parts = launch.num_columns // block_n
        capacity = order.tiles.shape[0] if launch.writes != _ADD else triton.cdiv(order.index.shape[1], order.block_m)
        grid = (min(capacity * parts, ctas_per_sm * device_facts(self.h.device).num_sms),)
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
            parts,
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
    parts,
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
        num_tiles = tl.cdiv(tl.load(COUNTS + only_block), BLOCK_M) * parts
    else:
        num_tiles = tl.load(NUM_TILES) * parts
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row_tile = tile // parts
        block = only_block
        if WRITES != 2:
            block = tl.load(TILES + 2 * (tile // parts))
            row_tile = tl.load(TILES + 2 * (tile // parts) + 1)
        count = tl.load(COUNTS + block)
        places = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        listed = block * M + places
        rows = tl.load(INDEX + listed, mask=places < count, other=0).to(tl.int64)
        pattern = tl.load(PATTERNS + listed, mask=places < count, other=0)
        groups, num_groups = _union_of(pattern, S)
        part = (tile % parts) * BLOCK_N
        column = first_column + part
        first_channel = block * (S * G)
        h_places = H + rows[:, None] * stride_h + ks[None, :]
        if not PACKED:
            h_places += first_channel
        w_places = W
        if not BY_TMA:
            w_places = W + (column + channels).to(tl.int64)[:, None] * stride_w + (first_channel + ks)[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, num_groups * STEPS):
            member = (groups >> (4 * (step // STEPS))) & 15
            channel = (step % STEPS) * BLOCK_K
            executes = ((pattern >> member) & 1) != 0
            if PACKED:
                group = block * S + member
                packed_rows = tl.load(RANK + rows * N_G + group, mask=executes, other=0) + tl.load(OFFSETS + group)
                a_places = H + packed_rows.to(tl.int64)[:, None] * stride_h + (channel + ks)[None, :]
            else:
                a_places = h_places + (member * G + channel)
            a = tl.load(a_places, mask=executes[:, None], other=0.0)
            if BY_TMA:
                b = W.load([column, first_channel + member * G + channel])
            else:
                b = tl.load(w_places + (member * G + channel))
            total = tl.dot(a, b.T, total, input_precision=PRECISION)
        out = OUT + (rows * stride_out + first_out_column + part)[:, None] + channels[None, :]
        inside = (places < count)[:, None]
        if WRITES == 1:
            tl.atomic_add(out, total, mask=inside, sem="relaxed")
        else:
            if WRITES == 2:
                total += tl.load(out, mask=inside, other=0.0)
            if HAS_BIAS:
                total += tl.load(BIAS + column + channels).to(tl.float32)[None, :]
            tl.store(out, total.to(OUT.dtype.element_ty), mask=inside)


def _drain(total: torch.Tensor, out: torch.Tensor, column: int, bias: torch.Tensor | None, *, clears: bool) -> None:
    """Write float32 columns (plus bias) to columns of `out` from `column` on; optionally leave zeros behind."""
    num_rows, num_columns = total.shape
    block = min(1024, triton.next_power_of_2(num_columns))
    grid = (triton.cdiv(num_rows, 4), triton.cdiv(num_columns, block))
    _drain_kernel[grid](
        total,
        out,
        out if bias is None else bias,
        num_rows,
        num_columns,
        column,
        total.stride(0),
        out.stride(0),
        HAS_BIAS=bias is not None,
        CLEARS=clears,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _drain_kernel(
    TOTAL,
    OUT,
    BIAS,
    M,
    N,
    first_column,
    stride_total,
    stride_out,
    HAS_BIAS: tl.constexpr,
    CLEARS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * 4 + tl.arange(0, 4)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    places = TOTAL + rows.to(tl.int64)[:, None] * stride_total + columns[None, :]
    values = tl.load(places, mask=inside, other=0.0)
    if CLEARS:
        tl.store(places, tl.zeros_like(values), mask=inside)
    if HAS_BIAS:
        values += tl.load(BIAS + first_column + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out = OUT + rows.to(tl.int64)[:, None] * stride_out + (first_column + columns)[None, :]
    tl.store(out, values.to(OUT.dtype.element_ty), mask=inside)
