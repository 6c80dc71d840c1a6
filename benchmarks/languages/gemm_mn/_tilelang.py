"""GEMM-MN in TileLang: one block a row tile and part of a group; blocks beyond the listed tiles end at once.

On sm_90 its compiler makes half of the threads load: rows by gathering copies, weights by tensor-memory access.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import tilelang.language as T
import torch

from benchmarks.languages.tilelang import activate, warp_policy
from wide.kernels.clear_skipped.op import cleared
from wide.kernels.device import HALF, device_facts, tilelang_obstacle
from wide.kernels.dispatch import Candidate, largest_tile, require
from wide.kernels.gemm_mn._triton import MnTile
from wide.kernels.gemm_mn.op import BACKENDS, MnShape
from wide.kernels.native.launch import misaligned
from wide.kernels.native.tilelang import is_for_hopper, kernel
from wide.kernels.reordering import BLOCK_M, Reordering

# More rows do not fit into shared memory.
_MAX_BLOCK_M = 128


def default_tile(device: torch.device, *, group_size: int, block_m: int, gated: bool) -> MnTile:
    """Return a tile that fits the device and spills nothing."""
    capability = device_facts(device).capability
    if capability == 90 and block_m >= 128 and not gated and group_size % 256 == 0:
        # Fewer rows are loaded twice; a fourth stage does not fit.
        return MnTile(256, 64, 3, 8)
    # On sm_90 those who multiply have the registers of those who load; elsewhere 512 threads share them alike.
    block_n = largest_tile(group_size, 64 if gated and capability != 90 else 128)
    warps = 8 if block_m >= 128 else 4
    if capability in (89, 120):
        return MnTile(block_n, 32, 3, warps)
    return MnTile(block_n, 64, 4 if capability >= 90 else 3, warps)


def supports(shape: MnShape) -> str | None:
    """Return why no device runs a shape, or None."""
    fits = shape.group_size % 16 == 0 and shape.depth > 0 and shape.depth % 8 == 0
    if shape.dtype in HALF and fits and 16 <= shape.block_m <= _MAX_BLOCK_M:
        return None
    return (
        "the kernel in TileLang wants half precision, K a multiple of 8, groups of a multiple of 16 channels and tiles "
        f"of 16 to {_MAX_BLOCK_M} rows; got {shape.dtype}, K={shape.depth}, G={shape.group_size} and tiles of "
        f"{shape.block_m}"
    )


def candidates(*_: object) -> Iterator[Candidate]:
    """Yield the default tiles."""
    for block_m in (BLOCK_M, BLOCK_M // 2):
        yield Candidate((), block_m)


@BACKENDS.register("tilelang", needs=tilelang_obstacle, supports=supports, candidates=candidates)
def gemm_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: Reordering,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    mask: torch.Tensor | None,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `gemm_mn_reference`; of the tile, an `MnTile`, the first four fields count."""
    require(misaligned({"x": x, "weight": weight, "up_weight": up_weight}, (bias, up_bias)))
    size, gated = weight.shape[0] // order.counts.numel(), up_weight is not None
    default = default_tile(x.device, group_size=size, block_m=order.block_m, gated=gated)
    chosen = MnTile(*tile) if tile else default
    if chosen.block_n < 16 or size % chosen.block_n:
        require(f"{chosen} does not work for groups of {size} channels; leave the tile out")
    out = x.new_empty(x.shape[0], weight.shape[0])
    run = kernel(
        make_gemm_mn,
        x.device,
        width=weight.shape[0],
        depth=x.shape[1],
        num_groups=order.counts.numel(),
        strides=(x.stride(0), weight.stride(0)),
        dtype=str(x.dtype).removeprefix("torch."),
        gated=gated,
        biased=(bias is not None, up_bias is not None),
        activation=activation,
        block_m=order.block_m,
        tile=tuple(chosen[:4]),
    )
    run(
        x,
        weight,
        weight if up_weight is None else up_weight,
        out[0] if bias is None else bias,
        out[0] if up_bias is None else up_bias,
        order.index,
        order.counts,
        order.tiles,
        order.num_tiles,
        out,
    )
    return out if mask is None else cleared(out, mask)


