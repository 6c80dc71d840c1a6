"""Decode attention as an operator of torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from wide.errors import ShapeError
from wide.kernels.attention_decode.reference import attention_decode_reference
from wide.kernels.attention_inputs import HeadUnits, check_keys_and_values, check_score_options
from wide.kernels.dispatch import Backends
from wide.kernels.registration import check_tensor, operator

_NAME = "attention_decode"
MAX_PAIRS = 16384
"""Most (sequence, unit) pairs: every program counts all in its registers."""


class DecodeShape(NamedTuple):
    """What a backend may refuse; `heads` are query heads of one KV head and one group."""

    dtype: torch.dtype
    head_dim: int
    heads: int = 1
    is_paged: bool = False


BACKENDS = Backends(_NAME, __package__, attention_decode_reference)


@operator(lambda q: q.new_empty(q.shape))
def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    starts: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    backend: str,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attend with one new token a sequence; skipped (sequence, group) pairs read no keys and no values.

    Args:
        q: Queries, [B, H_q, d]; fp16 or bf16, last stride 1, other strides free.
        k: Key cache with room for T places, [B, T, H_k, d]; a head-major cache goes in as a transposed view.
        v: Value cache, as `k`.
        lengths: Places in use of each sequence, the new token's included, int32 [B], on the device; at most T.
        mask: True = execute, bool [B, N_G]; None = every pair executes.
        starts: First real place of each sequence (left padding), int32 [B]; None = 0.
        pages: Where the places of each sequence lie, int32 [B, N]; `k` and `v` are then memory [pages, P, H_k, d], one
            page behind the other, and place t is place t % P of page `pages[b, t // P]`. Entries beyond a length may
            hold anything. None = each sequence owns its places.
        window: Keys that the query sees at most, itself included (sliding window); None = all.
        soft_cap: Bound c of the scores, c * tanh(score / c); None = unbounded.
        scale: Factor of the scores; None = 1 / sqrt(d).
        tile: The backend's own, such as `DecodeTile`; None takes a default for the device.

    Returns:
        [B, H_q, d] in the dtype of `q`, accumulated in float32; zeros for skipped pairs and empty caches.
    """
    if q.dim() != 3 or 0 in q.shape:
        raise ShapeError(f"{_NAME} wants q [B, H_q, d], got {tuple(q.shape)}")
    check_keys_and_values(_NAME, q, k, v, is_paged=pages is not None)
    check_tensor(_NAME, "lengths", lengths, torch.int32, q.shape[:1])
    check_tensor(_NAME, "starts", starts, torch.int32, q.shape[:1])
    check_score_options(_NAME, window, soft_cap, scale)
    num_groups = 1 if mask is None else mask.shape[-1]
    check_tensor(_NAME, "mask", mask, torch.bool, (q.shape[0], num_groups), "last stride 1")
    units = HeadUnits(num_query_heads=q.shape[1], num_kv_heads=k.shape[2], num_groups=num_groups)
    if q.shape[0] * units.num_units > MAX_PAIRS:
        raise ShapeError(
            f"{_NAME}: {q.shape[0]} sequences of {units.num_units} head units are more than {MAX_PAIRS} pairs; "
            "split the batch"
        )
    if pages is not None:
        check_tensor(_NAME, "pages", pages, torch.int32, (q.shape[0], pages.shape[-1]), "last stride 1")
        if any(part.stride(0) != part.shape[1] * part.stride(1) for part in (k, v)):
            raise ShapeError(f"{_NAME}: pages of K and V must lie without gaps")
    shape = DecodeShape(q.dtype, q.shape[2], units.heads_per_unit, pages is not None)
    options: dict[str, Any] = {"starts": starts, "pages": pages, "window": window, "tile": tile}
    options |= {"soft_cap": soft_cap, "scale": scale}
    return BACKENDS.run(backend, q.device, shape, q, k, v, lengths, mask, **options)
