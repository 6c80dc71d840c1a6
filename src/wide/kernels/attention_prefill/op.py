"""Prefill attention as an operator of torch."""

from collections.abc import Sequence
from typing import Any

import torch

from wide.errors import ShapeError
from wide.kernels.attention_inputs import HeadUnits, check_keys_and_values, check_score_options
from wide.kernels.attention_prefill.reference import attention_prefill_reference
from wide.kernels.attention_prefill.tiles import PrefillTile, can_use_tma, default_tile
from wide.kernels.device import HALF, backend_obstacle, device_facts, half_misfit
from wide.kernels.native.cute import CuteTile, tile_misfit
from wide.kernels.native.launch import misaligned
from wide.kernels.registration import check_backend, check_tensor, operator
from wide.kernels.reordering import SequenceReordering

_NAME = "attention_prefill"
_CUTE_HEAD_DIMS, _MOST_HEADS = (64, 96, 128, 256), 64
# Up to here a larger tile of TileLang fits the registers of sm_90.
_MOST_CHANNELS = 128


@operator(lambda q: q.new_empty(q.shape))
def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    reordering: SequenceReordering,
    *,
    starts: torch.Tensor | None = None,
    runs: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    zero_skipped: bool = False,
    backend: str,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attend causally with the executing (token, group) pairs only; K and V are dense.

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
        window: Keys that a query sees at most, itself included (sliding window); None = all.
        soft_cap: Bound c of the scores, c * tanh(score / c); None = unbounded.
        scale: Factor of the scores; None = 1 / sqrt(d).
        zero_skipped: Whether skipped pairs hold zeros; otherwise they are unspecified memory.
        backend: 'torch', 'triton', 'tilelang' (d a multiple of 16) or 'cute' (d of 64, 96, 128 or 256); both take at
            most 64 query heads of a KV head and group, and strides of 8 elements.
        tile: A `PrefillTile` for Triton and TileLang, a `CuteTile` for CuTe; None takes a default for the device.

    Returns:
        [B, T_q, H_q, d] in the dtype of `q`, accumulated in float32.

    Raises:
        ShapeError: If tensors or options do not fit.
        UnsupportedBackendError: If the backend cannot run here.

    Source: WIDE, attention with gathered queries; running softmax as in FlashAttention-2.
    """
    if q.dim() != 4 or 0 in q.shape:
        raise ShapeError(f"{_NAME} wants q [B, T_q, H_q, d], got {tuple(q.shape)}")
    index, counts = reordering
    check_keys_and_values(_NAME, q, k, v)
    check_tensor(_NAME, "starts", starts, torch.int32, q.shape[:1])
    check_score_options(_NAME, window, soft_cap, scale)
    check_tensor(_NAME, "index", index, torch.int32, (q.shape[0], counts.shape[-1], q.shape[1]))
    check_tensor(_NAME, "counts", counts, torch.int32, index.shape[:2])
    check_tensor(_NAME, "runs", runs, torch.int32, (2, q.shape[1]))
    units = HeadUnits(num_query_heads=q.shape[2], num_kv_heads=k.shape[2], num_groups=counts.shape[1])
    if runs is not None and (q.shape[0] != 1 or starts is not None or window is not None):
        raise ShapeError(f"{_NAME}: runs want a batch of 1 (got {q.shape[0]}), no starts and no window")
    if runs is None and k.shape[1] < q.shape[1]:
        raise ShapeError(f"{_NAME}: {q.shape[1]} causal queries need at least as many keys, got {k.shape[1]}")
    reason = backend_obstacle(backend, q.device, q.dtype)
    reason = reason or misfit(backend, q.dtype, head_dim=q.shape[3], heads=units.heads_per_unit)
    if reason is None and backend in ("tilelang", "cute"):
        reason = misaligned({"q": q, "k": k, "v": v}, ())
    cute_tile = CuteTile(*(tile or ())) if backend == "cute" else None
    if reason is None and cute_tile is not None:
        reason = tile_misfit(cute_tile)
    check_backend(_NAME, backend, ("torch", "triton", "tilelang", "cute"), reason)
    edges: dict[str, Any] = {"starts": starts, "runs": runs, "window": window, "soft_cap": soft_cap}
    if backend == "torch":
        return attention_prefill_reference(q, k, v, index, counts, scale=scale, **edges)
    options: dict[str, Any] = {"zero_skipped": zero_skipped, "scale": scale}
    if cute_tile is not None:
        from wide.kernels.attention_prefill import _cute

        return _cute.attention_prefill(q, k, v, index, counts, tile=cute_tile, **options, **edges)
    facts = device_facts(q.device)
    uses_tma = can_use_tma(facts, k) and can_use_tma(facts, v)
    chosen = PrefillTile(*tile) if tile else default_tile(facts, q.shape[-1], uses_tma=uses_tma)
    if backend == "tilelang":
        from wide.kernels.attention_prefill import _tilelang

        if not tile and facts.capability == 90 and q.shape[-1] <= _MOST_CHANNELS:
            # Three groups of warps have one to multiply while two look for maxima.
            chosen = PrefillTile(192, 96, 12, 2)
        return _tilelang.attention_prefill(q, k, v, index, counts, tile=chosen, **options, **edges)
    from wide.kernels.attention_prefill import _triton

    return _triton.attention_prefill(q, k, v, index, counts, tile=chosen, **options, **edges)


def misfit(backend: str, dtype: torch.dtype, *, head_dim: int, heads: int = 1) -> str | None:
    """Return why a backend does not take a shape, on whatever device, or None.

    Args:
        backend: Its name.
        dtype: Of queries, keys and values.
        head_dim: d.
        heads: Query heads of one KV head and one group.
    """
    if backend == "triton":
        return half_misfit(dtype)
    if backend == "tilelang" and (dtype not in HALF or head_dim % 16 or heads > _MOST_HEADS):
        return (
            f"the kernel in TileLang takes half precision, head sizes that 16 divides and at most {_MOST_HEADS} query "
            f"heads of a KV head and group, got {dtype}, head size {head_dim} and {heads} heads"
        )
    if backend == "cute" and (dtype not in HALF or head_dim not in _CUTE_HEAD_DIMS or heads > _MOST_HEADS):
        return (
            f"the kernel on CuTe takes half precision, head sizes of {_CUTE_HEAD_DIMS} and at most {_MOST_HEADS} query "
            f"heads of a KV head and group, got {dtype}, head size {head_dim} and {heads} heads"
        )
    return None
