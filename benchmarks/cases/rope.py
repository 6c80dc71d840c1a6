"""What `rope_to_cache` promises: its cases, and what a right result is."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.cases.contract import Operator, compare_all, make_case, named, random_mask, random_values
from wide.kernels.rope.op import BACKENDS, rope_to_cache
from wide.kernels.tuning import Case

_SIZES = ("batch", "length", "room", "num_query_heads", "num_kv_heads", "head_dim")
_case = functools.partial(make_case, _SIZES)


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    batch, length, room, heads, kv_heads, dim = named(case, *_SIZES)
    fused = random_values(case, (batch, length, heads + 2 * kv_heads, dim), device, salt=1)
    q, k, v = fused.split((heads, kv_heads, kv_heads), 2)
    turned = case.options.get("turned", dim)
    angles = torch.arange(room)[:, None] * 0.5 ** torch.arange(turned // 2)[None, :]
    angles = torch.cat((angles, angles), 1).to(device)
    table = torch.float32 if case.options.get("wide_table") else case.dtype
    caches = [torch.zeros(batch, kv_heads, room, dim, dtype=case.dtype, device=device) for _ in range(2)]
    norms = [
        random_values(case, (dim,), device, salt=salt) if case.options.get("has_norm") else None for salt in (2, 3)
    ]
    groups = case.options.get("num_groups", 0)
    mask = random_mask(case, (batch * length, groups), device) if groups else None
    if mask is not None:
        q.masked_fill_(~_heads_of(mask, q), float("nan"))
    places = None
    if case.options.get("is_shared"):
        caches = [cache.transpose(0, 1).flatten(1, 2)[None] for cache in caches]
        places = torch.arange(batch * length, device=device).flip(0).contiguous()
    return {
        "places": places,
        "q": q,
        "k": k,
        "v": v,
        "cos": angles.cos().to(table),
        "sin": angles.sin().to(table),
        "positions": (torch.arange(batch, device=device) * 3 % (room - length + 1)).int(),
        "k_cache": caches[0].transpose(1, 2),
        "v_cache": caches[1].transpose(1, 2),
        "mask": mask,
        "q_norm": norms[0],
        "k_norm": norms[1],
        "unit_offset": bool(case.options.get("unit_offset")),
        "interleaved": bool(case.options.get("interleaved")),
    }


def _in_copies(*, backend: str, **arguments: Any) -> tuple[torch.Tensor, ...]:
    """Run on copies of the caches, and return them, too, so that what was written can be compared."""
    caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    return rope_to_cache(**{**arguments, **caches}, backend=backend), *caches.values()


def _heads_of(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return which heads execute, bool [B, T, H_q, 1]."""
    return mask.repeat_interleave(q.shape[2] // mask.shape[1], 1).view(*q.shape[:3], 1)


def _compare(arguments: Mapping[str, Any], got: Any, wanted: Any) -> float:
    mask = arguments["mask"]
    if mask is not None:
        # Skipped heads hold anything.
        heads = _heads_of(mask, wanted[0])
        got, wanted = ((torch.where(heads, turned, 0), *caches) for turned, *caches in (got, wanted))
    return compare_all(arguments, got, wanted)


ROPE = Operator(
    name="rope_to_cache",
    call=_in_copies,
    backends=BACKENDS,
    cases=(
        _case((1, 1, 1, 4, 2, 16)),
        _case((3, 1, 9, 14, 2, 64)),
        _case((2, 5, 7, 4, 1, 96)),
        _case((2, 3, 4, 6, 6, 16), has_norm=True),
        _case((1, 4, 8, 32, 8, 128), dtype=torch.float32, has_norm=True),
        _case((2, 5, 7, 14, 2, 64), num_groups=2),
        _case((1, 7, 8, 12, 4, 16), dtype=torch.float32, num_groups=12, has_norm=True),
        _case((3, 2, 4, 32, 8, 128), num_groups=8),
        _case((2, 3, 4, 4, 2, 16), interleaved=True),
        _case((1, 5, 7, 6, 2, 96), interleaved=True, wide_table=True, num_groups=2),
        _case((2, 3, 4, 4, 2, 64), interleaved=True, turned=32),
        _case((1, 4, 8, 6, 3, 96), dtype=torch.float32, turned=24),
        _case((2, 5, 7, 4, 1, 128), turned=0, has_norm=True, unit_offset=True),
        _case((2, 2, 3, 8, 4, 256), has_norm=True, unit_offset=True),
        _case((5, 1, 9, 8, 2, 64), is_shared=True),
    ),
    build=_build,
    compare=_compare,
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
)
