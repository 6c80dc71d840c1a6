"""GEMM-K in TileLang: tiles of pattern-sorted rows run the union of their groups, then write or reduce once.

One loop runs over the channels of all groups of the union: loads of the next group begin while one is multiplied.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import tilelang.language as T
import torch

from benchmarks.languages.tilelang import warp_policy
from wide.kernels.device import HALF, tilelang_obstacle
from wide.kernels.dispatch import Candidate, require
from wide.kernels.gemm_k import _triton
from wide.kernels.gemm_k.op import BACKENDS, KShape
from wide.kernels.native.launch import misaligned
from wide.kernels.native.tilelang import is_for_hopper, kernel, stages_ahead
from wide.kernels.reordering import PatternReordering


def supports(shape: KShape) -> str | None:
    """Return why no device runs a shape, or None."""
    reason = None if shape.dtype in HALF else f"the kernel in TileLang wants half precision, got {shape.dtype}"
    return _triton.supports(shape) or reason


def candidates(shape: KShape, device: torch.device, few: bool) -> Iterator[Candidate]:
    """Yield the default tiles, with rows sorted as Triton's candidates are."""
    sorts = ((each.block_m, each.groups_per_block) for each in _triton.candidates(shape, device, few))
    for block_m, groups_per_block in dict.fromkeys(sorts):
        yield Candidate((), block_m, groups_per_block)


