"""Which kernels the correctness gate runs before anything is timed."""

from wide.kernels.operator_table import DENSE
from wide.kernels.tuning import Choice
from wide.profiling.table_choice import all_sparse, with_special_kernels


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
