"""Norm, rope and router operators: registration, refusals."""

import functools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wide.errors import ShapeError
from wide.kernels.rms_norm.op import rms_norm
from wide.kernels.rope.op import rope_to_cache
from wide.kernels.route.op import norm_route, route
from wide.kernels.route.weights import RouteWeights, split_weights

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def _router(dtype: torch.dtype = torch.float16) -> Any:
    generator = torch.Generator().manual_seed(3)
    down, up = torch.randn(4, 64, generator=generator), torch.randn(20, 4, generator=generator)
    return split_weights(down.to(DEVICE), up.to(DEVICE), None, dtype=dtype)


# Both run the same registration; the interpreter takes its time.
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_opcheck(backend: str) -> None:
    x, weight = torch.randn(3, 64, device=DEVICE).half(), torch.randn(64, device=DEVICE).half()
    table, cache = torch.randn(9, 16, device=DEVICE).half(), torch.zeros(3, 9, 2, 16, device=DEVICE).half()
    heads = torch.randn(3, 1, 4, 16, device=DEVICE).half()
    places = torch.tensor([0, 8, 3], dtype=torch.int32, device=DEVICE)
    mask = torch.ones(3, 2, dtype=torch.bool, device=DEVICE)
    rope = (heads, heads[:, :, :2], heads[:, :, 2:], table, table, places, cache, cache + 1)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (torch.ops.wide.rms_norm, (x, weight, x + 1, 1e-6, False, backend), {}),
        (torch.ops.wide.rms_norm, (x, weight, None, 1e-6, True, backend), {}),
        (torch.ops.wide.route, (x, *_router()), {"backend": backend}),
        (torch.ops.wide.norm_route, (x, weight, x + 1, *_router(), 1e-6, False, False, backend), {}),
        (torch.ops.wide.rope_to_cache, rope, {"mask": mask, "interleaved": True, "backend": backend}),
    ]
    for operator, arguments, options in calls:
        torch.library.opcheck(operator.default, arguments, options)


def _glue(
    x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, cache: torch.Tensor, weights: RouteWeights, backend: str
) -> Any:
    """Run the operators between the products of a decode step: norm and router, turned heads, norm, router."""
    total, normed, first = norm_route(x, weight, weights, addend=x, backend=backend)
    heads, places = normed.view(3, 1, 4, 16), torch.zeros(3, dtype=torch.int32, device=x.device)
    keys, values = cache.clone(), cache.clone()
    turned = rope_to_cache(heads, heads[:, :, :2], heads[:, :, 2:], table, table, places, keys, values, backend=backend)
    total, normed = rms_norm(turned.reshape(3, 64), weight, addend=total, backend=backend)
    return total, normed, first, route(normed, weights, backend=backend), keys, values