def make_gemm_mn(
    *,
    width: int,
    depth: int,
    num_groups: int,
    strides: tuple[int, int],
    dtype: str,
    gated: bool,
    biased: tuple[bool, bool],
    activation: str,
    block_m: int,
    tile: tuple[int, int, int, int],
) -> Any:
    """Return the kernel; the numbers of rows and of tiles are its arguments' to say."""
    block_n, block_k, num_stages, num_warps = tile
    num_rows, capacity = T.dynamic("num_rows"), T.dynamic("capacity")
    size = width // num_groups
    parts = size // block_n
    splits = is_for_hopper()
    policy = warp_policy(block_m, block_n, num_warps)

    @T.prim_func
    def gemm_mn(
        X: T.StridedTensor((num_rows, depth), (strides[0], 1), dtype),
        W: T.StridedTensor((width, depth), (strides[1], 1), dtype),
        W_UP: T.StridedTensor((width, depth), (strides[1], 1), dtype),
        BIAS: T.Tensor((width,), dtype),
        UP_BIAS: T.Tensor((width,), dtype),
        INDEX: T.Tensor((num_groups, num_rows), "int32"),
        COUNTS: T.Tensor((num_groups,), "int32"),
        TILES: T.Tensor((capacity, 2), "int32"),
        NUM_TILES: T.Tensor((2,), "int32"),
        OUT: T.Tensor((num_rows, width), dtype),
    ):
        with T.Kernel(capacity * parts, threads=32 * num_warps) as program:
            a = T.alloc_shared((block_m, block_k), dtype)
            # Gate and up in one buffer. A bug of the compiler (0.1.15): gathered rows are released once what the first
            # copy of a step loads has been read, so that must be read until the step ends.
            b = T.alloc_shared((block_n * (1 + gated), block_k), dtype)
            acc = T.alloc_fragment((block_m, block_n), "float32")
            acc_up = T.alloc_fragment((block_m, block_n), "float32")
            done = T.alloc_shared((block_m, block_n), dtype)
            if program // parts < NUM_TILES[0]:
                group = TILES[program // parts, 0]
                first = TILES[program // parts, 1] * block_m
                column = group * size + program % parts * block_n
                if splits:
                    T.annotate_producer_reg_dealloc(40)
                    T.annotate_consumer_reg_alloc(208)
                T.clear(acc)
                if gated:
                    T.clear(acc_up)
                for k in T.Pipelined(T.ceildiv(depth, block_k), num_stages=num_stages):
                    for i, j in T.Parallel(block_m, block_k):
                        # Rows beyond the count read the last one and are never stored.
                        row = INDEX[group, T.min(first + i, COUNTS[group] - 1)]
                        if depth % block_k:
                            a[i, j] = T.if_then_else(k * block_k + j < depth, X[row, k * block_k + j], 0)
                        else:
                            a[i, j] = X[row, k * block_k + j]
                    T.copy(W[column, k * block_k], b[0:block_n, :])
                    if gated:
                        # Both products are under way at once.
                        T.copy(W_UP[column, k * block_k], b[block_n : 2 * block_n, :])
                        T.gemm(a, b[0:block_n, :], acc, transpose_B=True, policy=policy, annotations={"wg_wait": -1})
                        T.gemm(a, b[block_n : 2 * block_n, :], acc_up, transpose_B=True, policy=policy)
                    else:
                        T.gemm(a, b, acc, transpose_B=True, policy=policy)
                if biased[0]:
                    for i, j in T.Parallel(block_m, block_n):
                        acc[i, j] += BIAS[column + j]
                for i, j in T.Parallel(block_m, block_n):
                    acc[i, j] = activate(acc[i, j], activation)
                if gated:
                    if biased[1]:
                        for i, j in T.Parallel(block_m, block_n):
                            acc_up[i, j] += UP_BIAS[column + j]
                    for i, j in T.Parallel(block_m, block_n):
                        acc[i, j] *= acc_up[i, j]
                T.copy(acc, done)
                for i, j in T.Parallel(block_m, block_n):
                    if first + i < COUNTS[group]:
                        OUT[INDEX[group, first + i], column + j] = done[i, j]

    return gemm_mn
