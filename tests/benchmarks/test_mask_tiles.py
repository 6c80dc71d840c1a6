"""What tiles execute: unions, orders of rows and groups, and their bounds."""

import numpy as np
import pytest
import torch

from benchmarks.mask_tiles import (
    bundles,
    by_rate,
    clustered_rows,
    gray_rows,
    ideal,
    in_order,
    in_super_blocks,
    informative_groups,
    neighbours,
    rare_groups,
    shuffled,
    tile_unions,
)
from wide.kernels.reorder import reorder_patterns


def random_mask(rows=300, groups=10, share=0.5, seed=0):
    return np.random.default_rng(seed).random((rows, groups)) < share


def topics(rows=512, groups=16, kinds=4, seed=0):
    """Rows of a few kinds, each with a pattern of its own, shuffled."""
    generator = np.random.default_rng(seed)
    patterns = np.repeat(np.eye(kinds, dtype=bool), groups // kinds, axis=1)
    return patterns[generator.permutation(np.arange(rows) % kinds)]


def test_a_tile_executes_the_union_of_its_rows():
    mask = np.array([[1, 0, 0], [0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0]], dtype=bool)
    assert tile_unions(mask, 2).tolist() == [[True, False, True], [False, True, False], [True, False, False]]
    # Four (tile, group) pairs of two rows each, the last tile half empty.
    assert in_order(mask, np.arange(5), 2).executed == pytest.approx(4 * 2 / 15)


def test_neighbours_in_gray_order_differ_in_one_group():
    patterns = np.array([[bool(number >> bit & 1) for bit in range(4)] for number in range(16)])
    ordered = patterns[gray_rows(patterns)]
    assert not ordered[0].any()
    assert (ordered[1:] ^ ordered[:-1]).sum(1).tolist() == [1] * 15


@pytest.mark.parametrize("size", [4, 8])
def test_super_blocks_execute_what_the_operator_lists(size):
    mask = random_mask(groups=20)
    found = in_super_blocks(mask, [groups[::-1] for groups in neighbours(20, size)], 64)
    order = reorder_patterns(torch.from_numpy(mask), block_m=64, groups_per_block=size, backend="torch")
    executed = 0
    for patterns, count in zip(order.patterns.numpy(), order.counts.tolist(), strict=True):
        for start in range(0, count, 64):
            union = np.bitwise_or.reduce(patterns[start : min(start + 64, count)])
            executed += 64 * int(union).bit_count()
    assert found.executed == pytest.approx(executed / mask.size)
    assert found.super_blocks == len(order.counts)
    assert found.sweeps == pytest.approx(int(order.counts.sum()) / len(mask))


def test_one_super_block_stores_every_row_once():
    mask = random_mask(share=0.05)
    assert not mask.any(1).all()
    assert in_super_blocks(mask, neighbours(10, 10), 64).sweeps == 1.0


@pytest.mark.parametrize("order", [gray_rows, lambda mask: clustered_rows(mask, 32)])
def test_orders_hold_every_row_once(order):
    assert sorted(order(random_mask())) == list(range(300))


def test_rows_of_a_kind_come_together():
    mask = topics()
    assert in_order(mask, np.arange(512), 64).executed == 1.0
    for rows in (gray_rows(mask), clustered_rows(mask, 64)):
        assert in_order(mask, rows, 64).executed == pytest.approx(ideal(mask))


def test_clustered_rows_beat_sorted_ones_on_masks_without_structure():
    mask = random_mask(rows=2048, groups=48)
    clustered = in_order(mask, clustered_rows(mask, 64), 64).executed
    assert ideal(mask) < clustered < in_order(mask, gray_rows(mask), 64).executed


def test_bundles_hold_what_goes_together():
    kinds = random_mask(rows=500, groups=3)
    mask = np.concatenate([kinds, ~kinds, kinds], axis=1)
    found = bundles(mask, 3)
    assert sorted(sorted(members % 3) for members in found) == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    assert [len(members) for members in bundles(random_mask(), 4)] == [4, 4, 2]


def test_the_most_informative_group_comes_first():
    follower = random_mask(rows=4000, groups=1)
    others = np.where(random_mask(rows=4000, groups=5, share=0.1, seed=1), ~follower, follower)
    mask = np.concatenate([random_mask(rows=4000, groups=3, seed=2), follower, others], axis=1)
    order = informative_groups(mask)
    assert order[0] == 3
    assert sorted(order) == list(range(9))


def test_rare_groups_first_executes_least():
    mask = random_mask(rows=4096, groups=24, share=np.linspace(0.9, 0.1, 24))
    assert rare_groups(mask)[:2].min() >= 20
    shares = [in_order(mask, gray_rows(mask[:, groups]), 64).executed for groups in (rare_groups(mask), np.arange(24))]
    assert shares[0] < shares[1]


def test_groups_that_never_change_tell_nothing():
    mask = np.concatenate([np.ones((300, 2), dtype=bool), random_mask(groups=2)], axis=1)
    assert set(informative_groups(mask)[:2]) == {2, 3}


def test_groups_by_rate():
    always, seldom = np.ones((1024, 2), dtype=bool), np.zeros((1024, 3), dtype=bool)
    seldom[7, 0] = True
    undecided = topics(rows=1024, groups=8, kinds=2)
    found = by_rate(np.concatenate([always, seldom, undecided], axis=1), 8, 64)
    # The dense product, one group that one row executes, and one bundle; the groups that no row executes are nothing.
    assert found.super_blocks == 3
    assert found.sweeps == pytest.approx(2 + 1 / 1024)
    assert found.executed == pytest.approx((2 + 64 / 1024 + 4) / 13)
    assert by_rate(always, 8, 64).sweeps == 1.0


def test_shuffling_keeps_rates_and_breaks_the_rest():
    mask = topics()
    found = shuffled(mask)
    assert found.mean(0).tolist() == mask.mean(0).tolist()
    assert in_order(found, gray_rows(found), 64).executed > in_order(mask, gray_rows(mask), 64).executed
