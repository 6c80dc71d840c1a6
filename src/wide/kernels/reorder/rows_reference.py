"""One order of rows in plain PyTorch."""

import torch

# Rows of a unit and of a tile.
UNIT_ROWS, TILE_ROWS = 64, 128
WORD = 32
# Groups that a bucket's rows are sorted by: the bits of their keys.
SORTED_GROUPS = 32
# Rows that are put in order together, as many as one block of the kernel in CUDA C++ holds in shared memory.
CHUNK_ROWS = 16384


def num_words(num_groups: int) -> int:
    """Return the words of 32 groups that a row takes: one alone would be a kernel of its own."""
    return max(2, -(-num_groups // WORD))


def reorder_rows_reference(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return index, words, unions and items as described at `RowReordering`.

    Each 16384 rows are put in order by themselves. A row's bucket is the rarest group that it executes: that the fewest
    of these rows do. Buckets lie by descending number of rows that execute their group, first the one of rows that
    execute nothing. In a bucket, rows are sorted by the Gray rank of their pattern, downwards, over up to 32 of the
    groups more frequent than its own, the group that the fewest rows *of the bucket* execute most significant; ties by
    row. A rare group spares most tiles when it has been sorted out of them, and divides rows least for that; which
    groups are rare differs from bucket to bucket.

    Source: docs/results/operators.md.
    """
    num_rows, num_groups = mask.shape
    chunks = mask.split(CHUNK_ROWS)
    index = torch.cat([i * CHUNK_ROWS + row_keys(chunk).argsort(stable=True) for i, chunk in enumerate(chunks)])
    count = num_words(num_groups)
    padded = torch.zeros(-(-num_rows // TILE_ROWS) * TILE_ROWS, count * WORD, dtype=torch.bool, device=mask.device)
    padded[:num_rows, :num_groups] = mask[index]
    units = padded.view(-1, UNIT_ROWS, count * WORD).any(1)
    cost = units.view(-1, TILE_ROWS // UNIT_ROWS, count * WORD).any(1).sum(1)
    items = cost.argsort(descending=True, stable=True)
    words = _packed(padded[:num_rows]).t().contiguous()
    return index.to(torch.int32), words, _packed(units), items.to(torch.int32)


def left_to_tiles(mask: torch.Tensor) -> float:
    """Return the share of (tile, group) pairs that tiles of 128 rows in one order execute; `mask` is [M > 0, N_G]."""
    chunks = mask.split(CHUNK_ROWS)
    sorted_rows = torch.cat([chunk[row_keys(chunk).argsort(stable=True)] for chunk in chunks])
    return torch.stack([tile.any(0).float().mean() for tile in sorted_rows.split(TILE_ROWS)]).mean().item()


def row_keys(mask: torch.Tensor) -> torch.Tensor:
    """Return what rows of a chunk [M, N_G] are sorted by, int64 [M]: the bucket, above the Gray rank within it."""
    num_rows, num_groups = mask.shape
    executes = mask[:, mask.sum(0).argsort(stable=True)]
    # Rows that execute nothing are a bucket of their own, the last.
    bucket = torch.where(executes.any(1), executes.byte().argmax(1), num_groups)
    counts = executes.new_zeros(num_groups + 1, num_groups, dtype=torch.int64).index_add_(0, bucket, executes.long())
    places = torch.arange(num_groups, device=mask.device)
    # All of a bucket's rows are alike in groups as rare as its own.
    counts[places[None, :] <= torch.arange(num_groups + 1, device=mask.device)[:, None]] = num_rows + 1
    rare = counts.argsort(dim=1, stable=True)[:, :SORTED_GROUPS]
    # A Gray code's bit i is the parity of the first i + 1 bits of the pattern; the bucket's own group is one of them.
    parities = (1 + executes.gather(1, rare[bucket]).cumsum(1)) % 2
    rank = (parities << torch.arange(rare.shape[1] - 1, -1, -1, device=mask.device)).sum(1)
    return ((num_groups - bucket) << SORTED_GROUPS) + rank


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Return bool [R, 32 W] as int32 [R, W]."""
    places = torch.arange(WORD, device=bits.device)
    words = (bits.view(bits.shape[0], -1, WORD).long() << places).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
