"""What holds for reordering, on random masks; lists of tiles of kernels in CUDA C++ with it."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wide.kernels.device import interprets_triton
from wide.kernels.reorder.op import reorder, reorder_patterns, reorder_sequences
from wide.kernels.reorder.reference import gray_rank
from wide.kernels.reordering import PatternReordering, Reordering

INTERPRETED = pytest.mark.skipif(not interprets_triton(), reason="the interpreter stands in for a GPU")

BACKENDS = st.sampled_from(["torch", "triton"])


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    """Draw a bool mask [M, N_G] with any share of active pairs."""
    rows, groups = draw(st.integers(1, 150)), draw(st.integers(1, 10))
    active = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.rand(rows, groups, generator=generator) < active


@INTERPRETED
@settings(max_examples=10)
@given(mask=masks(), backend=BACKENDS, block_m=st.sampled_from([1, 16, 64]))
def test_lists_are_the_active_rows_ascending(mask: torch.Tensor, backend: str, block_m: int) -> None:
    order = reorder(mask, block_m=block_m, backend=backend)
    for group in range(mask.shape[1]):
        rows = mask[:, group].nonzero().flatten()
        assert order.index[group, : order.counts[group]].tolist() == rows.tolist()
    assert order.offsets.tolist() == [0, *mask.sum(0).cumsum(0).tolist()]


@INTERPRETED
@settings(max_examples=20)
@given(mask=masks(), backend=BACKENDS, block_m=st.sampled_from([1, 16, 64]))
def test_tiles_cover_every_active_row_once(mask: torch.Tensor, backend: str, block_m: int) -> None:
    order = reorder(mask, block_m=block_m, backend=backend)
    tiles = order.tiles[: int(order.num_tiles[0])].tolist()
    wanted = {(g, j) for g, n in enumerate(order.counts.tolist()) for j in range(-(-n // block_m))}
    assert len(tiles) == len(wanted)
    assert {tuple(tile) for tile in tiles} == wanted


@INTERPRETED
@settings(max_examples=15)
@given(mask=masks(), backend=BACKENDS, num_sequences=st.integers(1, 3))
def test_sequences_are_reordered_each_for_itself(mask: torch.Tensor, backend: str, num_sequences: int) -> None:
    batch = torch.stack([mask.roll(step, 0) for step in range(num_sequences)])
    order = reorder_sequences(batch, backend=backend)
    for sequence in range(num_sequences):
        single = reorder(batch[sequence], backend="torch")
        assert torch.equal(order.counts[sequence], single.counts)
        for group, count in enumerate(single.counts.tolist()):
            assert torch.equal(order.index[sequence, group, :count], single.index[group, :count])


@INTERPRETED
@settings(max_examples=20)
@given(mask=masks(), backend=BACKENDS, groups_per_block=st.integers(1, 8), keeps_empty=st.booleans())
def test_pattern_sort_is_a_stable_sort_by_gray_rank(
    mask: torch.Tensor, backend: str, groups_per_block: int, keeps_empty: bool
) -> None:
    order = reorder_patterns(
        mask, groups_per_block=groups_per_block, block_m=16, keeps_empty=keeps_empty, backend=backend
    )
    for block, count in enumerate(order.counts.tolist()):
        part = mask[:, block * groups_per_block : (block + 1) * groups_per_block]
        pattern = (part * 2 ** torch.arange(part.shape[1])).sum(1).int()
        rows = order.index[block, :count].long()
        assert torch.equal(pattern[rows], order.patterns[block, :count])
        keys = (gray_rank(pattern[rows]).long() * 1000 + rows).tolist()
        assert keys == sorted(keys)
        listed = torch.ones(len(mask), dtype=torch.bool) if keeps_empty else part.any(1)
        assert sorted(rows.tolist()) == listed.nonzero().flatten().tolist()


@INTERPRETED
@pytest.mark.parametrize("active", [0.5, 1.0])
def test_a_thousand_rows_are_listed_as_the_reference_lists_them(active: float) -> None:
    mask = torch.rand(1000, 9, generator=torch.Generator().manual_seed(4)) < active
    lists, patterns = ([call(backend) for backend in ("triton", "torch")] for call in (_lists(mask), _patterns(mask)))
    assert torch.equal(lists[0].counts, lists[1].counts)
    assert torch.equal(lists[0].offsets, lists[1].offsets)
    for group, count in enumerate(lists[0].counts.tolist()):
        assert torch.equal(lists[0].index[group, :count], lists[1].index[group, :count])
    for block, count in enumerate(patterns[0].counts.tolist()):
        assert count == patterns[1].counts[block]
        assert torch.equal(patterns[0].index[block, :count], patterns[1].index[block, :count])


def _lists(mask: torch.Tensor) -> Callable[[str], Reordering]:
    return lambda backend: reorder(mask, block_m=128, backend=backend)


def _patterns(mask: torch.Tensor) -> Callable[[str], PatternReordering]:
    return lambda backend: reorder_patterns(mask, groups_per_block=4, block_m=128, backend=backend)


def test_neighbouring_gray_ranks_differ_in_one_bit() -> None:
    patterns = torch.arange(256, dtype=torch.int32)
    by_rank = patterns[gray_rank(patterns).argsort()].tolist()
    assert sorted(gray_rank(patterns).tolist()) == list(range(256))
    assert all((a ^ b).bit_count() == 1 for a, b in itertools.pairwise(by_rank))


@INTERPRETED
def test_mask_may_be_a_strided_view() -> None:
    mask = torch.rand(40, 6) < 0.5
    strided = mask.t().contiguous().t()
    assert torch.equal(reorder(strided, backend="triton").counts, reorder(mask, backend="torch").counts)


@INTERPRETED
@pytest.mark.parametrize("bytes_read", [0, 2**25])
@pytest.mark.parametrize("keeps_empty", [False, True])
def test_sort_agrees_whatever_a_program_sorts(
    bytes_read: int, keeps_empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wide.kernels.reorder import _triton

    monkeypatch.setattr(_triton, "_MAX_BYTES_READ", bytes_read)
    mask = torch.rand(1100, 11, generator=torch.Generator().manual_seed(5)) < 0.4
    mask[600:900] = False
    options = {"groups_per_block": 8, "block_m": 128, "keeps_empty": keeps_empty}
    got = reorder_patterns(mask, **options, backend="triton")
    wanted = reorder_patterns(mask, **options, backend="torch")
    assert torch.equal(got.counts, wanted.counts)
    for block, count in enumerate(wanted.counts.tolist()):
        assert torch.equal(got.index[block, :count], wanted.index[block, :count])
        assert torch.equal(got.patterns[block, :count], wanted.patterns[block, :count])


SHAPES = ((1, 1, 0.5), (200, 5, 0.5), (1000, 7, 0.02), (700, 9, 1.0), (300, 3, 0.0))


def _random(rows: int, groups: int, active: float) -> torch.Tensor:
    return torch.rand(rows, groups, generator=torch.Generator().manual_seed(rows)) < active


@INTERPRETED
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_m", [64, 192, 256])
def test_row_tiles_cover_every_list_once(shape: tuple[int, int, float], block_m: int) -> None:
    from wide.kernels.reorder._triton import row_tiles

    order = reorder(_random(*shape), backend="torch")
    tiles, num_tiles = row_tiles(order, block_m)
    listed = [tuple(pair) for pair in tiles[: int(num_tiles[0])].tolist()]
    wanted = [(g, t) for g, count in enumerate(order.counts.tolist()) for t in range(-(-count // block_m))]
    assert sorted(listed) == wanted
    counts = order.counts.tolist()
    short = [(g, t) for g, t in wanted if counts[g] - t * block_m <= block_m // 2]
    assert listed[len(listed) - int(num_tiles[1]) :] == short


@INTERPRETED
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows_read", [0, 2**14])
def test_an_order_by_patterns_names_the_groups_of_each_unit_and_falls_in_cost(
    shape: tuple[int, int, float], rows_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wide.kernels.gemm_k import _triton

    monkeypatch.setattr(_triton, "_MAX_ROWS_READ", rows_read)
    rows, groups, active = shape
    mask = _random(rows, min(groups, 8), active)
    order = reorder_patterns(mask, groups_per_block=8, block_m=128, keeps_empty=True, backend="torch")
    found = _triton.in_one_order(order)
    wanted = torch.zeros(2 * -(-rows // 128), dtype=torch.int32)
    for place, pattern in enumerate(order.patterns[0].tolist()):
        wanted[place // 64] |= pattern
    assert found.unions.flatten().tolist() == wanted.tolist()
    assert sorted(found.items.tolist()) == list(range(-(-rows // 128)))
    costs = [int(wanted[2 * tile] | wanted[2 * tile + 1]).bit_count() for tile in found.items.tolist()]
    assert costs == sorted(costs, reverse=True)
