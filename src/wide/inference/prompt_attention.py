"""Attention over a prompt as the table names it."""

from torch import Tensor

from wide.inference.operator_table import OperatorTable
from wide.kernels.attention_prefill import attention_prefill
from wide.kernels.reordering import SequenceReordering
from wide.kernels.tuning import Choice


def attend_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: SequenceReordering,
    table: OperatorTable,
    *,
    length: int,
    starts: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    zero_skipped: bool = False,
) -> Tensor:
    """Attend causally with the executing (token, group) pairs, see `attention_prefill`.

    Left padding, windows and soft caps run the general kernel of the table's backend, whatever was measured.

    Args:
        q: Queries, [B, T_q, H_q, d].
        k: Keys, [B, T_k, H_k, d].
        v: Values, as `k`.
        order: Executing tokens of each (sequence, group).
        table: Which kernel runs.
        length: Tokens of a sequence, by which the table chooses.
        starts: First real key of each sequence, int32 [B]; None = 0.
        window: Keys that a query sees at most; None = all.
        soft_cap: Bound of the scores; None = unbounded.
        scale: Factor of the scores; None = 1 / sqrt(d).
        zero_skipped: Whether skipped pairs hold zeros.
    """
    choice = table.choice("attention", length)
    is_plain = starts is None and window is None and soft_cap is None
    if choice.backend == "dense" or (choice.backend == "gluon" and not is_plain):
        choice = Choice(backend=table.backend)
    return attention_prefill(
        q,
        k,
        v,
        order,
        starts=starts,
        window=window,
        soft_cap=soft_cap,
        scale=scale,
        zero_skipped=zero_skipped,
        backend=choice.backend,
        tile=choice.tile,
    )
