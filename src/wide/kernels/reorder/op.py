"""Reorder as operators of torch."""

from typing import Any

import torch

from wide.errors import ShapeError
from wide.kernels.dispatch import AnyShape, Backends
from wide.kernels.registration import operator
from wide.kernels.reorder.reference import reorder_patterns_reference, reorder_reference, reorder_sequences_reference
from wide.kernels.reorder.rows_reference import TILE_ROWS, UNIT_ROWS, num_words, reorder_rows_reference
from wide.kernels.reordering import PATTERN_GROUPS, PatternReordering, Reordering, RowReordering, SequenceReordering

Two = tuple[torch.Tensor, torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

BACKENDS = Backends("reorder", __package__, reorder_reference)
SEQUENCES_BACKENDS = Backends("reorder_sequences", __package__, reorder_sequences_reference)
PATTERNS_BACKENDS = Backends("reorder_patterns", __package__, reorder_patterns_reference)
ROWS_BACKENDS = Backends("reorder_rows", __package__, reorder_rows_reference)

MAX_GROUPS = 128
"""Groups that rows in one order may have; what four words hold."""


def reorder(mask: torch.Tensor, *, block_m: int = 128, backend: str) -> Reordering:
    """Return per group which rows of a mask, bool [M, N_G], any strides, execute it, ascending, over all tokens.

    Tiles have `block_m` rows, a power of two. Runs on the mask's device with fixed shapes and no host synchronisation
    (backend 'triton').
    """
    index, counts, offsets, tiles, num_tiles = _reorder(mask, block_m, backend)
    return Reordering(index, counts, offsets, tiles, num_tiles, block_m)


def reorder_sequences(mask: torch.Tensor, *, backend: str) -> SequenceReordering:
    """Return per sequence and group which positions execute it, ascending; masks are bool [B, T, N_G], any strides."""
    return SequenceReordering(*_reorder_sequences(mask, backend))


def reorder_patterns(
    mask: torch.Tensor, *, groups_per_block: int, block_m: int = 128, keeps_empty: bool = False, backend: str
) -> PatternReordering:
    """Return rows sorted by their pattern over super-blocks of neighbouring groups.

    Args:
        mask: True = execute, bool [M, N_G], any strides.
        groups_per_block: Groups in a super-block, s; 1 to 8.
        block_m: Rows in a tile of the GEMM that follows; a power of two.
        keeps_empty: Whether rows that execute no group of a super-block are listed too (first).
    """
    index, patterns, counts, tiles, num_tiles = _reorder_patterns(mask, block_m, groups_per_block, keeps_empty, backend)
    return PatternReordering(index, patterns, counts, tiles, num_tiles, block_m, groups_per_block, keeps_empty)


def reorder_rows(mask: torch.Tensor, *, backend: str) -> RowReordering:
    """Return rows in one order over all groups, with what rows and units of 64 rows execute.

    Args:
        mask: True = execute, bool [M, N_G] with N_G up to 128, any strides.

    Source: docs/results/operators.md (rare groups first).
    """
    return RowReordering(*_reorder_rows(mask, backend))


def _check(mask: torch.Tensor, dimensions: int, block_m: int = 1) -> None:
    if mask.dtype != torch.bool or mask.dim() != dimensions or 0 in mask.shape:
        raise ShapeError(
            f"reorder wants a bool mask with {dimensions} non-empty dimensions, got {mask.dtype} {tuple(mask.shape)}"
        )
    if block_m < 1 or block_m & (block_m - 1):
        raise ShapeError(f"block_m must be a power of two, got {block_m}; 64 and 128 are usual")


def _empty(mask: torch.Tensor, *shape: int) -> torch.Tensor:
    return mask.new_empty(shape, dtype=torch.int32)


def reorder_outputs(mask: torch.Tensor, block_m: int) -> Five:
    """Return memory for index, counts, offsets, tiles and number of tiles of `Reordering`."""
    rows, groups = mask.shape
    tiles = _empty(mask, groups * ((rows + block_m - 1) // block_m), 2)
    return _empty(mask, groups, rows), _empty(mask, groups), _empty(mask, groups + 1), tiles, _empty(mask, 2)


@operator(reorder_outputs)
def _reorder(mask: torch.Tensor, block_m: int, backend: str) -> Five:
    _check(mask, 2, block_m)
    return BACKENDS.run(backend, mask.device, AnyShape(mask.dtype), mask, block_m=block_m)


def sequences_outputs(mask: torch.Tensor) -> Two:
    """Return memory for index and counts of `SequenceReordering`."""
    sequences, tokens, groups = mask.shape
    return _empty(mask, sequences, groups, tokens), _empty(mask, sequences, groups)


@operator(sequences_outputs)
def _reorder_sequences(mask: torch.Tensor, backend: str) -> Two:
    _check(mask, 3)
    return SEQUENCES_BACKENDS.run(backend, mask.device, AnyShape(mask.dtype), mask)


def patterns_outputs(mask: torch.Tensor, block_m: int, groups_per_block: int) -> Five:
    """Return memory for index, patterns, counts, tiles and number of tiles of `PatternReordering`."""
    rows, groups = mask.shape
    blocks = (groups + groups_per_block - 1) // groups_per_block
    tiles = _empty(mask, blocks * ((rows + block_m - 1) // block_m), 2)
    return _empty(mask, blocks, rows), _empty(mask, blocks, rows), _empty(mask, blocks), tiles, _empty(mask, 1)


@operator(patterns_outputs)
def _reorder_patterns(mask: torch.Tensor, block_m: int, groups_per_block: int, keeps_empty: bool, backend: str) -> Five:
    _check(mask, 2, block_m)
    if not 1 <= groups_per_block <= PATTERN_GROUPS:
        raise ShapeError(f"groups_per_block must lie in 1..{PATTERN_GROUPS}, got {groups_per_block}")
    options: dict[str, Any] = {"block_m": block_m, "groups_per_block": groups_per_block, "keeps_empty": keeps_empty}
    return PATTERNS_BACKENDS.run(backend, mask.device, AnyShape(mask.dtype), mask, **options)


def rows_outputs(mask: torch.Tensor) -> Four:
    """Return memory for the fields of `RowReordering`."""
    rows, groups = mask.shape
    tiles, words = (rows + TILE_ROWS - 1) // TILE_ROWS, num_words(groups)
    unions = _empty(mask, TILE_ROWS // UNIT_ROWS * tiles, words)
    return _empty(mask, rows), _empty(mask, words, rows), unions, _empty(mask, tiles)


@operator(rows_outputs)
def _reorder_rows(mask: torch.Tensor, backend: str) -> Four:
    if mask.dtype != torch.bool or mask.dim() != 2 or 0 in mask.shape or mask.shape[1] > MAX_GROUPS:
        raise ShapeError(
            f"reorder_rows wants a bool mask [M, N_G] of 1 to {MAX_GROUPS} groups, got {mask.dtype} {tuple(mask.shape)}"
        )
    return ROWS_BACKENDS.run(backend, mask.device, AnyShape(mask.dtype), mask)
