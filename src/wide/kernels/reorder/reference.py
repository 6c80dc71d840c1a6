"""Reorder in plain PyTorch: a stable partition of rows for every group."""

import torch

# Row tiles of one band run at the same time for all groups: they read nearly the same rows of the input.
BAND = 8


def reorder_reference(
    mask: torch.Tensor, *, block_m: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return index, counts, offsets, tiles and number of tiles as described at `Reordering`.

    Source: paper, section 4.1 (token reordering); the permutation is stable.
    """
    num_rows, num_groups = mask.shape
    columns = mask.t().contiguous()
    # A stable sort of "skipped" lists executing rows first, both parts ascending.
    index = torch.sort(~columns, dim=1, stable=True).indices.to(torch.int32)
    counts = columns.sum(1, dtype=torch.int32)
    offsets = torch.zeros(num_groups + 1, dtype=torch.int32, device=mask.device)
    offsets[1:] = counts.cumsum(0)
    return index, counts, offsets, *_tiles_in_bands(counts, num_rows, block_m)


def _tiles_in_bands(counts: torch.Tensor, num_rows: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """List tiles band after band, in a band by group and row tile; short ones last, thin ones behind thick ones."""
    max_row_tiles = -(-num_rows // block_m)
    # A remainder of more than half a tile counts as a whole one, up to a quarter is thin.
    whole = [(count + block_m - block_m // 2 - 1) // block_m for count in counts.tolist()]
    tiles = [
        (group, row_tile)
        for band in range(0, max_row_tiles, BAND)
        for group, count in enumerate(whole)
        for row_tile in range(band, min(band + BAND, count))
    ]
    left = [count - number * block_m for count, number in zip(counts.tolist(), whole, strict=True)]
    short = [(group, whole[group]) for group, rows in enumerate(left) if rows > block_m // 4]
    short += [(group, whole[group]) for group, rows in enumerate(left) if 0 < rows <= block_m // 4]
    tiles += short
    out = _padded(tiles, len(counts) * max_row_tiles, counts.device)
    return out, torch.tensor([len(tiles), len(short)], dtype=torch.int32, device=counts.device)


def _padded(tiles: list[tuple[int, int]], size: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(tiles + [(0, 0)] * (size - len(tiles)), dtype=torch.int32, device=device)


def reorder_sequences_reference(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return index and counts as described at `SequenceReordering`."""
    columns = mask.transpose(1, 2).contiguous()
    index = torch.sort(~columns, dim=2, stable=True).indices.to(torch.int32)
    return index, columns.sum(2, dtype=torch.int32)


def gray_rank(pattern: torch.Tensor) -> torch.Tensor:
    """Return the position of 8-bit patterns in Gray-code order, in which neighbours differ in one bit."""
    rank = pattern
    for shift in (1, 2, 4):
        rank = rank ^ (rank >> shift)
    return rank


def reorder_patterns_reference(
    mask: torch.Tensor, *, block_m: int, groups_per_block: int, keeps_empty: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return index, patterns, counts, tiles and number of tiles as described at `PatternReordering`."""
    num_rows, num_groups = mask.shape
    num_blocks = -(-num_groups // groups_per_block)
    padded = torch.zeros(num_rows, num_blocks * groups_per_block, dtype=torch.int32, device=mask.device)
    padded[:, :num_groups] = mask
    weights = 2 ** torch.arange(groups_per_block, dtype=torch.int32, device=mask.device)
    patterns = (padded.view(num_rows, num_blocks, groups_per_block) * weights).sum(2, dtype=torch.int32)
    patterns = patterns.t().contiguous()
    key = gray_rank(patterns)
    if not keeps_empty:
        # Empty rows go behind all others, where they are not counted.
        key = torch.where(patterns == 0, 256, key)
    index = torch.sort(key, dim=1, stable=True).indices
    counts = torch.full((num_blocks,), num_rows, dtype=torch.int32, device=mask.device)
    if not keeps_empty:
        counts = (patterns != 0).sum(1, dtype=torch.int32)
    max_row_tiles = -(-num_rows // block_m)
    tiles = [(block, tile) for block, count in enumerate(counts.tolist()) for tile in range(-(-count // block_m))]
    out = _padded(tiles, num_blocks * max_row_tiles, mask.device)
    num_tiles = torch.tensor([len(tiles)], dtype=torch.int32, device=mask.device)
    return index.to(torch.int32), patterns.gather(1, index), counts, out, num_tiles
