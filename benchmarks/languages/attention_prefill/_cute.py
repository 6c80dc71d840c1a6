"""Prefill attention on CuTe (attention_prefill_cute.cu): blocks gather queries once and stream keys and values."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.languages.cute import LEVELS, CuteTile, cute_obstacle, cute_tile, function
from wide.kernels.attention_inputs import HeadUnits, score_factors
from wide.kernels.attention_prefill.op import BACKENDS, PrefillShape
from wide.kernels.device import HALF
from wide.kernels.dispatch import Candidate, require
from wide.kernels.native.launch import misaligned

SOURCE = Path(__file__).with_name("attention_prefill_cute.cu")
_STAGES = 2
_HEAD_DIMS, _MOST_HEADS = (64, 96, 128, 256), 64


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


def supports(shape: PrefillShape) -> str | None:
    """Return why no device runs a shape, or None."""
    if shape.dtype in HALF and shape.head_dim in _HEAD_DIMS and shape.heads <= _MOST_HEADS:
        return None
    return (
        f"the kernel on CuTe takes half precision, head sizes of {_HEAD_DIMS} and at most {_MOST_HEADS} query heads of "
        f"a KV head and group, got {shape.dtype}, head size {shape.head_dim} and {shape.heads} heads"
    )


def candidates(*_: object) -> Iterator[Candidate]:
    """Yield all levels."""
    for level in LEVELS:
        yield Candidate(CuteTile(level))


@BACKENDS.register("cute", needs=cute_obstacle, supports=supports, candidates=candidates)
def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    *,
    runs: torch.Tensor | None,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    zero_skipped: bool,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run `attention_prefill_reference` in one kernel (and a fill if `zero_skipped`); the tile is a `CuteTile`."""
    require(misaligned({"q": q, "k": k, "v": v}, ()))
    chosen = cute_tile(tile)
    num_heads, head_dim = q.shape[2:]
    units = HeadUnits(num_query_heads=num_heads, num_kv_heads=k.shape[2], num_groups=counts.shape[1])
    new = torch.zeros if zero_skipped else torch.empty
    out = new(q.shape, dtype=q.dtype, device=q.device)
    run = function(SOURCE, q.device, **variant(chosen, q.dtype, head_dim))
    options = window or 0, soft_cap is not None, *score_factors(scale, soft_cap, head_dim)
    run(q, k, v, out, index, counts, None, runs, units.num_units, *options)
    return out
