"""Decode attention as an operator of torch."""

from collections.abc import Sequence
from typing import Any

import torch

from wide.errors import ShapeError
from wide.kernels.attention_decode.reference import attention_decode_reference
from wide.kernels.attention_decode.tiles import DecodeTile, default_tile
from wide.kernels.attention_inputs import HeadUnits, check_keys_and_values, check_per_sequence, check_score_options
from wide.kernels.device import device_facts, half_obstacle
from wide.kernels.registration import check_backend, operator

_NAME = "attention_decode"
# Every program counts all (sequence, unit) pairs in its registers.
_MAX_PAIRS = 16384


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
        backend: 'torch' or 'triton'.
        tile: A `DecodeTile`, how the Triton kernels share out the work; None takes a default for the device.

    Returns:
        [B, H_q, d] in the dtype of `q`, accumulated in float32; zeros for skipped pairs and empty caches.

    Raises:
        ShapeError: If tensors or options do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    return _attention_decode(q, k, v, lengths, mask, starts, pages, window, soft_cap, scale, backend, tile or ())


def _check_mask(q: torch.Tensor, mask: torch.Tensor | None, num_kv_heads: int) -> None:
    num_groups = 1
    if mask is not None:
        if mask.dim() != 2 or mask.dtype != torch.bool or mask.shape[0] != q.shape[0] or mask.device != q.device:
            raise ShapeError(
                f"{_NAME} wants a bool mask [{q.shape[0]}, N_G] on {q.device}, "
                f"got {mask.dtype} {tuple(mask.shape)} on {mask.device}"
            )
        if mask.stride(1) != 1:
            raise ShapeError(f"{_NAME}: the groups of the mask must have stride 1, got {mask.stride()}")
        num_groups = mask.shape[1]
    units = HeadUnits(num_query_heads=q.shape[1], num_kv_heads=num_kv_heads, num_groups=num_groups)
    if q.shape[0] * units.num_units > _MAX_PAIRS:
        raise ShapeError(
            f"{_NAME}: {q.shape[0]} sequences of {units.num_units} head units are more than {_MAX_PAIRS} pairs; "
            "split the batch"
        )


def _check_pages(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor | None) -> None:
    if pages is None:
        return
    if pages.dim() != 2 or pages.shape[0] != q.shape[0] or pages.dtype != torch.int32 or pages.device != q.device:
        raise ShapeError(
            f"{_NAME} wants pages int32 [{q.shape[0]}, N] on {q.device}, "
            f"got {pages.dtype} {tuple(pages.shape)} on {pages.device}"
        )
    if pages.stride(1) != 1 or any(part.stride(0) != part.shape[1] * part.stride(1) for part in (k, v)):
        raise ShapeError(f"{_NAME}: a sequence's pages must have stride 1, and pages of K and V lie without gaps")


@operator(lambda q: q.new_empty(q.shape))
def _attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None,
    starts: torch.Tensor | None,
    pages: torch.Tensor | None,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    if q.dim() != 3 or 0 in q.shape:
        raise ShapeError(f"{_NAME} wants q [B, H_q, d], got {tuple(q.shape)}")
    check_keys_and_values(_NAME, q, k, v, is_paged=pages is not None)
    _check_pages(q, k, v, pages)
    check_per_sequence(_NAME, "lengths", lengths, q)
    check_per_sequence(_NAME, "starts", starts, q)
    check_score_options(_NAME, window, soft_cap, scale)
    _check_mask(q, mask, k.shape[2])
    reason = half_obstacle(q.device, q.dtype) if backend == "triton" else None
    check_backend(_NAME, backend, ("torch", "triton"), reason)
    if backend == "torch":
        return attention_decode_reference(
            q, k, v, lengths, mask, starts=starts, pages=pages, window=window, soft_cap=soft_cap, scale=scale
        )
    from wide.kernels.attention_decode import _triton

    chosen = DecodeTile(*tile) if tile else default_tile(device_facts(q.device), q.shape[-1], q.shape[0] * k.shape[2])
    options: dict[str, Any] = {"starts": starts, "pages": pages, "window": window, "soft_cap": soft_cap, "scale": scale}
    return _triton.attention_decode(q, k, v, lengths, mask, tile=chosen, **options)
