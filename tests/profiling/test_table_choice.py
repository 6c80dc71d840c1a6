"""Which kernels the correctness gate runs before anything is timed."""

import pytest
import torch

from wide.inference.operator_table import DENSE
from wide.inference.tuning import tiles as k_tiles
from wide.inference.tuning.timing import Timing
from wide.kernels.tuning import Choice
from wide.profiling import table_choice
from wide.profiling.table_choice import all_sparse, choose_table, one_sort_choice, with_special_kernels


def test_kernels_that_are_measured_for_long_prompts_are_checked_on_short_ones():
    special = Choice(backend="gluon", tile=(128, 2, 0))
    sparse = all_sparse("triton")
    measured = sparse.with_rules("attention", ((1, DENSE), (2049, special))).with_rules("down", ((1, DENSE),))
    table = with_special_kernels(sparse, measured)
    assert table.choice("attention", 640) == special
    assert table.how("attention", 640) == "many"
    assert table.choice("output", 640).backend == "triton"
    assert table.how("down", 640) == "many"


def test_without_such_kernels_there_is_nothing_more_to_check():
    sparse = all_sparse("triton")
    assert with_special_kernels(sparse, sparse.with_rules("attention", ((1, Choice(backend="triton")),))) == sparse


@pytest.mark.parametrize(("factor", "is_taken"), [(0.5, True), (2.0, False)])
def test_another_way_of_the_down_product_is_taken_if_the_clock_says_so(monkeypatch, factor, is_taken):
    down = Choice(backend="cuda", groups_per_block=112)

    def clock(calls, **_):
        cost = {name: 10.0 * (factor if call().choice("down", 640) == down else 1.0) for name, call in calls.items()}
        return {n: Timing(median_us=c, low_us=c, high_us=c, num_samples=1) for n, c in cost.items()}

    monkeypatch.setattr(table_choice, "time_interleaved", clock)
    table = choose_table(lambda table: lambda: table, backend="torch", is_step=False, rounds=1, down=down)
    assert (table.choice("down", 640) == down) is is_taken
    assert table.how("down", 1) == "few"
    step = choose_table(lambda table: lambda: table, backend="torch", is_step=True, rounds=1, down=down)
    assert step.choice("down", 640) != down


def test_rows_in_one_order_are_offered_where_their_kernel_runs(monkeypatch):
    sizes = {"group_size": 128, "num_groups": 112, "width": 4096}
    assert one_sort_choice(torch.device("cpu"), torch.bfloat16, **sizes) is None
    monkeypatch.setattr(k_tiles, "hopper_obstacle", lambda device: None)
    monkeypatch.setattr(k_tiles, "native_obstacle", lambda: None)
    found = one_sort_choice(torch.device("cpu"), torch.bfloat16, **sizes)
    assert found == Choice(backend="cuda", tile=(128, 256), block_m=128, groups_per_block=112)
    assert one_sort_choice(torch.device("cpu"), torch.float32, **sizes) is None
    # Eight groups are sorted by patterns, and a measured table knows them.
    assert one_sort_choice(torch.device("cpu"), torch.bfloat16, group_size=512, num_groups=8, width=4096) is None
    assert one_sort_choice(torch.device("cpu"), torch.bfloat16, group_size=64, num_groups=224, width=4096) is None
