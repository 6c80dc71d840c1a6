"""What reorder hands to the other operators: device tensors of fixed shape, whatever the mask holds."""

from typing import NamedTuple

import torch

BLOCK_M = 128
"""Rows of a tile that sorts are made for where nothing else was measured."""
PATTERN_GROUPS = 8
"""Most groups that one sort by patterns covers, one bit of a byte each."""


class Reordering(NamedTuple):
    """Per group the ascending list of rows that execute it, over all tokens (for GEMMs).

    Entries beyond a count are unspecified. M = rows, N_G = groups, BM = `block_m`.

    Args:
        index: Row numbers, int32 [N_G, M]; the first `counts[g]` of row g are meant.
        counts: Active rows of each group, int32 [N_G].
        offsets: Exclusive sum of the counts, int32 [N_G + 1]: where a group starts in packed tensors.
        tiles: (group, row tile) of each row tile, int32 [N_G * ceil(M / BM), 2], neighbours share rows and weights;
            short tiles, of at most BM / 2 rows, come last, and of these thin ones, of at most BM / 4.
        num_tiles: How many tiles are meant, and how many of them are short, int32 [2].
    """

    # Nobody searches these tuples, so hiding tuple.index is harmless.
    index: torch.Tensor  # type: ignore[assignment]
    counts: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    block_m: int


class SequenceReordering(NamedTuple):
    """Per sequence and group the positions that execute it, ascending, int32 [B, N_G, T], and their count [B, N_G]."""

    # Nobody searches these tuples, so hiding tuple.index is harmless.
    index: torch.Tensor  # type: ignore[assignment]
    counts: torch.Tensor


class PatternReordering(NamedTuple):
    """Rows sorted by the Gray rank of their pattern over `groups_per_block` neighbouring groups (for K-axis GEMMs).

    N_B = number of super-blocks of groups, M = rows, BM = `block_m`.

    Args:
        index: Row numbers by ascending Gray rank, ties by row, int32 [N_B, M]; the first `counts[b]` are meant.
        patterns: Bit i set: the row at that place executes group b * groups_per_block + i; int32 [N_B, M].
        counts: Rows that execute any group of a super-block (all rows if `keeps_empty`), int32 [N_B].
        tiles: (super-block, row tile), int32 [N_B * ceil(M / BM), 2].
        num_tiles: How many tiles are meant, int32 [1].
        groups_per_block: Groups in a super-block, s; 1 to 8.
        keeps_empty: Whether rows that execute no group of a super-block are listed too (first).
    """

    # Nobody searches these tuples, so hiding tuple.index is harmless.
    index: torch.Tensor  # type: ignore[assignment]
    patterns: torch.Tensor
    counts: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    block_m: int
    groups_per_block: int
    keeps_empty: bool


class RowReordering(NamedTuple):
    """Rows in one order over all groups, so that neighbours execute nearly the same (for K-axis GEMMs).

    M = rows, N_G = groups, W = words of 32 groups; bit i of word w is group 32 w + i. A unit has 64 rows, a
    tile two units; of a last tile that has one only, the other executes nothing.

    Args:
        index: Row numbers, int32 [M].
        words: Groups that the row at a place executes, int32 [W, M].
        unions: Groups that any row of a unit executes, int32 [2 * ceil(M / 128), W].
        items: Tiles by descending number of groups that either unit executes, int32 [ceil(M / 128)].
    """

    # Nobody searches these tuples, so hiding tuple.index is harmless.
    index: torch.Tensor  # type: ignore[assignment]
    words: torch.Tensor
    unions: torch.Tensor
    items: torch.Tensor