def _glue_inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    shapes = ((3, 64), (64,), (9, 16), (3, 9, 2, 16))
    return [torch.randn(shape, generator=generator).half().to(DEVICE) for shape in shapes]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_they_trace_as_one_graph_and_give_the_same(backend: str) -> None:
    compiled = torch.compile(_glue, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(
        compiled(*_glue_inputs(), _router(), backend), _glue(*_glue_inputs(), _router(), backend), strict=True
    ):
        assert torch.equal(got, wanted)


def test_fakes_have_the_shapes_and_dtypes_of_results() -> None:
    x, weight, table, cache = _glue_inputs()
    weights, places = _router(), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    real = [*rms_norm(x, weight, addend=x, backend="torch"), *norm_route(x, weight, weights, addend=x, backend="torch")]
    heads = x.view(3, 1, 4, 16)
    parts = heads[:, :, :2], heads[:, :, 2:]
    real += [route(x, weights, backend="torch")]
    real += [rope_to_cache(heads, *parts, table, table, places, cache, cache.clone(), backend="torch")]
    with FakeTensorMode() as mode:
        x, weight, table, cache, places, heads = map(mode.from_tensor, (x, weight, table, cache, places, heads))
        weights = RouteWeights(*(None if part is None else mode.from_tensor(part) for part in weights))
        fakes = [*rms_norm(x, weight, addend=x, backend="triton")]
        fakes += norm_route(x, weight, weights, addend=x, backend="triton")
        fakes += [route(x, weights, backend="triton")]
        parts = heads[:, :, :2], heads[:, :, 2:]
        fakes += [rope_to_cache(heads, *parts, table, table, places, cache, cache.clone(), backend="triton")]
    assert [(f.shape, f.dtype) for f in fakes] == [(r.shape, r.dtype) for r in real]


def test_split_weights_keep_more_than_half_precision() -> None:
    down, up = torch.randn(8, 256) * 0.02, torch.randn(10, 8)
    for dtype, bits in ((torch.bfloat16, 16), (torch.float16, 17)):
        parts = split_weights(down, up, None, dtype=dtype).down
        error = (parts[:8].float() + parts[8:].float() - down).norm() / down.norm()
        assert error < 2.0**-bits
    assert torch.equal(split_weights(down, up, None, dtype=torch.float32).down, down)


def test_few_rows_decide_as_many_and_the_counter_is_left_at_zero() -> None:
    weights = _router()
    x = torch.randn(9, 64, device=DEVICE).half()
    whole = route(x, weights, backend="triton")
    for start in range(0, 9, 3):
        assert torch.equal(route(x[start : start + 3], weights, backend="triton"), whole[start : start + 3])
    assert not weights.counter.any()


@pytest.mark.parametrize("num_rows", [17, 37])
@pytest.mark.parametrize(("width", "num_groups", "rank"), [(600, 7, 4), (1056, 150, 40)])
def test_programs_that_share_out_channels_decide_as_whole_ones(
    num_rows: int, width: int, num_groups: int, rank: int
) -> None:
    from wide.kernels.route import _triton

    up = torch.randn(2 * num_groups, rank, device=DEVICE)
    weights = split_weights(torch.randn(rank, width, device=DEVICE), up, None, dtype=torch.float16)
    x = torch.randn(num_rows, 2 * width, device=DEVICE).half()[:, :width]
    whole = _triton.route_many(x, weights, tile=_triton.RouteTile(16, 32, 32, 4, 3))
    assert torch.equal(_triton.route_split(x, weights), whole)
    assert not weights.counter.any()


@pytest.mark.parametrize("num_groups", [7, 150])
@pytest.mark.parametrize("way", ["torch", "few", "split", "many"])
def test_padding_executes_nothing_and_executing_pairs_of_other_rows_are_counted(way: str, num_groups: int) -> None:
    from wide.kernels.route import _triton

    up = torch.randn(2 * num_groups, 40, device=DEVICE)
    weights = split_weights(torch.randn(40, 600, device=DEVICE), up, None, dtype=torch.float16)
    x = torch.randn(6 if way == "few" else 37, 600, device=DEVICE).half()
    padding = torch.arange(len(x), device=DEVICE) % 5 == 2
    counts = torch.tensor([7, 5], dtype=torch.int32, device=DEVICE)
    ways = {
        "split": _triton.route_split,
        "many": functools.partial(_triton.route_many, tile=_triton.RouteTile(16, 32, 32, 4, 3)),
    }
    run = ways.get(way) or functools.partial(route, backend="torch" if way == "torch" else "triton")
    mask = run(x, weights, padding=padding, counts=counts)
    assert torch.equal(mask, run(x, weights) & ~padding[:, None])
    assert counts.tolist() == [7 + int(mask.sum()), 5 + int((~padding).sum())]


@pytest.mark.parametrize("num_rows", [1, 3, pytest.param(16, marks=pytest.mark.slow)])
def test_routers_that_norm_decide_on_the_rows_that_they_return(num_rows: int) -> None:
    weights = split_weights(
        torch.randn(16, 1056, device=DEVICE), torch.randn(40, 16, device=DEVICE), None, dtype=torch.float16
    )
    x, addend = torch.randn(2, num_rows, 1056, device=DEVICE).half()
    weight = torch.rand(1056, device=DEVICE).half()
    total, normed, mask = norm_route(x, weight, weights, addend=addend, backend="triton")
    wanted_total, wanted = rms_norm(x, weight, addend=addend, backend="triton")
    assert torch.equal(total, wanted_total)
    torch.testing.assert_close(normed, wanted)
    assert torch.equal(mask, route(normed, weights, backend="triton"))
    assert not weights.counter.any()


def test_norm_route_is_norm_then_route() -> None:
    weights, x = _router(), torch.randn(2, 64, device=DEVICE).half()
    weight = torch.rand(64, device=DEVICE).half()
    total, normed, mask = norm_route(x, weight, weights, addend=x, backend="triton")
    wanted_total, wanted = rms_norm(x, weight, addend=x, backend="triton")
    assert torch.equal(total, wanted_total)
    torch.testing.assert_close(normed, wanted)
    assert torch.equal(mask, route(normed, weights, backend="triton"))


def test_skipped_heads_may_hold_anything_and_other_places_stay() -> None:
    q = torch.full((1, 2, 2, 8), float("nan"), device=DEVICE).half()
    q[:, :, 1] = 1.0
    k = torch.randn(1, 2, 1, 8, device=DEVICE).half()
    table = torch.ones(6, 8, device=DEVICE).half()
    caches = [torch.full((1, 6, 1, 8), 5.0, device=DEVICE).half() for _ in range(2)]
    start = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    out = rope_to_cache(q, k, k, table, table, start, *caches, backend="triton")
    assert out[:, :, 1].isfinite().all()
    assert caches[0][0, 3:5].isfinite().all()
    assert torch.equal(caches[1][:, 3:5], k)
    assert all((cache[0, [0, 1, 2, 5]] == 5.0).all() for cache in caches)


def test_wrong_inputs_are_named() -> None:
    x, weights = torch.randn(17, 64, device=DEVICE).half(), _router()
    with pytest.raises(ShapeError, match="1 to 16 rows"):
        norm_route(x, x[0], weights, backend="torch")
    with pytest.raises(ShapeError, match="split_weights"):
        route(x.float(), weights, backend="torch")
    with pytest.raises(ShapeError, match="rms_norm: weight must be"):
        rms_norm(x, x[0, :32], backend="torch")
    heads, place = x.view(17, 1, 4, 16), torch.zeros(17, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ShapeError, match="both caches"):
        rope_to_cache(heads, heads, heads, x, x, place, heads[:4], heads[:4], backend="torch")
    table, cache = x[:, :16].contiguous(), heads.clone()
    for mask in (torch.ones(17, 3, dtype=torch.bool), torch.ones(16, 4, dtype=torch.bool), torch.ones(17, 4)):
        with pytest.raises(ShapeError, match=r"mask must be bool|3 groups do not divide 4 query heads"):
            rope_to_cache(heads, heads, heads, table, table, place, cache, cache, mask=mask.to(DEVICE), backend="torch")


@pytest.mark.parametrize("many", [10, 11])
def test_turned_heads_are_those_that_execute_however_many_tokens(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from wide.kernels.rope import _triton

    # As many tokens as count as many, and one fewer.
    monkeypatch.setattr(_triton, "_MANY_TOKENS", many)
    length = 5
    generator = torch.Generator().manual_seed(4)
    heads = torch.randn(2, length, 20, 16, generator=generator).half().to(DEVICE)
    q, k, v = heads.split([12, 4, 4], dim=2)
    table = torch.randn(length + 3, 16, generator=generator).half().to(DEVICE)
    places = torch.tensor([3, 0], dtype=torch.int32, device=DEVICE)
    # A slice, as where the router has groups of its own for keys and values.
    mask = (torch.rand(2 * length, 4, generator=generator) < 0.5).to(DEVICE)[:, :2]
    found = []
    for backend in ("torch", "triton"):
        caches = [torch.zeros(2, length + 3, 4, 16, dtype=torch.float16, device=DEVICE) for _ in range(2)]
        turned = rope_to_cache(q, k, v, table, table, places, *caches, mask=mask, backend=backend)
        executes = mask.view(2, length, 2, 1).repeat_interleave(6, dim=2)
        found.append((torch.where(executes, turned, 0), *caches))
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3)
