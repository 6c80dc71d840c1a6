"""Decode attention in Triton: the blocks of all executing caches shared out evenly over a persistent grid.

Each program counts on the device how many blocks of keys every executing (sequence, unit) pair has, takes an equal
share of the concatenation of all of them, and writes one partial result for every pair that its share touches; a second
launch merges the partial results of each pair. Skipped pairs have no blocks, so nothing of their cache is read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from wide.kernels.attention_decode.op import BACKENDS
from wide.kernels.attention_inputs import HeadUnits, score_factors
from wide.kernels.device import DeviceFacts, device_facts, halves_only, triton_obstacle

# Rows of the smallest matrix fragment.
_MIN_ROWS = 16
# Partial results that the merge takes at a time.
_MERGE_BLOCK = 16
_FEW_PAIRS = 16


class DecodeTile(NamedTuple):
    """How the cache of all executing pairs is shared out over programs.

    Args:
        block_n: Keys in one step, the unit in which work is shared out.
        min_blocks: Steps that a program gets at least, so that short caches make few partial results.
        programs_per_sm: Programs that run on one multiprocessor at a time.
    """

    block_n: int
    min_blocks: int
    programs_per_sm: int
    num_warps: int
    num_stages: int


def default_tile(facts: DeviceFacts, head_dim: int, num_pairs: int) -> DecodeTile:
    """Return the tile for `num_pairs` sequences times KV heads; the host gets several programs, to try splits."""
    if facts.capability == 0:
        return DecodeTile(block_n=16, min_blocks=2, programs_per_sm=5, num_warps=4, num_stages=1)
    block_n = 64 if head_dim <= 128 else 32
    has_room = facts.shared_memory_bytes >= 160 * 1024
    # Few pairs: half as many programs with twice the keys each measured 16 % faster over 16384 keys.
    programs = 2 if has_room and num_pairs > _FEW_PAIRS else 1
    # Large heads would spill registers on sm_89 and sm_120.
    warps = 4 if has_room or head_dim <= 128 else 8
    return DecodeTile(
        block_n=block_n, min_blocks=2, programs_per_sm=programs, num_warps=warps, num_stages=3 if has_room else 2
    )


@triton.jit(do_not_specialize=["stride_pb", "num_pairs"])
def _attend_share(
    Q, K, V, PART_OUT, PART_MAX, PART_SUM, ENDS, LENGTHS, STARTS, MASK, PAGES,
    stride_qb, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_mb, stride_pb,
    num_pairs, window, scale, cap_in, cap_out,
    PAIRS: tl.constexpr, NUM_UNITS: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, HAS_CAP: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    is_pair = pair < num_pairs
    # Blocks of keys of every pair; none of those that are skipped.
    highs = tl.load(LENGTHS + pair // NUM_UNITS, mask=is_pair, other=0)
    lows = tl.zeros_like(highs)
    if STARTS is not None:
        lows = tl.load(STARTS + pair // NUM_UNITS, mask=is_pair, other=0)
    if window is not None:
        lows = tl.maximum(lows, highs - window)
    blocks = tl.where(highs > lows, tl.cdiv(highs, BLOCK_N) - lows // BLOCK_N, 0)
    if MASK is not None:
        group = pair % NUM_UNITS * NUM_GROUPS // NUM_UNITS
        runs = tl.load(MASK + pair // NUM_UNITS * stride_mb + group, mask=is_pair, other=0)
        blocks = tl.where(runs != 0, blocks, 0)
    ends = tl.cumsum(blocks, 0)
    if pid == 0:
        tl.store(ENDS + pair, ends, mask=is_pair)
    total = tl.sum(blocks, 0)
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), MIN_BLOCKS)
    at = tl.minimum(pid * share, total)
    stop = tl.minimum(at + share, total)
    rows = tl.arange(0, ROWS)
    offsets_n = tl.arange(0, BLOCK_N)
    offsets_d = tl.arange(0, BLOCK_D)
    cell = (rows[:, None] < HEADS) & (offsets_d[None, :] < D)
    while at < stop:
        # The pair whose blocks hold `at`; pairs without blocks end where their predecessor ends and are passed over.
        here = tl.sum((ends <= at).to(tl.int32), 0)
        here_end = tl.sum(tl.where(pair == here, ends, 0), 0)
        here_begin = here_end - tl.sum(tl.where(pair == here, blocks, 0), 0)
        part_stop = tl.minimum(stop, here_end)
        b = here // NUM_UNITS
        unit = here % NUM_UNITS
        kv_head = unit * NUM_KV_HEADS // NUM_UNITS
        high = tl.load(LENGTHS + b)
        low = 0
        if STARTS is not None:
            low = tl.load(STARTS + b)
        if window is not None:
            low = tl.maximum(low, high - window)
        first_block = low // BLOCK_N + at - here_begin
        last_block = low // BLOCK_N + part_stop - here_begin
        q_row = Q + b.to(tl.int64) * stride_qb + (unit * HEADS + rows) * stride_qh
        q = tl.load(q_row[:, None] + offsets_d[None, :], mask=cell, other=0.0)
        k_base = K + b.to(tl.int64) * stride_kb + kv_head * stride_kh
        v_base = V + b.to(tl.int64) * stride_vb + kv_head * stride_vh
        row_max = tl.full([ROWS], -1.0e30, tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        page = first_block
        if PAGES is not None:
            pages = PAGES + b.to(tl.int64) * stride_pb
        if PAGE and PAGE % BLOCK_N == 0:
            page = tl.load(pages + first_block * BLOCK_N // PAGE)
        for block in tl.range(first_block, last_block):
            n = block * BLOCK_N
            real = (n + offsets_n >= low) & (n + offsets_n < high)
            cells = real[:, None] & (offsets_d[None, :] < D)
            if PAGE % BLOCK_N:
                # A block of keys spans pages.
                place = n + offsets_n
                own = tl.load(pages + place // PAGE, mask=real, other=0)
                row = own.to(tl.int64) * PAGE + place % PAGE
                tile_k = k_base + row[:, None] * stride_kt + offsets_d[None, :]
                tile_v = v_base + row[:, None] * stride_vt + offsets_d[None, :]
            else:
                first = tl.cast(n, tl.int64)
                if PAGE:
                    first = page.to(tl.int64) * PAGE + n % PAGE
                    # Read a block ahead: loads that wait for another in the same turn are pipelined less deeply.
                    page = tl.load(pages + tl.minimum(n + BLOCK_N, high - 1) // PAGE)
                tile_k = k_base + first * stride_kt + offsets_n[:, None] * stride_kt + offsets_d[None, :]
                tile_v = v_base + first * stride_vt + offsets_n[:, None] * stride_vt + offsets_d[None, :]
            k = tl.load(tile_k, mask=cells, other=0.0)
            scores = tl.dot(q, tl.trans(k))  # [ROWS, BLOCK_N]
            if HAS_CAP:
                scores = cap_out - 2.0 * cap_out / (tl.exp2(scores * cap_in) + 1.0)
            scores = tl.where(real[None, :], scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_max[:, None])
            correction = tl.exp2(row_max - new_max)
            row_sum = row_sum * correction + tl.sum(weights, 1)
            v = tl.load(tile_v, mask=cells, other=0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None])
            row_max = new_max
        # Neighbouring partial results differ in program or pair, and both only grow: their sum is a free slot.
        part = (pid + here).to(tl.int64) * HEADS + rows
        tl.store(PART_MAX + part, row_max, mask=rows < HEADS)
        tl.store(PART_SUM + part, row_sum, mask=rows < HEADS)
        tl.store(PART_OUT + part[:, None] * D + offsets_d[None, :], acc, mask=cell)
        at = part_stop


@triton.jit(do_not_specialize=["num_pairs"])
def _merge_parts(
    OUT, PART_OUT, PART_MAX, PART_SUM, ENDS,
    num_pairs, num_programs,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, MIN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one (pair, head); a pair without blocks gets zeros."""
    pair = tl.program_id(0)
    head = tl.program_id(1)
    total = tl.load(ENDS + num_pairs - 1)
    begin = tl.load(ENDS + pair - 1, mask=pair > 0, other=0)
    end = tl.load(ENDS + pair)
    share = tl.maximum(tl.cdiv(total, num_programs), MIN_BLOCKS)
    first = begin // share
    num_parts = tl.where(end > begin, (end - 1) // share - first + 1, 0)
    offsets_p = tl.arange(0, BLOCK_P)
    offsets_d = tl.arange(0, BLOCK_D)
    run_max = -1.0e30
    run_sum = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for p in tl.range(0, num_parts, BLOCK_P):
        is_part = p + offsets_p < num_parts
        part = (first + pair + p + offsets_p).to(tl.int64) * HEADS + head
        part_max = tl.load(PART_MAX + part, mask=is_part, other=-1.0e30)
        part_sum = tl.load(PART_SUM + part, mask=is_part, other=0.0)
        cell = is_part[:, None] & (offsets_d[None, :] < D)
        out = tl.load(PART_OUT + part[:, None] * D + offsets_d[None, :], mask=cell, other=0.0)
        new_max = tl.maximum(run_max, tl.max(part_max, 0))
        weight = tl.exp2(part_max - new_max)
        correction = tl.exp2(run_max - new_max)
        run_sum = run_sum * correction + tl.sum(part_sum * weight, 0)
        acc = acc * correction + tl.sum(out * weight[:, None], 0)
        run_max = new_max
    acc = acc / tl.where(run_sum == 0.0, 1.0, run_sum)
    row = pair.to(tl.int64) * HEADS + head
    tl.store(OUT + row * D + offsets_d, acc.to(OUT.dtype.element_ty), mask=offsets_d < D)


@BACKENDS.register("triton", needs=triton_obstacle, supports=halves_only)
def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    starts: torch.Tensor | None,
    pages: torch.Tensor | None,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `attention_decode_reference` in two kernels; the tile is a `DecodeTile`."""
    facts = device_facts(q.device)
    chosen = DecodeTile(*tile) if tile else default_tile(facts, q.shape[-1], q.shape[0] * k.shape[2])
    batch, num_heads, head_dim = q.shape
    num_groups = 1 if mask is None else mask.shape[1]
    units = HeadUnits(num_query_heads=num_heads, num_kv_heads=k.shape[2], num_groups=num_groups)
    heads = units.heads_per_unit
    num_pairs = batch * units.num_units
    num_programs = facts.num_sms * chosen.programs_per_sm
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # Outputs, maxima and sums of parts, cut from one allocation.
    slots = (num_programs + num_pairs) * heads
    parts = q.new_empty(slots * (head_dim + 2), dtype=torch.float32).split([slots * head_dim, slots, slots])
    ends = torch.empty(num_pairs, dtype=torch.int32, device=q.device)
    block_d = triton.next_power_of_2(head_dim)
    # Pages belong to no sequence: only places inside them have a stride.
    strides = [part.stride()[:3] if pages is None else (0, *part.stride()[1:3]) for part in (k, v)]
    shape = {"HEADS": heads, "D": head_dim, "BLOCK_D": block_d, "MIN_BLOCKS": chosen.min_blocks}
    _attend_share[(num_programs,)](
        q, k, v, *parts, ends, lengths, starts, None if mask is None else mask.view(torch.uint8), pages,
        *q.stride()[:2], *strides[0], *strides[1], 0 if mask is None else mask.stride(0),
        0 if pages is None else pages.stride(0),
        num_pairs, window, *score_factors(scale, soft_cap, head_dim),
        PAIRS=triton.next_power_of_2(num_pairs), NUM_UNITS=units.num_units, NUM_GROUPS=num_groups,
        NUM_KV_HEADS=units.num_kv_heads, ROWS=max(_MIN_ROWS, triton.next_power_of_2(heads)), BLOCK_N=chosen.block_n,
        HAS_CAP=soft_cap is not None, PAGE=0 if pages is None else k.shape[1], **shape, num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )  # fmt: skip
    _merge_parts[(num_pairs, heads)](
        out, *parts, ends, num_pairs, num_programs, BLOCK_P=_MERGE_BLOCK, **shape, num_warps=4
    )
    return out
