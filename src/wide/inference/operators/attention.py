"""Attention over a prompt as the table names it."""

from typing import Any

import torch
from torch import Tensor

from wide.inference.operators.table import OperatorTable
from wide.kernels.attention_prefill import attention_prefill
from wide.kernels.reorder import reorder_sequences
from wide.kernels.reordering import Reordering, SequenceReordering
from wide.kernels.tuning import Choice


def sequence_order(mask: Tensor | None, order: Reordering | None, q: Tensor, backend: str) -> SequenceReordering:
    """Return the places that execute in each sequence; of a single one, those that the query product gathered.

    Args:
        mask: Which groups of which tokens execute, [B * T, G] or [B, T, G]; None = all.
        order: Those that the query product gathered, if it did.
        q: Queries, [B, T, H_q, d].
        backend: Who puts them in order.
    """
    batch, length = q.shape[:2]
    if mask is None:
        index = torch.arange(length, dtype=torch.int32, device=q.device).repeat(batch, 1, 1)
        return SequenceReordering(index, torch.full_like(index[:, :, 0], length))
    if order is not None and batch == 1:
        return SequenceReordering(order.index[None], order.counts[None])
    return reorder_sequences(mask.view(batch, length, -1), backend=backend)


def attend_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: SequenceReordering,
    table: OperatorTable,
    *,
    length: int,
    **options: Any,
) -> Tensor:
    """Attend causally with the executing (token, group) pairs, see `attention_prefill`.

    Args:
        q: Queries, [B, T_q, H_q, d].
        k: Keys, [B, T_k, H_k, d].
        v: Values, as `k`.
        order: Executing tokens of each (sequence, group).
        table: Which kernel runs.
        length: Tokens of a sequence, by which the table chooses.
        options: Further arguments of `attention_prefill`.
    """
    choice = table.choice("attention", length)
    if choice.backend == "dense":
        choice = Choice(backend=table.backend)
    return attention_prefill(q, k, v, order, **options, backend=choice.backend, tile=choice.tile)
