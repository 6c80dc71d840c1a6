"""Prefill attention in Triton: queries gathered once per program, K and V streamed, one launch.

A program owns `BLOCK_M` rows = tokens x heads of one unit (see `HeadUnits`). Its tokens come from the ascending list of
executing tokens, so the keys it may see end at the position of its last token, and only blocks between the first and
the last token's limits need an element-wise mask.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from wide.kernels.attention_inputs import HeadUnits, score_factors
from wide.kernels.attention_prefill.op import BACKENDS
from wide.kernels.device import DeviceFacts, device_facts, halves_only, triton_obstacle
from wide.kernels.dispatch import listed

# Units whose programs run side by side: enough to fill a GPU, few enough that their K and V stay in the L2 cache.
_BAND = 16
_TMA_CAPABILITIES = (90, 100)
# Bytes that a block may use on data-centre parts, but not on sm_89 and sm_120.
_LARGE_SHARED_MEMORY = 160 * 1024


class PrefillTile(NamedTuple):
    """How one program of prefill attention is cut.

    Args:
        block_m: Rows (tokens x heads of a unit) that a program owns.
        block_n: Keys in one step.
        uses_tma: 1 if K and V are read through tensor descriptors (sm_90 and newer), else 0.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    uses_tma: int = 0


_TILES = tuple(
    PrefillTile(block_m=m, block_n=n, num_warps=w, num_stages=s, uses_tma=tma)
    for m, n, w, s, tma in (
        (128, 128, 8, 2, 1), (128, 128, 8, 3, 1), (128, 64, 8, 3, 1), (128, 64, 8, 4, 1), (64, 128, 4, 2, 1),
        (64, 64, 4, 3, 1), (128, 64, 4, 2, 1), (128, 128, 8, 2, 0), (128, 64, 8, 3, 0), (64, 64, 4, 3, 0),
    )
)  # fmt: skip
candidates = listed(_TILES, few=4)


def can_use_tma(facts: DeviceFacts, tensor: torch.Tensor) -> bool:
    """Return whether K or V can be read through a tensor descriptor: 16-byte steps, on a device that has them."""
    steps = [stride * tensor.element_size() for stride in tensor.stride()[:3]]
    return facts.capability in _TMA_CAPABILITIES and tensor.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in steps)


def default_tile(facts: DeviceFacts, head_dim: int, *, uses_tma: bool) -> PrefillTile:
    """Return the largest tile that does not spill on the device; the host's is small for the interpreter's sake."""
    if facts.capability == 0:
        return PrefillTile(block_m=32, block_n=32, num_warps=4, num_stages=1)
    if facts.capability < 90 or facts.shared_memory_bytes < _LARGE_SHARED_MEMORY:
        if head_dim > 128:
            return PrefillTile(block_m=32, block_n=32, num_warps=4, num_stages=2)
        if facts.shared_memory_bytes < _LARGE_SHARED_MEMORY:
            block_m, block_n = (128, 64) if head_dim <= 64 else (64, 32)
            return PrefillTile(block_m=block_m, block_n=block_n, num_warps=8, num_stages=2)
        return PrefillTile(block_m=128, block_n=64 if head_dim <= 64 else 32, num_warps=8, num_stages=3)
    if head_dim > 128:
        # Tensor memory of sm_100 holds what the registers of sm_90 do not.
        if facts.capability >= 100 and uses_tma:
            return PrefillTile(block_m=128, block_n=64, num_warps=8, num_stages=2, uses_tma=True)
        return PrefillTile(block_m=128, block_n=32, num_warps=8, num_stages=2)
    if uses_tma:
        # A third stage measured 12 % faster on sm_90; sm_100 keeps more of its shared memory to itself.
        return PrefillTile(
            block_m=128, block_n=128, num_warps=8, num_stages=3 if facts.capability == 90 else 2, uses_tma=True
        )
    return PrefillTile(block_m=128, block_n=64, num_warps=8, num_stages=3)


def chosen_tile(tile: Sequence[int] | None, k: torch.Tensor, v: torch.Tensor) -> PrefillTile:
    """Return the given tile, or the default for keys and values."""
    if tile:
        return PrefillTile(*tile)
    facts = device_facts(k.device)
    return default_tile(facts, k.shape[-1], uses_tma=can_use_tma(facts, k) and can_use_tma(facts, v))


