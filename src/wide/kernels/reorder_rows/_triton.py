"""One order of rows in Triton: keys in one launch, torch's sort, words and unions in another; nothing waits."""

from typing import Any

import torch
import triton
import triton.language as tl

from wide.kernels.reorder_rows.reference import SORTED_GROUPS, TILE_ROWS, UNIT_ROWS, WORD, num_words

_KEY_ROWS = 64


def reorder_rows(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `reorder_rows_reference`."""
    num_rows, num_groups = mask.shape
    raw = mask.view(torch.uint8)
    rare = mask.sum(0, dtype=torch.int32).argsort(stable=True)[:SORTED_GROUPS]
    key = torch.empty(num_rows, dtype=torch.int64, device=mask.device)
    _key_kernel[(triton.cdiv(num_rows, _KEY_ROWS),)](
        raw, rare, key, num_rows, *raw.stride(), SORTED=len(rare), ROWS=_KEY_ROWS, num_warps=2
    )
    index = key.argsort(stable=True).to(torch.int32)
    tiles, count = triton.cdiv(num_rows, TILE_ROWS), num_words(num_groups)
    new: dict[str, Any] = {"dtype": torch.int32, "device": mask.device}
    words = torch.empty(count, num_rows, **new)
    unions = torch.empty(TILE_ROWS // UNIT_ROWS * tiles, count, **new)
    cost = torch.empty(tiles, **new)
    _words_kernel[(tiles,)](
        raw, index, words, unions, cost, num_rows, num_groups, *raw.stride(),
        COUNT=count, WORD=WORD, UNIT=UNIT_ROWS, UNITS=TILE_ROWS // UNIT_ROWS, num_warps=4,
    )  # fmt: skip
    return index, words, unions, cost.argsort(descending=True, stable=True).to(torch.int32)


@triton.jit(do_not_specialize=["M"])
def _key_kernel(MASK, RARE, KEY, M, stride_m, stride_g, SORTED: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = MASK + rows.to(tl.int64) * stride_m
    parity = tl.zeros((ROWS,), tl.int64)
    key = tl.zeros((ROWS,), tl.int64)
    for i in range(SORTED):
        group = tl.load(RARE + i)
        parity ^= tl.load(places + group * stride_g, mask=rows < M, other=0).to(tl.int64)
        key = key * 2 + parity
    tl.store(KEY + rows, key, mask=rows < M)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit(do_not_specialize=["M"])
def _words_kernel(
    MASK, INDEX, WORDS, UNIONS, COST, M, N_G, stride_m, stride_g,
    COUNT: tl.constexpr, WORD: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Pack what the sorted rows of a tile execute, and what its units do."""
    tile = tl.program_id(0)
    places = tile * (UNIT * UNITS) + tl.arange(0, UNIT * UNITS)
    rows = tl.load(INDEX + places, mask=places < M, other=0).to(tl.int64)
    bits = tl.arange(0, WORD)
    units = tile * UNITS + tl.arange(0, UNITS)
    cost = 0
    for word in tl.static_range(COUNT):
        groups = word * WORD + bits
        inside = (places < M)[:, None] & (groups < N_G)[None, :]
        at = MASK + rows[:, None] * stride_m + groups[None, :] * stride_g
        executes = tl.load(at, mask=inside, other=0).to(tl.int32)
        packed = tl.sum(executes << bits[None, :], 1)
        tl.store(WORDS + word * M + places, packed, mask=places < M)
        tl.store(UNIONS + units * COUNT + word, tl.reduce(tl.reshape(packed, [UNITS, UNIT]), 1, _either))
        cost += tl.sum(tl.max(executes, 0), 0)
    tl.store(COST + tile, cost)
