"""Prefill attention on CuTe (attention_prefill_cute.cu): blocks gather queries once and stream keys and values."""

from pathlib import Path

import torch

from wide.kernels.attention_inputs import HeadUnits, score_factors
from wide.kernels.native.cute import CuteTile, function

SOURCE = Path(__file__).with_name("attention_prefill_cute.cu")
_STAGES = 2


def variant(tile: CuteTile, dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """Return what is compiled in for a shape.

    Args:
        tile: How it skips and loads.
        dtype: Of queries, keys and values.
        head_dim: d.
    """
    return {
        "FLOAT16": int(dtype == torch.float16),
        "LEVEL": tile.level,
        "HEAD_DIM": head_dim,
        "STAGES": tile.num_stages or _STAGES,
    }


def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    *,
    tile: CuteTile,
    starts: torch.Tensor | None,
    runs: torch.Tensor | None,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    zero_skipped: bool,
) -> torch.Tensor:
    """Run `attention_prefill_reference` in one kernel (and a fill if `zero_skipped`)."""
    num_heads, head_dim = q.shape[2:]
    units = HeadUnits(num_query_heads=num_heads, num_kv_heads=k.shape[2], num_groups=counts.shape[1])
    new = torch.zeros if zero_skipped else torch.empty
    out = new(q.shape, dtype=q.dtype, device=q.device)
    run = function(SOURCE, q.device, **variant(tile, q.dtype, head_dim))
    options = window or 0, soft_cap is not None, *score_factors(scale, soft_cap, head_dim)
    run(q, k, v, out, index, counts, starts, runs, units.num_units, *options)
    return out
