"""Choose for one shape and one rate which operators skip, by timing a few layers with each turned dense."""

from collections.abc import Callable

import torch

from wide.inference.operator_table import OPERATORS, OperatorName, OperatorTable
from wide.inference.tuning.tiles import one_sort_tiles
from wide.inference.tuning.timing import time_interleaved
from wide.kernels.gemv import MAX_ROWS
from wide.kernels.reordering import PATTERN_GROUPS
from wide.kernels.tuning import SPECIAL_BACKENDS, Choice

# A dense product must win by this factor before it replaces the sparse one.
_MARGIN = 0.998
# A few layers vary by a percent from run to run.
_DOWN_MARGIN = 0.99
Call = Callable[[], object]


def all_sparse(backend: str) -> OperatorTable:
    """Return the table by which every operator skips at every size."""
    return OperatorTable(backend=backend, query=5, attention=5, output=5, gate_up=5, down=5)


def with_special_kernels(table: OperatorTable, measured: OperatorTable) -> OperatorTable:
    """Return a table that runs the kernels of one kind of GPU, wherever `measured` has them, from 5 tokens on.

    A short prompt can then check kernels that the measured table takes for long ones only.
    """
    for name, rules in measured.rules:
        special = [choice for _, choice in rules if choice.backend in SPECIAL_BACKENDS]
        if special:
            general = Choice(backend=table.backend)
            table = table.with_rules(name, ((1, general), (MAX_ROWS + 1, special[-1])))  # type: ignore[arg-type]
    return table


def all_dense(backend: str) -> OperatorTable:
    """Return the table by which no operator skips."""
    return OperatorTable(
        backend=backend, query=None, attention=None, output=None, gate_up=None, down=None, few=(), cache=False
    )


def choose_table(
    make: Callable[[OperatorTable], Call],
    *,
    backend: str,
    is_step: bool,
    rounds: int,
    measured: OperatorTable | None = None,
    down: Choice | None = None,
) -> OperatorTable:
    """Return the fastest table among: everything sparse or dense, what the operators prefer one by one, the measured.

    Args:
        make: Returns a call that runs some layers by a table.
        backend: Of the operators.
        is_step: Whether the call is a decode step, where tables differ in `few`.
        rounds: Samples of each candidate.
        measured: The table that measurements of the operators alone give, whose tiles the others use, too.
        down: Another way of the down product over many tokens, tried in the fastest table: how long it takes depends on
            the masks, which measurements of operators do not know.
    """
    sparse = all_sparse(backend) if measured is None else with_tiles(all_sparse(backend), measured)
    names: list[OperatorName] = [name for name in OPERATORS if not (is_step and name == "attention")]
    single = {name: sparse.without(name, few=is_step) for name in names}
    tables = {"sparse": sparse} | single
    times = time_interleaved({name: make(table) for name, table in tables.items()}, rounds=rounds)
    chosen = sparse
    for name in names:
        if times[name].median_us < _MARGIN * times["sparse"].median_us:
            chosen = chosen.without(name, few=is_step)
    finals = {"sparse": sparse, "chosen": chosen, "dense": all_dense(backend)}
    if measured is not None:
        finals["measured"] = measured
    times = time_interleaved({name: make(table) for name, table in finals.items()}, rounds=rounds)
    best = finals[min(times, key=lambda name: times[name].median_us)]
    if down is None or is_step:
        return best
    other = best.with_many("down", down)
    times = time_interleaved({"best": make(best), "other": make(other)}, rounds=rounds)
    return other if times["other"].median_us < _DOWN_MARGIN * times["best"].median_us else best


def one_sort_choice(
    device: torch.device, dtype: torch.dtype, *, group_size: int, num_groups: int, width: int
) -> Choice | None:
    """Return the choice of the down product over rows in one order, None where its kernel does not run.

    Args:
        device: Where.
        dtype: Of the weights.
        group_size: Channels of a group.
        num_groups: Of the FFN.
        width: Of the output.
    """
    if num_groups <= PATTERN_GROUPS or dtype not in (torch.bfloat16, torch.float16):
        return None
    found = one_sort_tiles(device, group_size=group_size, num_groups=num_groups, width=width)
    return next(
        (Choice(backend="cuda", tile=tuple(t), block_m=t.rows, groups_per_block=num_groups) for t in found), None
    )


def with_tiles(table: OperatorTable, measured: OperatorTable) -> OperatorTable:
    """Return a table that skips wherever `table` does, with the tiles of `measured` where that skips, too."""
    for name, rules in measured.rules:
        own = []
        for start, choice in rules:
            is_sparse = choice.backend != "dense"
            skips = table.how(name, start) != "dense"  # type: ignore[arg-type]
            own.append((start, choice if is_sparse and skips else Choice(backend=table.backend if skips else "dense")))
        table = table.with_rules(name, tuple(own))  # type: ignore[arg-type]
    return table
