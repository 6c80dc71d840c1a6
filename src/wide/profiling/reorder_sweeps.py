"""What the operator bench runs of reordering: FFN and attention layouts, and pattern sorts."""

from collections.abc import Iterator

import torch

from wide.kernels.reorder import reorder, reorder_patterns, reorder_sequences
from wide.profiling.sweeps import ATTENTION_GROUP, FFN, HIDDEN, Run, Sweep, random_rows


def reorder_sweeps(rows: tuple[int, ...]) -> Iterator[Sweep]:
    """Time reordering alone: FFN and attention layouts, and pattern sorts."""
    for num_rows in rows:
        ffn, attention = random_rows(num_rows, FFN // 128, 0.5), random_rows(num_rows, HIDDEN // ATTENTION_GROUP, 0.5)

        def lists(mask: torch.Tensor, rank: bool) -> Run:
            return lambda: reorder(mask, with_rank=rank, backend="triton").index

        def sequences(mask: torch.Tensor) -> Run:
            return lambda: reorder_sequences(mask.unsqueeze(0), backend="triton").index

        def patterns(mask: torch.Tensor, groups: int, empty: bool) -> Run:
            return lambda: reorder_patterns(mask, groups_per_block=groups, keeps_empty=empty, backend="triton").index

        candidates = {
            "112 groups": lists(ffn, False),
            "112 groups with rank": lists(ffn, True),
            "8 groups": lists(attention, False),
            "8 groups, per sequence": sequences(attention),
            **{f"patterns of {s}, 112 groups": patterns(ffn, s, False) for s in (1, 4, 5, 6, 8)},
            "patterns of 8, 8 groups": patterns(attention, 8, True),
        }
        facts = {"num_rows": float(num_rows)}
        yield Sweep(
            name=f"reorder M={num_rows}", peer="112 groups", candidates=candidates, flop=0, error=None, facts=facts
        )
