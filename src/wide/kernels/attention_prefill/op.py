"""Prefill attention as an operator of torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from wide.errors import ShapeError
from wide.kernels.attention_inputs import HeadUnits, check_keys_and_values, check_score_options
from wide.kernels.attention_prefill.reference import attention_prefill_reference
from wide.kernels.dispatch import Backends
from wide.kernels.registration import check_tensor, operator
from wide.kernels.reordering import SequenceReordering

_NAME = "attention_prefill"


class PrefillShape(NamedTuple):
    """What a backend may refuse; `heads` are query heads of one KV head and one group."""

    dtype: torch.dtype
    head_dim: int
    heads: int = 1


BACKENDS = Backends(_NAME, __package__, attention_prefill_reference)


@operator(lambda q: q.new_empty(q.shape))
def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    reordering: SequenceReordering,
    *,
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
        runs: First key that each query sees, and the place behind its last one, int32 [2, T_q], neither ever falling:
            queries and keys of several sequences one behind the other. Wants B = 1 and no window (which the first
            keys can hold). None = causal.
        window: As in `attention_decode`, like `soft_cap`, `scale` and `tile`.
        zero_skipped: Whether skipped pairs hold zeros; otherwise they are unspecified memory.

    Returns:
        [B, T_q, H_q, d] in the dtype of `q`, accumulated in float32.

    Source: WIDE, attention with gathered queries; running softmax as in FlashAttention-2.
    """
    if q.dim() != 4 or 0 in q.shape:
        raise ShapeError(f"{_NAME} wants q [B, T_q, H_q, d], got {tuple(q.shape)}")
    index, counts = reordering
    check_keys_and_values(_NAME, q, k, v)
    check_score_options(_NAME, window, soft_cap, scale)
    check_tensor(_NAME, "index", index, torch.int32, (q.shape[0], counts.shape[-1], q.shape[1]))
    check_tensor(_NAME, "counts", counts, torch.int32, index.shape[:2])
    check_tensor(_NAME, "runs", runs, torch.int32, (2, q.shape[1]))
    units = HeadUnits(num_query_heads=q.shape[2], num_kv_heads=k.shape[2], num_groups=counts.shape[1])
    if runs is not None and (q.shape[0] != 1 or window is not None):
        raise ShapeError(f"{_NAME}: runs want a batch of 1 (got {q.shape[0]}) and no window")
    if runs is None and k.shape[1] < q.shape[1]:
        raise ShapeError(f"{_NAME}: {q.shape[1]} causal queries need at least as many keys, got {k.shape[1]}")
    shape = PrefillShape(q.dtype, q.shape[3], units.heads_per_unit)
    options: dict[str, Any] = {"runs": runs, "window": window, "zero_skipped": zero_skipped}
    options |= {"soft_cap": soft_cap, "scale": scale, "tile": tile}
    return BACKENDS.run(backend, q.device, shape, q, k, v, index, counts, **options)
