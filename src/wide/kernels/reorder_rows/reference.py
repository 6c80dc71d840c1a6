"""One order of rows in plain PyTorch."""

import torch

# Rows of a unit and of a tile.
UNIT_ROWS, TILE_ROWS = 64, 128
WORD = 32
# Groups that are sorted by: as many bits as an int64 has without its sign.
SORTED_GROUPS = 63


def num_words(num_groups: int) -> int:
    """Return the words of 32 groups that a row takes: one alone would be a kernel of its own."""
    return max(2, -(-num_groups // WORD))


def reorder_rows_reference(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return index, words, unions and items as described at `RowReordering`.

    Rows are sorted by the Gray rank of their pattern, the group that the fewest rows execute most significant; ties by
    row. A rare group spares most tiles when it has been sorted out of them, and divides rows least for that. Beyond 63
    groups the most frequent ones are not sorted by.

    Args:
        mask: True = execute, bool [M, N_G].

    Source: docs/measurements/operators/trained-masks.md.
    """
    num_rows, num_groups = mask.shape
    rare = mask.sum(0).argsort(stable=True)[:SORTED_GROUPS]
    # A Gray code's bit i is the parity of the first i + 1 bits of the pattern.
    parities = mask[:, rare].cumsum(1) % 2
    key = (parities << torch.arange(len(rare) - 1, -1, -1, device=mask.device)).sum(1)
    index = key.argsort(stable=True)
    count = num_words(num_groups)
    padded = torch.zeros(-(-num_rows // TILE_ROWS) * TILE_ROWS, count * WORD, dtype=torch.bool, device=mask.device)
    padded[:num_rows, :num_groups] = mask[index]
    units = padded.view(-1, UNIT_ROWS, count * WORD).any(1)
    cost = units.view(-1, TILE_ROWS // UNIT_ROWS, count * WORD).any(1).sum(1)
    items = cost.argsort(descending=True, stable=True)
    words = _packed(padded[:num_rows]).t().contiguous()
    return index.to(torch.int32), words, _packed(units), items.to(torch.int32)


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Return bool [R, 32 W] as int32 [R, W]."""
    places = torch.arange(WORD, device=bits.device)
    words = (bits.view(bits.shape[0], -1, WORD).long() << places).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
