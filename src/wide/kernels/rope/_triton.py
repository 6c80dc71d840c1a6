"""Rotary position embedding and cache update in Triton: a program for some heads of one token."""

import torch
import triton
import triton.language as tl

from wide.kernels.device import elementwise_obstacle
from wide.kernels.rope.op import BACKENDS

_HEADS_PER_PROGRAM = 16
# From so many tokens on, programs of whole tokens are faster and still enough for every multiprocessor.
_MANY_TOKENS, _HEADS_OF_MANY = 1024, 64


@triton.jit
def _turn(own, other, cos, sin, sign, dtype: tl.constexpr):
    """Return own * cos + sign * other * sin with both products and the sum rounded to a dtype."""
    first = (own * cos).to(dtype).to(tl.float32)
    second = (other * sin).to(dtype).to(tl.float32)
    return (first + sign * second).to(dtype)


@triton.jit
def _weight(Q_NORM, K_NORM, channels, ours, inside):
    """Return the norms' weights of some channels, the queries' for heads that are ours."""
    q = tl.load(Q_NORM + channels, mask=inside, other=0.0)
    return tl.where(ours, q, tl.load(K_NORM + channels, mask=inside, other=0.0)).to(tl.float32)


@triton.jit
def _normed(scaled, weight, UNIT_OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Return the norm of scaled channels in float32, rounded where transformers rounds."""
    if UNIT_OFFSET:
        return (scaled * (1.0 + weight)).to(dtype).to(tl.float32)
    return (scaled.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def _rope_to_cache(
    Q, K, V, COS, SIN, POSITIONS, PLACES, K_CACHE, V_CACHE, MASK, Q_NORM, K_NORM, OUT,
    eps, T,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_cb,
    stride_ct, stride_ch, stride_m,
    H_Q: tl.constexpr, H_K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, UNIT_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    b = (token // T).to(tl.int64)
    t = (token % T).to(tl.int64)
    place = tl.load(POSITIONS + b).to(tl.int64) + t
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    # The channels of a head as pairs; those that are not turned go through as pairs, too.
    pair = tl.arange(0, BLOCK_D)
    inside = (pair < D // 2)[None, :]
    is_turned = (pair < R // 2)[None, :]
    if INTERLEAVED:
        first, second = 2 * pair[None, :], 2 * pair[None, :] + 1
    elif R == D:
        first, second = pair[None, :], pair[None, :] + D // 2
    else:
        first, second = pair + tl.where(pair < R // 2, 0, R // 2), pair + tl.where(pair < R // 2, R // 2, D // 2)
        first, second = first[None, :], second[None, :]
    turns = heads < H_Q
    if GROUP > 0:
        turns &= tl.load(MASK + token.to(tl.int64) * stride_m + heads // GROUP, mask=turns, other=0) != 0
    is_q = turns[:, None] & inside
    is_k = ((heads >= H_Q) & (heads < H_Q + H_K))[:, None] & inside
    is_v = ((heads >= H_Q + H_K) & (heads < H_Q + 2 * H_K))[:, None] & inside
    k_heads = heads - H_Q
    v_heads = k_heads - H_K
    q_at = Q + b * stride_qb + t * stride_qt + heads[:, None] * stride_qh
    k_at = K + b * stride_kb + t * stride_kt + k_heads[:, None] * stride_kh
    v_at = V + b * stride_vb + t * stride_vt + v_heads[:, None] * stride_vh
    row = place
    if PLACES is not None:
        row = tl.load(PLACES + token)
    cache_at = b * stride_cb + row * stride_ct
    k_to = K_CACHE + cache_at + k_heads[:, None] * stride_ch
    v_to = V_CACHE + cache_at + v_heads[:, None] * stride_ch
    dtype = OUT.dtype.element_ty
    # Values travel through untouched, queries and keys are turned; a tile may hold all three.
    tl.store(v_to + first, tl.load(v_at + first, mask=is_v, other=0.0), mask=is_v)
    tl.store(v_to + second, tl.load(v_at + second, mask=is_v, other=0.0), mask=is_v)
    low = tl.load(q_at + first, mask=is_q, other=0.0).to(tl.float32)
    low += tl.load(k_at + first, mask=is_k, other=0.0).to(tl.float32)
    high = tl.load(q_at + second, mask=is_q, other=0.0).to(tl.float32)
    high += tl.load(k_at + second, mask=is_k, other=0.0).to(tl.float32)
    if Q_NORM is not None:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
        ours = (heads < H_Q)[:, None]
        low = _normed(low * scale, _weight(Q_NORM, K_NORM, first, ours, inside), UNIT_OFFSET, dtype)
        high = _normed(high * scale, _weight(Q_NORM, K_NORM, second, ours, inside), UNIT_OFFSET, dtype)
    angle = place * R + pair[None, :]
    rounded = COS.dtype.element_ty
    cos_low = tl.load(COS + angle, mask=is_turned, other=1.0).to(tl.float32)
    sin_low = tl.load(SIN + angle, mask=is_turned, other=0.0).to(tl.float32)
    cos_high = tl.load(COS + angle + R // 2, mask=is_turned, other=1.0).to(tl.float32)
    sin_high = tl.load(SIN + angle + R // 2, mask=is_turned, other=0.0).to(tl.float32)
    turned_low = _turn(low, high, cos_low, sin_low, -1.0, rounded).to(dtype)
    turned_high = _turn(high, low, cos_high, sin_high, 1.0, rounded).to(dtype)
    out_at = OUT + (token.to(tl.int64) * H_Q + heads[:, None]) * D
    tl.store(out_at + first, turned_low, mask=is_q)
    tl.store(out_at + second, turned_high, mask=is_q)
    tl.store(k_to + first, turned_low, mask=is_k)
    tl.store(k_to + second, turned_high, mask=is_k)


@BACKENDS.register("triton", needs=elementwise_obstacle)
def rope_to_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    places: torch.Tensor | None,
    mask: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    unit_offset: bool,
    interleaved: bool,
) -> torch.Tensor:
    """Run `rope_to_cache_reference` in one kernel."""
    batch, length, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    all_heads = num_heads + 2 * num_kv_heads
    most = _HEADS_OF_MANY if batch * length >= _MANY_TOKENS else _HEADS_PER_PROGRAM
    heads = min(most, triton.next_power_of_2(all_heads))
    _rope_to_cache[(batch * length, triton.cdiv(all_heads, heads))](
        q, k, v, cos, sin, positions, places, k_cache, v_cache, None if mask is None else mask.view(torch.uint8),
        q_norm, k_norm, out,
        eps, length,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], k_cache.stride(0) if places is None else 0,
        *k_cache.stride()[1:3], 0 if mask is None else mask.stride(0),
        H_Q=num_heads, H_K=num_kv_heads, D=head_dim, R=cos.shape[1], BLOCK_D=triton.next_power_of_2(head_dim // 2),
        HEADS=heads, GROUP=0 if mask is None else num_heads // mask.shape[1], UNIT_OFFSET=unit_offset,
        INTERLEAVED=interleaved, num_warps=4,
    )  # fmt: skip
    return out
