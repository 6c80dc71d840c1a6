"""Rows in one order: what the lists promise holds for every mask, and products over them are those of the mask."""

import itertools
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.gemm_k import GEMM_K_ROWS
from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels import device as kernel_device
from wide.kernels.gemm_k.op import KShape, gemm_k_rows
from wide.kernels.reorder import rows_reference as reference
from wide.kernels.reorder.op import MAX_GROUPS, reorder_rows
from wide.kernels.reorder.rows_reference import SORTED_GROUPS, left_to_tiles
from wide.kernels.reordering import RowReordering

CPU = torch.device("cpu")
repeated = settings(max_examples=40)


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    """Return masks of any rate by group, empty and full ones among them."""
    rows, groups = draw(st.integers(1, 300)), draw(st.integers(1, MAX_GROUPS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    rates = draw(st.sampled_from([torch.zeros(groups), torch.ones(groups), torch.rand(groups, generator=generator)]))
    return torch.rand(rows, groups, generator=generator) < rates


def unpacked(words: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return int32 [R, W] as bool [R, N_G]."""
    return (words.unsqueeze(2) >> torch.arange(32) & 1).flatten(1).bool()[:, :num_groups]


@repeated
@given(mask=masks())
def test_lists_say_what_rows_and_units_execute(mask: torch.Tensor) -> None:
    order, groups = reorder_rows(mask, backend="torch"), mask.shape[1]
    assert sorted(order.index.tolist()) == list(range(len(mask)))
    assert torch.equal(unpacked(order.words.t(), groups), mask[order.index.long()])
    # Bits beyond the last group are none.
    assert unpacked(order.words.t(), 32 * len(order.words)).sum() == mask.sum()
    padded = torch.zeros(-(-len(mask) // 128) * 128, groups, dtype=torch.bool)
    padded[: len(mask)] = mask[order.index.long()]
    units = padded.view(-1, 64, groups).any(1)
    assert torch.equal(unpacked(order.unions, groups), units)
    cost = units.view(-1, 2, groups).any(1).sum(1)[order.items.long()]
    assert sorted(order.items.tolist()) == list(range(len(cost)))
    assert (cost.diff() <= 0).all()
    left = units.view(-1, 2, groups).any(1).float().mean().item()
    assert left_to_tiles(mask) == pytest.approx(left)


def test_rows_of_one_mask_lie_together_and_spare_their_tiles_what_others_execute() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.rand(6, 40, generator=generator) < 0.5
    mask = codes[torch.randint(6, (6 * 256,), generator=generator)]
    executed = unpacked(reorder_rows(mask, backend="torch").unions, 40).float().mean().item()
    mixed = unpacked(_units(mask), 40).float().mean().item()
    # Units that hold two masks lie between runs of one.
    assert executed < mask.float().mean().item() + 0.1
    assert mixed > 0.95


def _units(mask: torch.Tensor) -> torch.Tensor:
    units = torch.zeros(len(mask) // 64, 64, dtype=torch.int64)
    units[:, : mask.shape[1]] = mask.view(-1, 64, mask.shape[1]).any(1)
    return (units.view(len(units), 2, 32) << torch.arange(32)).sum(2)


def ordered(mask: torch.Tensor) -> list[int]:
    """Return rows as the reference says they lie, a row at a time."""
    rows, groups = mask.tolist(), range(mask.shape[1])
    places = sorted(groups, key=lambda group: (sum(row[group] for row in rows), group))
    buckets: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        first = next((place for place, group in enumerate(places) if row[group]), len(places))
        buckets.setdefault(first, []).append(number)
    found = []
    for first in sorted(buckets, reverse=True):
        members = buckets[first]
        frequent = {place: sum(rows[number][places[place]] for number in members) for place in groups if place > first}
        rare = sorted(frequent, key=lambda place: (frequent[place], place))[:SORTED_GROUPS]

        def rank(number: int, rare: list[int] = rare) -> list[bool]:
            # The row executes its bucket's group, which turns the direction of the Gray code.
            bits = itertools.accumulate((rows[number][places[place]] for place in rare), operator.xor, initial=True)
            return list(bits)

        found += sorted(members, key=rank)
    return found


@repeated
@given(mask=masks())
def test_rows_lie_by_their_rarest_group_and_then_by_those_rare_among_such_rows(mask: torch.Tensor) -> None:
    assert reorder_rows(mask, backend="torch").index.tolist() == ordered(mask)


def test_chunks_are_put_in_order_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK_ROWS", 128)
    mask = torch.rand(300, 20) < torch.rand(20)
    index = reorder_rows(mask, backend="torch").index.tolist()
    chunks = [ordered(mask[begin : begin + 128]) for begin in (0, 128, 256)]
    assert index == [128 * i + row for i, chunk in enumerate(chunks) for row in chunk]


@repeated
@given(mask=masks(), biased=st.booleans())
def test_products_are_those_of_the_mask(mask: torch.Tensor, biased: bool) -> None:
    rows, groups, size, width = *mask.shape, 2, 12
    h, weight = torch.randn(rows, groups * size), torch.randn(width, groups * size)
    bias = torch.randn(width) if biased else None
    executes = mask.repeat_interleave(size, 1)
    holes = torch.where(executes, h, float("nan"))
    got = gemm_k_rows(holes, weight, reorder_rows(mask, backend="torch"), group_size=size, bias=bias, backend="torch")
    wanted = torch.nn.functional.linear(torch.where(executes, h, 0.0), weight, bias)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.zeros(3, 4), r"bool mask \[M, N_G\] .* got torch\.float32 \(3, 4\)"),
        (torch.zeros(3, 129, dtype=torch.bool), r"of 1 to 128 groups, got torch\.bool \(3, 129\)"),
        (torch.zeros(0, 4, dtype=torch.bool), r"\(0, 4\)"),
    ],
)
def test_masks_that_do_not_fit_are_named(mask: torch.Tensor, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        reorder_rows(mask, backend="torch")


def test_unknown_backends_are_named() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(UnsupportedBackendError, match=r"no backend 'triton', only .'torch', 'cuda'"):
        reorder_rows(mask, backend="triton")
    with pytest.raises(UnsupportedBackendError, match=r"^reorder_rows: .*; choose backend='torch'"):
        reorder_rows(mask, backend="cuda")
    with pytest.raises(UnsupportedBackendError, match=r"no backend 'triton', only .'torch', 'cuda'"):
        _run(backend="triton")


def _run(
    *,
    size: int = 64,
    width: int = 256,
    groups: int = 9,
    dtype: torch.dtype = torch.bfloat16,
    h: torch.Tensor | None = None,
    order: RowReordering | None = None,
    backend: str = "cuda",
    **options: Any,
) -> torch.Tensor:
    order = order or reorder_rows(torch.ones(8, groups, dtype=torch.bool), backend="torch")
    weight = torch.zeros(width, groups * size, dtype=dtype)
    rows = torch.zeros(8, groups * size, dtype=dtype) if h is None else h
    return gemm_k_rows(rows, weight, order, group_size=size, backend=backend, **options)


HALVES = torch.zeros(8 * 68 + 1, dtype=torch.bfloat16)
ONE = reorder_rows(torch.ones(8, 1, dtype=torch.bool), backend="torch")
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": torch.float32}, r"in half precision, .*; got torch\.float32, "),
    "groups": ({"size": 96}, r"multiple of 64 channels .* G=96, 9 groups"),
    "width": ({"width": 384}, r"multiple of 256; .* width 384"),
    "strides": ({"groups": 1, "order": ONE, "h": HALVES[:-1].view(8, 68)[:, :64]}, r"rows \(68, 64\) elements apart"),
    "address": ({"groups": 1, "order": ONE, "h": HALVES[1:513].view(8, 64)}, r"must begin at multiples of 16 bytes"),
    "bias": ({"bias": torch.zeros(256)}, r"biases must be contiguous torch\.bfloat16, got .*torch\.float32"),
}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_device, "hopper_obstacle", lambda device: None)
    monkeypatch.setattr(kernel_device, "native_obstacle", lambda: None)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("changes", "words"), UNFIT.values(), ids=UNFIT)
def test_what_the_kernel_does_not_take_is_named_with_a_way_out(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedBackendError, match=rf"^gemm_k_rows: .*{words}.*; choose backend='torch'"):
        _run(**changes)


@pytest.mark.usefixtures("on_hopper")
def test_what_the_kernel_supports_is_what_fits() -> None:
    taken = [case for case in GEMM_K_ROWS.cases if GEMM_K_ROWS.supports("cuda", CPU, case) is None]
    assert taken == [case for case in GEMM_K_ROWS.cases if case.dtype != torch.float32]
    assert {case.dtype for case in taken} == {torch.bfloat16, torch.float16}
    assert {case.active for case in taken} >= {0.0, 0.5, 1.0}
    assert {-(-case.sizes["num_groups"] // 32) for case in taken} == {1, 2, 3, 4}
    for groups, size, fits in ((112, 128, True), (129, 64, False)):
        shape = KShape(torch.float16, 8, groups, size, 4096)
        assert (GEMM_K_ROWS.backends.misfit("cuda", shape) is None) == fits


def test_without_a_hopper_gpu_or_a_compiler_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedBackendError, match=r"Hopper GPU \(sm_90\), not cpu; choose"):
        _run()
    monkeypatch.setattr(kernel_device, "hopper_obstacle", lambda device: None)
    monkeypatch.setattr(kernel_device, "native_obstacle", lambda: "cuda-bindings is missing")
    with pytest.raises(UnsupportedBackendError, match="cuda-bindings is missing; choose"):
        _run()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"h": torch.zeros(8, 64, dtype=torch.bfloat16)}, r"h \[M, K\] and weight \[N, K\] .* \(8, 64\)"),
        ({"order": ONE, "groups": 70}, r"of 8 rows and 70 groups, .* got .*\(2, 8\).*; make it with reorder_rows"),
        ({"order": reorder_rows(torch.ones(8, 128, dtype=torch.bool), backend="torch")}, r"of 8 rows and 9 groups"),
        ({"order": ONE._replace(items=ONE.items.long()), "groups": 1}, r"contiguous int32"),
        ({"bias": torch.zeros(3)}, r"bias must have 256 entries, got \(3,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        _run(backend="torch", **changes)
    with pytest.raises(ShapeError, match=r"groups that divide K, got .* and groups of 48"):
        gemm_k_rows(torch.zeros(8, 64), torch.zeros(4, 64), ONE, group_size=48, backend="torch")
