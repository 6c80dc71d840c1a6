"""Which groups tiles of rows must execute under given masks, by how rows and groups are put in order.

Masks are bool [M, N_G], True = execute. A tile multiplies the union of what its rows execute.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from wide.kernels.reorder_rows import reorder_rows

MOSTLY_ON, MOSTLY_OFF = 0.95, 0.05
"""Share of rows from which, or up to which, a group is not worth a place in sorted super-blocks."""

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """What one way of putting rows and groups in order executes and writes.

    Args:
        executed: Multiplied (row, group) pairs, with a last tile's padding, as a share of M * N_G.
        super_blocks: Parts of the groups whose sums leave on their own.
        sweeps: Sums that leave, as a multiple of the M rows of the result; one super-block stores each row once.
    """

    executed: float
    super_blocks: int
    sweeps: float


def ideal(mask: Mask) -> float:
    """Return the share of (row, group) pairs that rows execute: what no tile can go below."""
    return float(mask.mean())


def shuffled(mask: Mask, seed: int = 17) -> Mask:
    """Return masks with the same rate for each group, but independent of each other in rows and groups."""
    return np.random.default_rng(seed).permuted(mask, axis=0)


def tile_unions(mask: Mask, tile: int) -> Mask:
    """Return what tiles of `tile` successive rows execute, bool [ceil(M / tile), N_G]."""
    padded = np.zeros((-(-len(mask) // tile) * tile, mask.shape[1]), dtype=bool)
    padded[: len(mask)] = mask
    return np.logical_or.reduce(padded.reshape(-1, tile, mask.shape[1]), axis=1)


def gray_rows(mask: Mask) -> Indices:
    """Return the rows by the Gray rank of their pattern, the first group most significant; ties by row, [M]."""
    # A Gray code's bit i is the parity of the first i + 1 bits of the pattern.
    parities = np.cumsum(mask, axis=1) % 2
    return np.lexsort(parities.T[::-1])


def informative_groups(mask: Mask) -> Indices:
    """Return the groups, first those that tell most about all others, [N_G].

    Each next group explains the most variance that the ones before leave (pivoted Cholesky of the covariance).
    """
    centred = mask - mask.mean(0)
    left = centred.T @ centred / len(mask)
    chosen: list[int] = []
    while len(chosen) < mask.shape[1]:
        own = left.diagonal()
        explained = np.where(own > 1e-9, (left**2).sum(0) / np.maximum(own, 1e-9), 0.0)
        explained[chosen] = -1.0
        best = int(explained.argmax())
        chosen.append(best)
        if own[best] > 1e-9:
            left = left - np.outer(left[:, best], left[best]) / own[best]
    return np.array(chosen, dtype=np.int64)


def rare_groups(mask: Mask) -> Indices:
    """Return the groups, first those that the fewest rows execute, [N_G].

    A group leaves tiles that never execute it where sorting has separated its rows. A rare one saves most rows by that
    and divides them least, so that there is more left to sort by for the groups after it.
    """
    return np.argsort(mask.mean(0), kind="stable")


def one_order(mask: Mask) -> Indices:
    """Return the rows as `reorder_rows` has them: by their rarest group, then by those rare among such rows."""
    return reorder_rows(torch.from_numpy(mask), backend="torch").index.numpy().astype(np.int64)


def bundles(mask: Mask, size: int) -> list[Indices]:
    """Return the groups in bundles of at most `size` that go together (greedy by correlation of either sign)."""
    centred = mask - mask.mean(0)
    spread = np.sqrt((centred**2).sum(0))
    phi = np.abs(centred.T @ centred) / np.maximum(np.outer(spread, spread), 1e-9)
    np.fill_diagonal(phi, 0.0)
    free = np.ones(mask.shape[1], dtype=bool)
    found = []
    while free.any():
        near = np.where(free, phi[:, free].sum(1), -1.0)
        members: list[int] = []
        while len(members) < size and free.any():
            members.append(int(near.argmax()))
            free[members[-1]] = False
            near = np.where(free, phi[:, members].sum(1), -1.0)
        found.append(np.array(members, dtype=np.int64))
    return found


def clustered_rows(mask: Mask, tile: int) -> Indices:
    """Return the rows in an order whose tiles are alike, [M].

    Greedy: a tile begins with the free row that executes least, and takes the row that adds the fewest groups, among
    those the one that executes most. Far too slow for a forward; it shows what sorting leaves.
    """
    free = np.arange(len(mask))
    order: list[Indices] = []
    # One number for both wishes: few groups outside the union first, then many inside.
    step = mask.shape[1] + 1
    while len(free):
        columns = np.ascontiguousarray(mask[free].T)
        counts = columns.sum(0)
        cost = counts * step
        union = np.zeros(mask.shape[1], dtype=bool)
        taken = np.zeros(len(free), dtype=bool)
        for place in range(min(tile, len(free))):
            best = int(cost.argmin())
            new = columns[:, best] & ~union
            union |= new
            if place == 0:
                cost -= counts
            cost -= columns[new].sum(0) * step
            taken[best] = True
            cost[best] = np.iinfo(np.int64).max // 2
        order.append(free[taken])
        free = free[~taken]
    return np.concatenate(order)


def in_order(mask: Mask, rows: Indices, tile: int) -> Execution:
    """Return what tiles over all groups execute; each row leaves once.

    Args:
        mask: Of all groups.
        rows: Order of the rows, [M].
        tile: Rows in a tile.
    """
    executed = tile_unions(mask[rows], tile).sum() * tile / mask.size
    return Execution(executed=float(executed), super_blocks=1, sweeps=1.0)


def in_super_blocks(mask: Mask, blocks: Sequence[Indices], tile: int) -> Execution:
    """Return what tiles execute if each super-block has an order of its own, by Gray rank.

    Args:
        mask: Of all groups.
        blocks: Groups of each super-block, most significant first.
        tile: Rows in a tile; a row that executes nothing of a super-block is in none of its tiles.
    """
    executed, listed = 0.0, 0
    for groups in blocks:
        patterns = mask[:, groups]
        patterns = patterns[patterns.any(1)]
        executed += float(tile_unions(patterns[gray_rows(patterns)], tile).sum()) * tile
        listed += len(patterns)
    sweeps = 1.0 if len(blocks) == 1 else listed / len(mask)
    return Execution(executed=executed / mask.size, super_blocks=len(blocks), sweeps=sweeps)


def neighbours(num_groups: int, size: int) -> list[Indices]:
    """Return the groups in super-blocks of `size` neighbours."""
    return np.split(np.arange(num_groups), range(size, num_groups, size))


def by_rate(mask: Mask, size: int, tile: int) -> Execution:
    """Return what is executed if groups are sorted by rate and correlation first.

    Groups that nearly all rows execute are one dense product; each that hardly any row executes has its own list of
    rows; the others are in bundles of `size` that go together.

    Args:
        mask: Of all groups.
        size: Groups in a bundle.
        tile: Rows in a tile.
    """
    rates = mask.mean(0)
    always, seldom = np.flatnonzero(rates >= MOSTLY_ON), np.flatnonzero(rates <= MOSTLY_OFF)
    undecided = np.flatnonzero((rates > MOSTLY_OFF) & (rates < MOSTLY_ON))
    blocks = [np.array([group]) for group in seldom if rates[group] > 0]
    for members in bundles(mask[:, undecided], size):
        groups = undecided[members]
        blocks.append(groups[rare_groups(mask[:, groups])])
    found = in_super_blocks(mask, blocks, tile)
    if not len(always):
        return found
    return Execution(
        executed=found.executed + len(always) / mask.shape[1],
        super_blocks=len(blocks) + 1,
        sweeps=1.0 if not blocks else 1.0 + found.sweeps,
    )
