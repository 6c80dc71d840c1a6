"""An experiment: rows whose mask is one of C codewords, in the order and the lists that GEMM-K over rows takes."""

import torch
import triton
import triton.language as tl

from wide.kernels.reorder import reorder_patterns
from wide.kernels.reordering import RowReordering

BITS = 8


class Codebook:
    """At most 256 masks of a layer, similar ones beside each other.

    Args:
        masks: bool [C, N_G].
    """

    def __init__(self, masks: torch.Tensor) -> None:
        """Put them in order and pack them."""
        order, left = [0], list(range(1, len(masks)))
        while left:
            far = (masks[left] != masks[order[-1]]).sum(1)
            order.append(left.pop(int(far.argmin())))
        self.masks = masks[order].contiguous()
        place = torch.arange(len(masks), device=masks.device)
        # Rows are sorted by the Gray rank of eight bits, so these are the Gray code of their place.
        self.names = place ^ (place >> 1)
        self.bits = (self.names[:, None] >> torch.arange(BITS, device=masks.device) & 1).bool()
        self.num_words = max(2, -(-masks.shape[1] // 32))
        padded = torch.zeros(len(masks), 32 * self.num_words, dtype=torch.int64, device=masks.device)
        padded[:, : masks.shape[1]] = self.masks
        words = (padded.view(len(masks), -1, 32) << torch.arange(32, device=masks.device)).sum(2)
        words = torch.where(words >= 2**31, words - 2**32, words).int()
        self.words = torch.zeros(2**BITS, self.num_words, dtype=torch.int32, device=masks.device)
        self.words[self.names] = words

    def reorder(self, bits: torch.Tensor) -> RowReordering:
        """Return rows sorted by their codeword, bool [M, 8], rows of `bits`."""
        order = reorder_patterns(bits, groups_per_block=BITS, block_m=128, keeps_empty=True, backend="triton")
        rows, words = len(bits), self.num_words
        tiles, padded = triton.cdiv(rows, 128), triton.next_power_of_2(words)
        new = {"dtype": torch.int32, "device": bits.device}
        patterns, unions = torch.empty(words, rows, **new), torch.empty(2 * tiles, words, **new)
        cost, items = torch.empty(tiles, **new), torch.empty(tiles, **new)
        _lists_kernel[(tiles,)](order.patterns, self.words, patterns, unions, cost, rows, W=words, W_PADDED=padded)
        _items_kernel[(1,)](cost, items, tiles, T=triton.next_power_of_2(tiles))
        return RowReordering(order.index[0], patterns, unions, items)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _ones(word):
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _lists_kernel(NAMES, WORDS, PATTERNS, UNIONS, COST, M, W: tl.constexpr, W_PADDED: tl.constexpr):
    tile = tl.program_id(0)
    words = tl.arange(0, W_PADDED)
    places = tile * 128 + tl.arange(0, 128)
    name = tl.load(NAMES + places, mask=places < M, other=0)
    inside = (places < M)[:, None] & (words < W)[None, :]
    word = tl.load(WORDS + name[:, None] * W + words[None, :], mask=inside, other=0)
    tl.store(PATTERNS + words[None, :] * M + places[:, None], word, mask=inside)
    union = tl.reduce(tl.reshape(word, [2, 64, W_PADDED]), 1, _either)
    units = tile * 2 + tl.arange(0, 2)
    tl.store(UNIONS + units[:, None] * W + words[None, :], union, mask=(words < W)[None, :])
    every = tl.reduce(union, 0, _either)
    tl.store(COST + tile, tl.sum(_ones(every.to(tl.uint32, bitcast=True)).to(tl.int32), 0))


@triton.jit
def _items_kernel(COST, ITEMS, tiles, T: tl.constexpr):
    mine = tl.arange(0, T)
    cost = tl.load(COST + mine, mask=mine < tiles, other=-1)
    before = (cost[None, :] > cost[:, None]) | ((cost[None, :] == cost[:, None]) & (mine[None, :] < mine[:, None]))
    tl.store(ITEMS + tl.sum(before.to(tl.int32), 1), mine, mask=mine < tiles)
