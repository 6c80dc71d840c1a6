"""Decode GEMMs in TileLang: weights of groups that no row executes are never read."""

import math
from collections.abc import Sequence
from typing import Any

import tilelang.language as T
import torch

from benchmarks.languages.tilelang import activate
from wide.kernels.device import HALF, device_facts, tilelang_obstacle
from wide.kernels.gemv._triton import GemvTile, default_mn_tile
from wide.kernels.gemv.op import K_BACKENDS, MN_BACKENDS, GemvShape
from wide.kernels.native.tilelang import kernel

# Input channels that threads hold at a time; of four rows more would spill.
_FRAGMENT = 1024


def supports(shape: GemvShape) -> str | None:
    """Return why no device runs a shape, or None."""
    if shape.dtype in HALF and shape.size % 16 == 0:
        return None
    return (
        "the kernel in TileLang wants half precision and multiples of 16 input channels, got "
        f"{shape.dtype} and {shape.size}"
    )


@MN_BACKENDS.register("tilelang", needs=tilelang_obstacle, supports=supports)
def gemv_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    zero_skipped: bool,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `gemv_mn_reference` in one kernel; the tile is a `GemvTile`."""
    chosen = GemvTile(*tile) if tile else default_mn_tile(device_facts(x.device), is_gated=up_weight is not None)
    block_k = min(chosen.block_k, _FRAGMENT)
    width = weight.shape[0]
    out = x.new_empty(x.shape[0], width)
    up = weight if up_weight is None else up_weight
    run = kernel(
        make_gemv_mn,
        x.device,
        num_rows=x.shape[0],
        width=width,
        depth=x.shape[1],
        num_groups=mask.shape[1],
        strides=(x.stride(0), weight.stride(0), up.stride(0), mask.stride(0)),
        dtype=str(x.dtype).removeprefix("torch."),
        gated=up_weight is not None,
        biased=bias is not None,
        activation=activation,
        zero_skipped=zero_skipped,
        tile=(math.gcd(chosen.block_n, width // mask.shape[1]), block_k, chosen.num_warps),
    )
    run(
        x,
        weight,
        up,
        out[0] if bias is None else bias,
        out[0] if up_bias is None else up_bias,
        mask.view(torch.uint8),
        out,
    )
    return out


@K_BACKENDS.register("tilelang", needs=tilelang_obstacle, supports=supports)
def gemv_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `gemv_k_reference` in one kernel; the tile is a `GemvTile`."""
    # All threads of a block share one group's weights at a time.
    chosen = GemvTile(*tile) if tile else GemvTile(block_n=1, block_k=2048, num_warps=1)
    out = h.new_empty(h.shape[0], weight.shape[0])
    run = kernel(
        make_gemv_k,
        h.device,
        num_rows=h.shape[0],
        width=weight.shape[0],
        depth=h.shape[1],
        num_groups=mask.shape[1],
        strides=(h.stride(0), weight.stride(0), mask.stride(0)),
        dtype=str(h.dtype).removeprefix("torch."),
        biased=bias is not None,
        tile=tuple(chosen),
    )
    run(h, weight, out[0] if bias is None else bias, mask.view(torch.uint8), out)
    return out


