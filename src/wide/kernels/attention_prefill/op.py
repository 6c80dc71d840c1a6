"""Prefill attention as an operator of torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.attention_inputs import HeadUnits, check_keys_and_values, check_per_sequence, check_score_options
from wide.kernels.attention_prefill.reference import attention_prefill_reference, executed
from wide.kernels.attention_prefill.tiles import HopperTile, PrefillTile, can_use_tma, default_tile
from wide.kernels.clear_skipped import cleared
from wide.kernels.device import HALF, device_facts, half_obstacle, hopper_obstacle
from wide.kernels.registration import check_backend, operator
from wide.kernels.reordering import SequenceReordering

_NAME = "attention_prefill"
_GLUON_HEAD_DIMS = (64, 128)
_GLUON_ROWS = 128


def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    reordering: SequenceReordering,
    *,
    starts: torch.Tensor | None = None,
    runs: torch.Tensor | None = None,
    is_causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    zero_skipped: bool = False,
    backend: str,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attend with the executing (token, group) pairs only; K and V are dense.

    The last query stands at the last key, so with T_k > T_q the queries continue a prefix (chunked prefill).

    Args:
        q: Queries, [B, T_q, H_q, d]; fp16 or bf16, last stride 1, other strides free.
        k: Keys, [B, T_k, H_k, d]; a head-major cache goes in as a transposed view.
        v: Values, as `k`.
        reordering: Executing tokens of each (sequence, group); N_G groups of H_q / N_G neighbouring heads.
        starts: First real key of each sequence (left padding), int32 [B]; None = 0.
        runs: First key that each query sees, and the place behind its last one, int32 [2, T_q], neither ever falling:
            queries and keys of several sequences one behind the other. Wants B = 1, no `starts` and no window (which
            the first keys can hold). None = causal.
        is_causal: Whether a query sees no later key.
        window: Keys that a query sees at most, itself included (sliding window); None = all. Needs `is_causal`.
        soft_cap: Bound c of the scores, c * tanh(score / c); None = unbounded.
        scale: Factor of the scores; None = 1 / sqrt(d).
        zero_skipped: Whether skipped pairs hold zeros; otherwise they are unspecified memory.
        backend: 'torch', 'triton', 'gluon' (sm_90; head sizes 64 and 128, without padding, window and soft cap) or
            'dense' (scaled_dot_product_attention, computes everything).
        tile: A `PrefillTile` for Triton, a `HopperTile` for Gluon; None takes a default for the device.

    Returns:
        [B, T_q, H_q, d] in the dtype of `q`, accumulated in float32.

    Raises:
        ShapeError: If tensors or options do not fit.
        UnsupportedBackendError: If the backend cannot run here.

    Source: WIDE, attention with gathered queries; running softmax as in FlashAttention-2.
    """
    return _attention_prefill(
        q,
        k,
        v,
        reordering.index,
        reordering.counts,
        starts,
        runs,
        is_causal,
        window,
        soft_cap,
        scale,
        zero_skipped,
        backend,
        tile or (),
    )


def fits(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int,
    is_plain: bool = True,
    has_offset: bool = False,
) -> str | None:
    """Return why a backend cannot run a shape on a device, or None.

    Args:
        backend: Its name.
        device: Where.
        dtype: Of queries, keys and values.
        head_dim: d.
        is_plain: Whether there are no left padding, runs, window or soft cap.
        has_offset: Whether causal queries follow keys of others before them.
    """
    if backend == "triton":
        return half_obstacle(device, dtype)
    if backend == "dense" and (has_offset or not is_plain):
        return "scaled_dot_product_attention takes no left padding, window, soft cap or query offset here"
    if backend != "gluon":
        return None
    if not is_plain or dtype not in HALF or head_dim not in _GLUON_HEAD_DIMS:
        return hopper_obstacle(device) or (
            "the Hopper kernel takes half precision, head sizes 64 and 128, and no left padding, window or soft cap, "
            f"got {dtype}, head size {head_dim}{'' if is_plain else ' and one of them'}"
        )
    return hopper_obstacle(device)


