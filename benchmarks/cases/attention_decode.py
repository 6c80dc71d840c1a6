"""What `attention_decode` promises: its cases, and what a right result is."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.cases.contract import Operator, make_case, named, random_mask, random_values, relative_error
from wide.kernels.attention_decode.op import BACKENDS, DecodeShape, attention_decode
from wide.kernels.tuning import Case


def _shape(case: Case) -> DecodeShape:
    query_heads, kv_heads, groups, head_dim = named(case, "num_query_heads", "num_kv_heads", "num_groups", "head_dim")
    return DecodeShape(case.dtype, head_dim, query_heads // math.lcm(kv_heads, groups), bool(case.sizes.get("page")))


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    sizes = case.sizes
    batch, room = sizes["batch"], sizes["key_len"]
    cache_shape = (batch, room, sizes["num_kv_heads"], sizes["head_dim"])
    q = random_values(case, (batch, sizes["num_query_heads"], sizes["head_dim"]), device, salt=1)
    k = random_values(case, cache_shape, device, salt=2)
    v = random_values(case, cache_shape, device, salt=3)
    mask = random_mask(case, (batch, sizes["num_groups"]), device)
    # Ragged: full, then ever shorter, down to an empty cache.
    lengths = (room - torch.arange(batch, device=device) * sizes.get("ragged", 0)).clamp_min(0).int()
    starts = (torch.arange(batch, device=device) * sizes.get("padding", 0)).int()
    places = torch.arange(room, device=device)
    unused = (places >= lengths[:, None]) | (places < starts[:, None])
    k[unused] = v[unused] = float("nan")
    if sizes["num_groups"] == sizes["num_kv_heads"]:
        skipped = ~mask[:, None, :].expand(-1, room, -1)
        k[skipped] = v[skipped] = float("nan")
    pages = None
    if sizes.get("page"):
        k, v, pages = _paged(k, v, sizes["page"])
    return {"pages": pages, "q": q, "k": k, "v": v, "lengths": lengths, "mask": mask, "starts": starts, **case.options}


def _paged(k: torch.Tensor, v: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return caches cut into pages, backwards and with one of NaN behind them, and where each sequence's lie."""
    batch, room, heads, dim = k.shape
    count = -(-room // size)
    pages = torch.arange(batch * count, dtype=torch.int32, device=k.device).flip(0)
    memory = []
    for part in (k, v):
        whole = part.new_full((batch, count * size, heads, dim), float("nan"))
        whole[:, :room] = part
        memory.append(
            torch.cat([whole.view(-1, size, heads, dim).flip(0), whole.new_full((1, size, heads, dim), float("nan"))])
        )
    return memory[0], memory[1], pages.view(batch, count)


def _compare(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    heads = arguments["mask"].repeat_interleave(got.shape[1] // arguments["mask"].shape[1], 1)
    if not torch.equal(got[~heads], torch.zeros_like(got[~heads])):
        return float("inf")
    return relative_error(got[heads], wanted[heads])


_NAMES = "batch", "key_len", "num_query_heads", "num_kv_heads", "num_groups", "head_dim", "ragged", "padding", "page"


def _case(batch: int, room: int, heads: tuple[int, int, int], head_dim: int, **more: Any) -> Case:
    edges = (more.pop(name, 0) for name in ("ragged", "padding", "page"))
    return make_case(_NAMES, (batch, room, *heads, head_dim, *edges), **more)


ATTENTION_DECODE = Operator(
    name="attention_decode",
    call=attention_decode,
    backends=BACKENDS,
    shape=_shape,
    cases=(
        _case(1, 1, (4, 2, 2), 64, active=1.0),
        _case(2, 3, (4, 1, 1), 128, active=1.0),
        _case(3, 17, (4, 4, 4), 64, active=0.0),
        _case(5, 64, (8, 2, 2), 96, ragged=21),
        _case(3, 127, (8, 4, 4), 64, ragged=50, padding=11),
        _case(3, 127, (6, 2, 1), 64, window=20, padding=60),
        _case(2, 100, (12, 4, 6), 64, soft_cap=2.0, scale=0.3),
        _case(2, 40, (4, 1, 2), 256),
        _case(2, 90, (14, 2, 2), 64, dtype=torch.float32, active=0.8),
        _case(1, 300, (32, 8, 8), 64, active=0.5),
        _case(5, 64, (8, 2, 2), 64, ragged=15, page=16),
        _case(3, 50, (8, 4, 2), 64, ragged=20, page=4, window=19),
    ),
    build=_build,
    compare=_compare,
    tolerance={torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-5},
)