@BACKENDS.register("tilelang", needs=tilelang_obstacle, supports=supports, candidates=candidates)
def gemm_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `gemm_k_reference`; of the tile, a `KTile`, the first four fields and `slab` count."""
    require(misaligned({"h": h, "weight": weight}, (bias,)))
    sizes = KShape(h.dtype, h.shape[0], h.shape[1] // group_size, group_size, weight.shape[0])
    # What loads takes as many threads again: one block fills a multiprocessor.
    warps = 8 if order.block_m >= 128 else 4
    chosen = _triton.fitted_tile(tile, h.device, sizes, order.block_m, num_warps=warps)
    num_rows, width = h.shape[0], weight.shape[0]
    out = h.new_empty(num_rows, width)
    shape = {"groups_per_block": order.groups_per_block, "block_m": order.block_m}
    unions = torch.empty_like(order.tiles)
    unite = kernel(make_unions, h.device, num_blocks=order.counts.numel(), **shape)
    unite(order.patterns, order.counts, order.tiles, order.num_tiles, unions)
    stored = order.counts.numel() == 1 and order.keeps_empty
    slab = width if stored else min(chosen.slab or width, width)
    # One float32 slab is reused for all columns, so that reductions stay in the second-level cache.
    total = out if stored else torch.empty(num_rows, slab, dtype=torch.float32, device=h.device)
    for column in range(0, width, slab):
        columns = min(slab, width - column)
        target = total if columns == slab else total.view(-1)[: num_rows * columns].view(num_rows, columns)
        if not stored:
            target.zero_()
        run = kernel(
            make_gemm_k,
            h.device,
            width=columns,
            depth=weight.shape[1],
            group_size=group_size,
            strides=(h.stride(0), weight.stride(0)),
            dtype=str(h.dtype).removeprefix("torch."),
            stored=stored,
            biased=bias is not None,
            tile=tuple(chosen[:4]),
            **shape,
        )
        some = slice(column, column + columns)
        run(
            h,
            weight[some],
            out[0, some] if bias is None else bias[some],
            order.index,
            order.patterns,
            order.counts,
            order.tiles,
            order.num_tiles,
            unions,
            target,
        )
        if not stored:
            out[:, some] = target if bias is None else target + bias[some]
    return out


def make_unions(*, num_blocks: int, groups_per_block: int, block_m: int) -> Any:
    """Return the kernel that finds, for each listed tile, the groups of its rows, four bits each, and their number."""
    num_rows, capacity = T.dynamic("num_rows"), T.dynamic("capacity")

    @T.prim_func
    def unions(
        PATTERNS: T.Tensor((num_blocks, num_rows), "int32"),
        COUNTS: T.Tensor((num_blocks,), "int32"),
        TILES: T.Tensor((capacity, 2), "int32"),
        NUM_TILES: T.Tensor((1,), "int32"),
        UNIONS: T.Tensor((capacity, 2), "int32"),
    ):
        with T.Kernel(capacity, threads=32) as program:
            listed = T.alloc_fragment((block_m,), "int32")
            union = T.alloc_fragment((1,), "int32")
            groups = T.alloc_var("int32", 0)
            number = T.alloc_var("int32", 0)
            if program < NUM_TILES[0]:
                block = TILES[program, 0]
                for i in T.Parallel(block_m):
                    # Rows beyond the count are the last one again.
                    place = T.min(TILES[program, 1] * block_m + i, COUNTS[block] - 1)
                    listed[i] = PATTERNS[block, place]
                T.reduce_bitor(listed, union, dim=0)
                for bit in T.serial(groups_per_block):
                    if (union[0] >> bit) & 1 != 0:
                        groups = groups | (bit << (4 * number))
                        number = number + 1
                UNIONS[program, 0] = groups
                UNIONS[program, 1] = number

    return unions


def make_gemm_k(
    *,
    width: int,
    depth: int,
    group_size: int,
    groups_per_block: int,
    strides: tuple[int, int],
    dtype: str,
    stored: bool,
    biased: bool,
    block_m: int,
    tile: tuple[int, int, int, int],
) -> Any:
    """Return the kernel; the numbers of rows and of tiles are its arguments' to say."""
    block_n, block_k, num_stages, num_warps = tile
    num_rows, capacity = T.dynamic("num_rows"), T.dynamic("capacity")
    blocks = -(-depth // (group_size * groups_per_block))
    parts, steps = width // block_n, group_size // block_k
    policy = warp_policy(block_m, block_n, num_warps)
    splits, ahead = is_for_hopper(), stages_ahead(num_stages)

    @T.prim_func
    def gemm_k(
        H: T.StridedTensor((num_rows, depth), (strides[0], 1), dtype),
        W: T.StridedTensor((width, depth), (strides[1], 1), dtype),
        BIAS: T.Tensor((width,), dtype),
        INDEX: T.Tensor((blocks, num_rows), "int32"),
        PATTERNS: T.Tensor((blocks, num_rows), "int32"),
        COUNTS: T.Tensor((blocks,), "int32"),
        TILES: T.Tensor((capacity, 2), "int32"),
        NUM_TILES: T.Tensor((1,), "int32"),
        UNIONS: T.Tensor((capacity, 2), "int32"),
        OUT: T.Tensor((num_rows, width), dtype if stored else "float32"),
    ):
        with T.Kernel(capacity * parts, threads=32 * num_warps) as program:
            a = T.alloc_shared((block_m, block_k), dtype)
            b = T.alloc_shared((block_n, block_k), dtype)
            acc = T.alloc_fragment((block_m, block_n), "float32")
            done = T.alloc_shared((block_m, block_n), dtype)
            if program // parts < NUM_TILES[0]:
                block = TILES[program // parts, 0]
                first = TILES[program // parts, 1] * block_m
                column = program % parts * block_n
                if splits:
                    T.annotate_producer_reg_dealloc(40)
                    T.annotate_consumer_reg_alloc(208)
                T.clear(acc)
                for step in T.Pipelined(UNIONS[program // parts, 1] * steps, num_stages=ahead):
                    member = (UNIONS[program // parts, 0] >> (4 * (step // steps))) & 15
                    channel = (block * groups_per_block + member) * group_size + step % steps * block_k
                    for i, j in T.Parallel(block_m, block_k):
                        place = T.min(first + i, COUNTS[block] - 1)
                        # Channels that a row skips may hold anything.
                        executes = (PATTERNS[block, place] >> member) & 1 != 0
                        a[i, j] = T.if_then_else(executes, H[INDEX[block, place], channel + j], 0)
                    T.copy(W[column, channel], b)
                    T.gemm(a, b, acc, transpose_B=True, policy=policy)
                if stored:
                    if biased:
                        for i, j in T.Parallel(block_m, block_n):
                            acc[i, j] += BIAS[column + j]
                    T.copy(acc, done)
                    for i, j in T.Parallel(block_m, block_n):
                        if first + i < COUNTS[block]:
                            OUT[INDEX[block, first + i], column + j] = done[i, j]
                else:
                    for i, j in T.Parallel(block_m, block_n):
                        if first + i < COUNTS[block]:
                            T.atomic_add(OUT[INDEX[block, first + i], column + j], acc[i, j])

    return gemm_k