@triton.jit
def _load_block(
    base, n, offsets_n, offsets_d, stride, first, T_k, head, b,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, USES_TMA: tl.constexpr,
):  # fmt: skip
    if USES_TMA:
        block = base.load([b, n, head, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        # The scalar part is 64-bit; inside a block 32 bits are enough.
        pointers = base + tl.cast(n, tl.int64) * stride + offsets_n[:, None] * stride + offsets_d[None, :]
        if MASKED:
            real = (n + offsets_n >= first) & (n + offsets_n < T_k)
            block = tl.load(pointers, mask=real[:, None] & (offsets_d[None, :] < D), other=0.0)
        elif BLOCK_D != D:
            block = tl.load(pointers, mask=offsets_d[None, :] < D, other=0.0)
        else:
            block = tl.load(pointers)
    return block


@triton.jit(do_not_specialize=["T_q", "T_k", "max_tiles"])
def _attention_prefill(
    Q, K, V, OUT, INDEX, COUNTS, RUNS,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    T_q, T_k, batch, max_tiles, band, window, scale, cap_in, cap_out,
    NUM_UNITS: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_CAP: tl.constexpr, USES_TMA: tl.constexpr,
):  # fmt: skip
    # Within a band of units, the last tile of each comes first: longest first, and the empty ones last.
    pid = tl.program_id(0)
    in_band = pid % (max_tiles * band)
    pair = pid // (max_tiles * band) * band + in_band % band
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    if pair >= batch * NUM_UNITS:
        return
    b = pair // NUM_UNITS
    unit = pair % NUM_UNITS
    column = b * NUM_GROUPS + unit * NUM_GROUPS // NUM_UNITS
    kv_head = unit * NUM_KV_HEADS // NUM_UNITS
    count = tl.load(COUNTS + column)
    tile = tl.cdiv(count, TOKENS) - 1 - in_band // band
    if tile < 0:
        return

    places = INDEX + column.to(tl.int64) * T_q + tile * TOKENS
    left = tl.minimum(count - tile * TOKENS, TOKENS)
    rows = tl.arange(0, BLOCK_M)
    is_row = rows // HEADS < left
    token = tl.load(places + rows // HEADS, mask=is_row, other=0)
    head = unit * HEADS + rows % HEADS
    offsets_n = tl.arange(0, BLOCK_N)
    offsets_d = tl.arange(0, BLOCK_D)
    q_base = Q + b.to(tl.int64) * stride_qb + token.to(tl.int64) * stride_qt + head * stride_qh
    cell = is_row[:, None] & (offsets_d[None, :] < D)
    q = tl.load(q_base[:, None] + offsets_d[None, :], mask=cell, other=0.0)

    shift = T_k - T_q
    first_token = tl.load(places)
    last_token = tl.load(places + left - 1)
    position = token + shift
    first_position = first_token + shift
    last_position = last_token + shift
    lows = position
    if RUNS is not None:
        lows = tl.load(RUNS + token)
        position = tl.load(RUNS + T_q + token) - 1
        first_position = tl.load(RUNS + T_q + first_token) - 1
        last_position = tl.load(RUNS + T_q + last_token) - 1
    first = 0
    low = 0
    low_full = 0
    if window is not None:
        low = tl.maximum(0, first_position - window + 1)
        low_full = tl.maximum(0, last_position - window + 1)
    if RUNS is not None:
        low = tl.load(RUNS + first_token)
        low_full = tl.load(RUNS + last_token)
    high = last_position + 1
    high_full = first_position + 1
    end_of_keys = T_k
    if RUNS is not None:
        # What lies outside of a tile's runs may hold anything.
        first = low
        end_of_keys = high
    low = low // BLOCK_N * BLOCK_N
    high_full = high_full // BLOCK_N * BLOCK_N

    if not USES_TMA:
        K = K + b.to(tl.int64) * stride_kb + kv_head * stride_kh
        V = V + b.to(tl.int64) * stride_vb + kv_head * stride_vh
    # Finite, so that a block without any visible key leaves zeros instead of NaN.
    row_max = tl.full([BLOCK_M], -1.0e30, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Blocks with an element-wise mask, then without, then with one again.
    middle = low
    if window is not None or RUNS is not None:
        middle = tl.minimum(tl.cdiv(low_full, BLOCK_N), tl.cdiv(high, BLOCK_N)) * BLOCK_N
    high_full = tl.maximum(high_full, middle)
    for phase in tl.static_range(0 if window is not None or RUNS is not None else 1, 3):
        begin = low if phase == 0 else (middle if phase == 1 else high_full)
        end = middle if phase == 0 else (high_full if phase == 1 else high)
        for n in tl.range(begin, end, BLOCK_N):
            k = _load_block(
                K, n, offsets_n, offsets_d, stride_kt, first, end_of_keys, kv_head, b,
                D, BLOCK_N, BLOCK_D, phase != 1, USES_TMA,
            )  # fmt: skip
            scores = tl.dot(q, tl.trans(k))  # [BLOCK_M, BLOCK_N]
            if HAS_CAP:
                # cap * tanh(x) with x = score * scale / cap, already in units of log2.
                scores = cap_out - 2.0 * cap_out / (tl.exp2(scores * cap_in) + 1.0)
            if phase != 1:
                columns = n + offsets_n
                seen = ((columns >= first) & (columns < end_of_keys))[None, :]
                seen = seen & (columns[None, :] <= position[:, None])
                if window is not None:
                    seen = seen & (columns[None, :] > position[:, None] - window)
                if RUNS is not None:
                    seen = seen & (columns[None, :] >= lows[:, None])
                scores = tl.where(seen, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_max[:, None])
            correction = tl.exp2(row_max - new_max)
            row_sum = row_sum * correction + tl.sum(weights, 1)
            acc = acc * correction[:, None]
            v = _load_block(
                V, n, offsets_n, offsets_d, stride_vt, first, end_of_keys, kv_head, b,
                D, BLOCK_N, BLOCK_D, phase != 1, USES_TMA,
            )  # fmt: skip
            if phase != 1 and USES_TMA:
                # What no row sees may hold anything, and 0 * NaN is NaN.
                real = (n + offsets_n >= first) & (n + offsets_n < end_of_keys)
                v = tl.where(real[:, None], v, tl.zeros_like(v))
            acc = tl.dot(weights.to(v.dtype), v, acc)
            row_max = new_max
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_row = (b.to(tl.int64) * T_q + token) * (NUM_UNITS * HEADS) + head
    tl.store(OUT + out_row[:, None] * D + offsets_d[None, :], acc.to(OUT.dtype.element_ty), mask=cell)


@BACKENDS.register("triton", needs=triton_obstacle, supports=halves_only, candidates=candidates)
def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    *,
    runs: torch.Tensor | None,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    zero_skipped: bool,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `attention_prefill_reference` in one kernel (and a fill if `zero_skipped`); the tile is a `PrefillTile`."""
    chosen = chosen_tile(tile, k, v)
    batch, num_queries, num_heads, head_dim = q.shape
    units = HeadUnits(num_query_heads=num_heads, num_kv_heads=k.shape[2], num_groups=counts.shape[1])
    new = torch.zeros if zero_skipped else torch.empty
    out = new(q.shape, dtype=q.dtype, device=q.device)
    block_m = max(chosen.block_m, triton.next_power_of_2(units.heads_per_unit))
    max_tiles = triton.cdiv(num_queries, block_m // units.heads_per_unit)
    num_pairs = batch * units.num_units
    band = min(num_pairs, _BAND)
    block_d = triton.next_power_of_2(head_dim)
    _attention_prefill[(triton.cdiv(num_pairs, band) * band * max_tiles,)](
        q, _source(k, chosen, block_d), _source(v, chosen, block_d), out, index, counts, runs,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        num_queries, k.shape[1], batch, max_tiles, band, window, *score_factors(scale, soft_cap, head_dim),
        NUM_UNITS=units.num_units, NUM_GROUPS=units.num_groups, NUM_KV_HEADS=units.num_kv_heads,
        HEADS=units.heads_per_unit, D=head_dim, BLOCK_D=block_d, BLOCK_M=block_m, BLOCK_N=chosen.block_n,
        HAS_CAP=soft_cap is not None, USES_TMA=bool(chosen.uses_tma), num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )  # fmt: skip
    return out


def _source(tensor: torch.Tensor, tile: PrefillTile, block_d: int) -> Any:
    """Return what the kernel reads K or V through: the tensor, or a descriptor of it."""
    if not tile.uses_tma:
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, tile.block_n, 1, block_d])
