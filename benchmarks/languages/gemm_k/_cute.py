"""GEMM-K on CuTe, over rows by patterns of some groups or in one order over all of them.

On Hopper, where each row is in one tile, by wgmma and tensor maps (gemm_k_cute_hopper.cu), elsewhere by mma.sync
(gemm_k_cute.cu).
"""

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.languages.cute import CuteTile, cute_obstacle, cute_tile, function
from wide.kernels.device import HALF, HOPPER_STEP, device_facts
from wide.kernels.dispatch import Candidate, require
from wide.kernels.gemm_k._cuda import STORED_TILE
from wide.kernels.gemm_k._triton import in_one_order
from wide.kernels.gemm_k.op import BACKENDS, ROWS_BACKENDS, KShape
from wide.kernels.native.launch import misaligned, tensor_map
from wide.kernels.reorder.op import MAX_GROUPS
from wide.kernels.reorder.rows_reference import TILE_ROWS
from wide.kernels.reordering import BLOCK_M, PATTERN_GROUPS, PatternReordering, RowReordering

SOURCE = Path(__file__).with_name("gemm_k_cute.cu")
HOPPER_SOURCE = Path(__file__).with_name("gemm_k_cute_hopper.cu")
_LEVELS = (1, 2)


def variant(
    tile: CuteTile, dtype: torch.dtype, *, group_size: int, width: int, block_m: int, is_stored: bool
) -> dict[str, int]:
    """Return what is compiled in for a shape.

    Args:
        tile: How it skips and loads.
        dtype: Of rows and weights.
        group_size: Channels of a group, G.
        width: Of the output, N.
        block_m: Rows that the order's tiles were made for.
        is_stored: Whether each row is in one tile.
    """
    return {
        "FLOAT16": int(dtype == torch.float16),
        "LEVEL": tile.level,
        "STORES": int(is_stored),
        "BM": 128 if block_m >= 128 else 64,
        "BN": 128 if width > 64 else 64,
        "BK": 64 if group_size > 32 else 32,
        "STAGES": tile.num_stages or 3,
    }


def hopper_variant(tile: CuteTile, dtype: torch.dtype, words: int, *, is_drawn: bool) -> dict[str, int]:
    """Return what is compiled in for rows that are in one tile each, on Hopper.

    Args:
        tile: How it skips and loads.
        dtype: Of rows and weights.
        words: Of 32 groups that say what a row executes.
        is_drawn: Whether programs draw their tiles, rather than have them dealt out.
    """
    return {
        "FLOAT16": int(dtype == torch.float16),
        "LEVEL": tile.level,
        "WORDS": words,
        "STAGES": tile.num_stages or 4,
        "DRAWN": int(is_drawn),
    }


def supports(shape: KShape) -> str | None:
    """Return why no device runs a shape, or None."""
    if shape.dtype in HALF and shape.group_size % 8 == 0 and shape.width % 8 == 0:
        return None
    return (
        "the kernel on CuTe wants half precision, groups of a multiple of 8 channels and a width of one; got "
        f"{shape.dtype}, G={shape.group_size}, width {shape.width}"
    )


def candidates(*_: object) -> Iterator[Candidate]:
    """Yield both levels over one sort of some groups, and over one for each group as in the paper."""
    for block in (PATTERN_GROUPS, 1):
        for level in _LEVELS:
            yield Candidate(CuteTile(level), BLOCK_M, block)


def supports_rows(shape: KShape) -> str | None:
    """Return why no device runs a shape over rows in one order, or None."""
    return supports(shape) if shape.num_groups <= MAX_GROUPS else f"{shape.num_groups} groups are too many"


def candidates_of_rows(shape: KShape, *_: object) -> tuple[Candidate, ...]:
    """Return the one level that rows in one order have."""
    return (Candidate(CuteTile(), BLOCK_M, shape.num_groups),)


@ROWS_BACKENDS.register("cute", needs=cute_obstacle, supports=supports_rows, candidates=candidates_of_rows)
@BACKENDS.register("cute", needs=cute_obstacle, supports=supports, candidates=candidates)
def gemm_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: PatternReordering | RowReordering,
    *,
    group_size: int,
    bias: torch.Tensor | None,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `gemm_k_reference`; the tile is a `CuteTile`.

    What several tiles have of a row is added up in float32, in any order.
    """
    require(misaligned({"h": h, "weight": weight}, (bias,)))
    chosen = cute_tile(tile, _LEVELS)
    shape = h.shape[0], weight.shape[0]
    is_stored = isinstance(order, RowReordering) or (order.counts.numel() == 1 and order.keeps_empty)
    out = h.new_empty(shape) if is_stored else h.new_zeros(shape, dtype=torch.float32)
    facts = device_facts(h.device)
    if facts.capability == 90 and is_stored and group_size % HOPPER_STEP == 0:
        # With few groups tiles are short and cost nearly the same.
        drawn = order.index.new_zeros(1) if isinstance(order, RowReordering) else None
        order = in_one_order(order)
        weights = tensor_map(weight, STORED_TILE[1], HOPPER_STEP, name="gemm_k", instead="torch")
        compiled = hopper_variant(chosen, h.dtype, order.words.shape[0], is_drawn=drawn is not None)
        run = function(HOPPER_SOURCE, h.device, **compiled)
        counter = 0 if drawn is None else drawn.data_ptr()
        run(h, bias, out, *order, group_size, ctypes.addressof(weights), facts.num_sms, counter)
        return out
    if isinstance(order, RowReordering):
        block_m = TILE_ROWS
        lists: tuple[object, ...] = order.index, order.words, None, order.items, None, len(order.words), block_m, 0
    else:
        block_m = order.block_m
        many = order.tiles, order.num_tiles, 1, block_m, order.groups_per_block
        lists = order.index, order.patterns, order.counts, *many
    compiled = variant(chosen, h.dtype, group_size=group_size, width=shape[1], block_m=block_m, is_stored=is_stored)
    run = function(SOURCE, h.device, **compiled)
    run(h, weight, bias if is_stored else None, out, *lists, group_size)
    if is_stored:
        return out
    return (out if bias is None else out.add_(bias)).to(h.dtype)