def make_gemv_mn(
    *,
    num_rows: int,
    width: int,
    depth: int,
    num_groups: int,
    strides: tuple[int, int, int, int],
    dtype: str,
    gated: bool,
    biased: bool,
    activation: str,
    zero_skipped: bool,
    tile: tuple[int, int, int],
) -> Any:
    """Return the kernel."""
    block_n, block_k, num_warps = tile
    size = width // num_groups

    @T.prim_func
    def gemv_mn(
        X: T.StridedTensor((num_rows, depth), (strides[0], 1), dtype),
        W: T.StridedTensor((width, depth), (strides[1], 1), dtype),
        W_UP: T.StridedTensor((width, depth), (strides[2], 1), dtype),
        BIAS: T.Tensor((width,), dtype),
        UP_BIAS: T.Tensor((width,), dtype),
        MASK: T.StridedTensor((num_rows, num_groups), (strides[3], 1), "uint8"),
        OUT: T.Tensor((num_rows, width), dtype),
    ):
        with T.Kernel(width // block_n, threads=32 * num_warps) as program:
            parts = T.alloc_fragment((num_rows, block_n, block_k), "float32")
            up_parts = T.alloc_fragment((num_rows, block_n, block_k), "float32")
            sums = T.alloc_fragment((num_rows, block_n), "float32")
            up_sums = T.alloc_fragment((num_rows, block_n), "float32")
            first = program * block_n
            group = first // size
            if _any_row(MASK, group, num_rows):
                T.clear(parts)
                if gated:
                    T.clear(up_parts)
                for step in T.unroll(T.ceildiv(depth, block_k)):
                    for m, i, j in T.Parallel(num_rows, block_n, block_k):
                        k = step * block_k + j
                        if depth % block_k:
                            if k < depth:
                                parts[m, i, j] += T.cast(W[first + i, k], "float32") * T.cast(X[m, k], "float32")
                        else:
                            parts[m, i, j] += T.cast(W[first + i, k], "float32") * T.cast(X[m, k], "float32")
                    if gated:
                        for m, i, j in T.Parallel(num_rows, block_n, block_k):
                            k = step * block_k + j
                            if depth % block_k:
                                if k < depth:
                                    up_parts[m, i, j] += T.cast(W_UP[first + i, k], "float32") * T.cast(
                                        X[m, k], "float32"
                                    )
                            else:
                                up_parts[m, i, j] += T.cast(W_UP[first + i, k], "float32") * T.cast(X[m, k], "float32")
                T.reduce_sum(parts, sums, dim=2)
                if biased:
                    for m, i in T.Parallel(num_rows, block_n):
                        sums[m, i] += BIAS[first + i]
                for m, i in T.Parallel(num_rows, block_n):
                    sums[m, i] = activate(sums[m, i], activation)
                if gated:
                    T.reduce_sum(up_parts, up_sums, dim=2)
                    if biased:
                        for m, i in T.Parallel(num_rows, block_n):
                            up_sums[m, i] += UP_BIAS[first + i]
                    for m, i in T.Parallel(num_rows, block_n):
                        sums[m, i] *= up_sums[m, i]
                for m, i in T.Parallel(num_rows, block_n):
                    if zero_skipped:
                        OUT[m, first + i] = T.if_then_else(MASK[m, group] != 0, sums[m, i], 0.0)
                    else:
                        OUT[m, first + i] = sums[m, i]
            else:
                if zero_skipped:
                    for m, i in T.Parallel(num_rows, block_n):
                        OUT[m, first + i] = 0.0

    return gemv_mn


def make_gemv_k(
    *,
    num_rows: int,
    width: int,
    depth: int,
    num_groups: int,
    strides: tuple[int, int, int],
    dtype: str,
    biased: bool,
    tile: tuple[int, int, int],
) -> Any:
    """Return the kernel."""
    block_n, block_k, num_warps = tile
    size = depth // num_groups
    # The largest power of two that divides a group, of which a thread loads 16 bytes of a line.
    segment = min(size & -size, block_k, 256 * num_warps)
    segments, ahead = depth // segment, block_k // segment

    @T.prim_func
    def gemv_k(
        H: T.StridedTensor((num_rows, depth), (strides[0], 1), dtype),
        W: T.StridedTensor((width, depth), (strides[1], 1), dtype),
        BIAS: T.Tensor((width,), dtype),
        MASK: T.StridedTensor((num_rows, num_groups), (strides[2], 1), "uint8"),
        OUT: T.Tensor((num_rows, width), dtype),
    ):
        with T.Kernel(T.ceildiv(width, block_n), threads=32 * num_warps) as program:
            parts = T.alloc_fragment((num_rows, block_n, segment), "float32")
            sums = T.alloc_fragment((num_rows, block_n), "float32")
            weights = T.alloc_fragment((ahead, block_n, segment), dtype)
            T.clear(parts)
            for turn in T.serial(T.ceildiv(segments, ahead)):
                # First loads alone, so that those of all segments are under way; conditions of elements would not skip.
                for place in T.unroll(ahead):
                    at = turn * ahead + place
                    if (at < segments) & _any_row(MASK, T.min(at, segments - 1) * segment // size, num_rows):
                        for i, j in T.Parallel(block_n, segment):
                            channel = T.min(program * block_n + i, width - 1)
                            weights[place, i, j] = W[channel, at * segment + j]
                for place in T.unroll(ahead):
                    at = turn * ahead + place
                    for m in T.unroll(num_rows):
                        # Channels that a row skips may hold anything.
                        if (at < segments) & (MASK[m, T.min(at, segments - 1) * segment // size] != 0):
                            for i, j in T.Parallel(block_n, segment):
                                parts[m, i, j] += T.cast(weights[place, i, j], "float32") * T.cast(
                                    H[m, at * segment + j], "float32"
                                )
            T.reduce_sum(parts, sums, dim=2)
            for m, i in T.Parallel(num_rows, block_n):
                if program * block_n + i < width:
                    if biased:
                        OUT[m, program * block_n + i] = sums[m, i] + BIAS[program * block_n + i]
                    else:
                        OUT[m, program * block_n + i] = sums[m, i]

    return gemv_k


def _any_row(mask: Any, group: Any, num_rows: int) -> Any:
    """Return whether any row executes a group."""
    runs = mask[0, group]
    for row in range(1, num_rows):
        runs = runs | mask[row, group]
    return runs != 0
