"""An experiment: the K-axis product of rows whose mask is one of C codewords, by one sort and down_one_sort.cu."""

from pathlib import Path

import torch
import triton
import triton.language as tl

from wide.kernels.device import device_facts
from wide.kernels.native.build import cubin
from wide.kernels.native.launch import Kernel, tensor_map
from wide.kernels.reorder import reorder_patterns

SOURCE = Path(__file__).parents[1] / "kernels" / "down_one_sort.cu"
SHARED_BYTES = 4 * 48 * 1024 + 32 * 1024 + 64
BITS = 8


class Codebook:
    """At most 256 masks of a layer, similar ones beside each other.

    Args:
        masks: bool [C, N_G].
    """

    def __init__(self, masks: torch.Tensor) -> None:
        order, left = [0], list(range(1, len(masks)))
        while left:
            far = (masks[left] != masks[order[-1]]).sum(1)
            order.append(left.pop(int(far.argmin())))
        self.masks = masks[order].contiguous()
        place = torch.arange(len(masks), device=masks.device)
        # Rows are sorted by the Gray rank of eight bits, so these are the Gray code of their place.
        self.names = place ^ (place >> 1)
        self.bits = (self.names[:, None] >> torch.arange(BITS, device=masks.device) & 1).bool()
        self.num_words = -(-masks.shape[1] // 32)
        padded = torch.zeros(len(masks), 32 * self.num_words, dtype=torch.int64, device=masks.device)
        padded[:, : masks.shape[1]] = self.masks
        words = (padded.view(len(masks), -1, 32) << torch.arange(32, device=masks.device)).sum(2)
        words = torch.where(words >= 2**31, words - 2**32, words).int()
        self.words = torch.zeros(2**BITS, self.num_words, dtype=torch.int32, device=masks.device)
        self.words[self.names] = words


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
def _items_kernel(COST, ITEMS, NUM, tiles, T: tl.constexpr):
    mine = tl.arange(0, T)
    cost = tl.load(COST + mine, mask=mine < tiles, other=-1)
    before = (cost[None, :] > cost[:, None]) | ((cost[None, :] == cost[:, None]) & (mine[None, :] < mine[:, None]))
    tl.store(ITEMS + tl.sum(before.to(tl.int32), 1), mine, mask=mine < tiles)
    tl.store(NUM, tiles)


class Product:
    """Launches the kernel for groups of one size."""

    def __init__(self, num_words: int, folder: Path) -> None:
        macros = {"WORDS": num_words, "HAS_BIAS": 0, "FLOAT16": 0, "SHARED_BYTES": SHARED_BYTES}
        torch.zeros(1, device="cuda")
        code = cubin(SOURCE, folder, architecture="sm_90a", macros=macros)
        self.kernel = Kernel(code, "gemm_k", threads=384, shared_bytes=SHARED_BYTES)

    def __call__(self, h: torch.Tensor, weight: torch.Tensor, bits: torch.Tensor, book: Codebook) -> torch.Tensor:
        """Return h W^T over the groups that rows execute, [M, N]; sorting and listing included.

        Args:
            h: bfloat16 [M, K]; skipped channels are not read.
            weight: [N, K].
            bits: Each row's codeword, bool [M, 8], rows of `book.bits`.
            book: Of the layer.
        """
        rows, width = h.shape[0], weight.shape[0]
        order = reorder_patterns(bits, groups_per_block=BITS, block_m=128, keeps_empty=True, backend="triton")
        tiles, words = triton.cdiv(rows, 128), book.num_words
        new = {"dtype": torch.int32, "device": h.device}
        patterns, unions = torch.empty(words, rows, **new), torch.empty(2 * tiles, words, **new)
        cost, items, num = torch.empty(tiles, **new), torch.empty(tiles, **new), torch.empty(1, **new)
        padded = triton.next_power_of_2(words)
        _lists_kernel[(tiles,)](order.patterns, book.words, patterns, unions, cost, rows, W=words, W_PADDED=padded)
        _items_kernel[(1,)](cost, items, num, tiles, T=triton.next_power_of_2(tiles))
        out = h.new_empty(rows, width)
        facts = device_facts(h.device)
        size = h.shape[1] // book.masks.shape[1]
        self.kernel(
            h.device, facts.num_sms, tensor_map(weight, 256, 64), h, out, out, order.index, patterns, unions, items, num,
            rows, width, size, h.stride(0), width,
        )  # fmt: skip
        self.unions = unions
        return out