def _check_lists(q: torch.Tensor, index: torch.Tensor, counts: torch.Tensor) -> None:
    if index.dim() != 3 or index.shape[::2] != q.shape[:2] or counts.shape != index.shape[:2]:
        raise ShapeError(
            f"{_NAME} wants index [B, N_G, T_q] and counts [B, N_G] for q {tuple(q.shape)}, "
            f"got {tuple(index.shape)} and {tuple(counts.shape)}; make them with reorder_sequences"
        )
    for name, tensor in (("index", index), ("counts", counts)):
        if tensor.dtype != torch.int32 or tensor.device != q.device or not tensor.is_contiguous():
            raise ShapeError(f"{_NAME}: {name} must be contiguous int32 on {q.device}, got {tensor.dtype}")


def _check_runs(q: torch.Tensor, runs: torch.Tensor | None, *, is_plain: bool) -> None:
    if runs is None:
        return
    if (
        runs.shape != (2, q.shape[1])
        or runs.dtype != torch.int32
        or runs.device != q.device
        or not runs.is_contiguous()
    ):
        raise ShapeError(
            f"{_NAME} wants runs contiguous int32 [2, {q.shape[1]}] on {q.device}, "
            f"got {runs.dtype} {tuple(runs.shape)} on {runs.device}"
        )
    if q.shape[0] != 1 or not is_plain:
        raise ShapeError(f"{_NAME}: runs want a batch of 1 (got {q.shape[0]}), no starts, no window and is_causal=True")


@operator(lambda q: q.new_empty(q.shape))
def _attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor | None,
    runs: torch.Tensor | None,
    is_causal: bool,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    zero_skipped: bool,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    if q.dim() != 4 or 0 in q.shape:
        raise ShapeError(f"{_NAME} wants q [B, T_q, H_q, d], got {tuple(q.shape)}")
    check_keys_and_values(_NAME, q, k, v)
    check_per_sequence(_NAME, "starts", starts, q)
    check_score_options(_NAME, window, soft_cap, scale)
    _check_lists(q, index, counts)
    HeadUnits(num_query_heads=q.shape[2], num_kv_heads=k.shape[2], num_groups=counts.shape[1])
    if window is not None and not is_causal:
        raise ShapeError(f"{_NAME}: a sliding window needs is_causal=True")
    _check_runs(q, runs, is_plain=starts is None and window is None and is_causal)
    if runs is None and is_causal and k.shape[1] < q.shape[1]:
        raise ShapeError(f"{_NAME}: {q.shape[1]} causal queries need at least as many keys, got {k.shape[1]}")
    is_plain = starts is None and runs is None and window is None and soft_cap is None
    has_offset = is_causal and q.shape[1] != k.shape[1]
    reason = fits(backend, q.device, q.dtype, head_dim=q.shape[3], is_plain=is_plain, has_offset=has_offset)
    check_backend(_NAME, backend, ("torch", "triton", "gluon", "dense"), reason)
    scores: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    edges: dict[str, Any] = {"starts": starts, "runs": runs, "window": window, "soft_cap": soft_cap}
    if backend == "torch":
        return attention_prefill_reference(q, k, v, index, counts, **scores, **edges)
    if backend == "dense":
        return _dense(q, k, v, executed(index, counts, q.shape[1]) if zero_skipped else None, **scores)
    facts = device_facts(q.device)
    uses_tma = can_use_tma(facts, k) and can_use_tma(facts, v)
    if backend == "gluon":
        if not uses_tma or q.shape[2] > _GLUON_ROWS * k.shape[2]:
            raise UnsupportedBackendError(
                f"{_NAME}: the Hopper kernel wants 16-byte strides and at most {_GLUON_ROWS} query heads of a KV head, "
                f"got strides {k.stride()} and {v.stride()}, {q.shape[2]} and {k.shape[2]} heads; choose "
                "backend='triton'"
            )
        from wide.kernels.attention_prefill import _gluon

        hopper_tile = HopperTile(*tile) if tile else HopperTile()
        return _gluon.attention_prefill(q, k, v, index, counts, tile=hopper_tile, zero_skipped=zero_skipped, **scores)
    from wide.kernels.attention_prefill import _triton

    chosen = PrefillTile(*tile) if tile else default_tile(facts, q.shape[-1], uses_tma=uses_tma)
    return _triton.attention_prefill(q, k, v, index, counts, tile=chosen, zero_skipped=zero_skipped, **scores, **edges)


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attend with everything; skipped queries may hold anything, so a query's row is all that they can spoil."""
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    out = out.transpose(1, 2).contiguous()
    if kept is not None:
        cleared(out.view(q.shape[0] * q.shape[1], -1), kept.flatten(0, 1))
    return out
