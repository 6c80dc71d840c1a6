"""What `attention_prefill` promises: its cases, and what a right result is."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.cases.contract import Operator, make_case, named, random_mask, random_values, relative_error
from wide.kernels.attention_prefill.op import BACKENDS, PrefillShape, attention_prefill
from wide.kernels.attention_prefill.reference import executed
from wide.kernels.reordering import SequenceReordering
from wide.kernels.tuning import Case


def _shape(case: Case) -> PrefillShape:
    query_heads, kv_heads, groups, head_dim = named(case, "num_query_heads", "num_kv_heads", "num_groups", "head_dim")
    return PrefillShape(case.dtype, head_dim, query_heads // math.lcm(kv_heads, groups))


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    sizes = case.sizes
    batch, num_queries, num_heads, head_dim = (sizes[n] for n in ("batch", "query_len", "num_query_heads", "head_dim"))
    keys_shape = (batch, sizes["key_len"], sizes["num_kv_heads"], head_dim)
    mask = random_mask(case, (batch, num_queries, sizes["num_groups"]), device)
    places = torch.arange(num_queries, device=device)
    # Executing tokens first, in order; what follows them must not matter, so it is out of range.
    order = torch.argsort(torch.where(mask, 0, num_queries) + places[:, None], dim=1).transpose(1, 2)
    counts = mask.sum(1).int()
    arguments: dict[str, Any] = {
        "q": random_values(case, (batch, num_queries, num_heads, head_dim), device, salt=1),
        "k": random_values(case, keys_shape, device, salt=2),
        "v": random_values(case, keys_shape, device, salt=3),
        "reordering": SequenceReordering(
            torch.where(places < counts[..., None], order, 1 << 30).int().contiguous(), counts
        ),
        **case.options,
    }
    skipped = ~mask.repeat_interleave(num_heads // sizes["num_groups"], 2)
    arguments["q"][skipped] = float("nan")
    if sizes.get("requests"):
        arguments["runs"] = _runs(num_queries, sizes["key_len"], sizes["requests"], device)
    return arguments


def _runs(num_queries: int, num_keys: int, requests: int, device: torch.device) -> torch.Tensor:
    """Return the runs of requests of equal shares of queries and keys, the queries last; those beyond see nothing."""
    queries, keys = num_queries // requests, num_keys // requests
    token = torch.arange(num_queries, device=device)
    request = token // queries
    is_real = request < requests
    low, high = request * keys, (request + 1) * keys - (queries - 1 - token % queries)
    return torch.stack([torch.where(is_real, part, requests * keys) for part in (low, high)]).int()


def _compare(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    index, counts = arguments["reordering"]
    mask = executed(index, counts, got.shape[1])
    heads = mask.repeat_interleave(got.shape[2] // mask.shape[2], 2)
    if arguments.get("zero_skipped") and got[~heads].any():
        return float("inf")
    return relative_error(got[heads], wanted[heads])


_HEADS = "num_query_heads", "num_kv_heads", "num_groups"


def _case(lengths: tuple[int, int], heads: tuple[int, int, int], head_dim: int, **more: Any) -> Case:
    names = ("batch", "query_len", "key_len", *_HEADS, "head_dim", "requests")
    requests = more.pop("requests", 0)
    return make_case(names, (1 if requests else 2, *lengths, *heads, head_dim, requests), **more)


ATTENTION_PREFILL = Operator(
    name="attention_prefill",
    call=attention_prefill,
    backends=BACKENDS,
    shape=_shape,
    cases=(
        _case((1, 1), (4, 2, 2), 64),
        _case((3, 3), (4, 1, 1), 128, active=1.0),
        _case((17, 17), (4, 4, 2), 64, active=0.0, zero_skipped=True),
        _case((64, 64), (4, 2, 4), 96, zero_skipped=True),
        _case((127, 127), (8, 2, 2), 64),
        _case((17, 80), (6, 2, 2), 64),
        _case((40, 73), (4, 2, 2), 64, window=21),
        _case((127, 127), (2, 1, 1), 64, window=8, active=0.9),
        _case((33, 50), (2, 1, 2), 64, soft_cap=2.0, scale=0.3),
        _case((20, 33), (3, 1, 1), 64),
        _case((20, 20), (2, 1, 1), 256, active=0.7),
        _case((50, 50), (12, 4, 6), 64, dtype=torch.float32),
        _case((30, 45), (14, 2, 1), 64, active=0.3),
        _case((95, 207), (8, 2, 2), 64, requests=3, zero_skipped=True),
        _case((40, 41), (4, 2, 4), 64, requests=7, soft_cap=2.0, active=0.8),
    ),
    build=_build,
    compare=_compare,
    tolerance={torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-5},
)
