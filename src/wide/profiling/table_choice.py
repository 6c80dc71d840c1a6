"""Choose for one shape and one rate which operators skip, by timing a few layers with each turned dense."""

import dataclasses
from collections.abc import Callable
from typing import Any

from wide.profiling.timing import time_interleaved
from wide.kernels.operator_table import OPERATORS, OperatorTable

# A dense product must win by this factor before it replaces the sparse one.
_MARGIN = 0.998
Call = Callable[[], object]


def all_sparse(backend: str) -> OperatorTable:
    """Return the table by which every operator skips at every size."""
    return OperatorTable(backend=backend, query=5, attention=5, output=5, gate_up=5, down=5)


def all_dense(backend: str) -> OperatorTable:
    """Return the table by which no operator skips, except attention over a cache."""
    return OperatorTable(backend=backend, query=None, attention=None, output=None, gate_up=None, down=None, few=())


def choose_table(make: Callable[[OperatorTable], Call], *, backend: str, is_step: bool, rounds: int) -> OperatorTable:
    """Return the fastest table among: everything sparse, everything dense, and what the operators prefer one by one.

    Args:
        make: Returns a call that runs some layers by a table.
        backend: Of the operators.
        is_step: Whether the call is a decode step, where tables differ in `few`.
        rounds: Samples of each candidate.
    """
    sparse = all_sparse(backend)
    names: list[str] = [name for name in OPERATORS if not (is_step and name == "attention")]
    single = {name: without(sparse, name, is_step=is_step) for name in names}
    tables = {"sparse": sparse} | single
    times = time_interleaved({name: make(table) for name, table in tables.items()}, rounds=rounds)
    chosen = sparse
    for name in names:
        if times[name].median_us < _MARGIN * times["sparse"].median_us:
            chosen = without(chosen, name, is_step=is_step)
    finals = {"sparse": sparse, "chosen": chosen, "dense": all_dense(backend)}
    times = time_interleaved({name: make(table) for name, table in finals.items()}, rounds=rounds)
    return finals[min(times, key=lambda name: times[name].median_us)]


def without(table: OperatorTable, name: str, *, is_step: bool) -> OperatorTable:
    """Return a table in which one operator is dense."""
    if is_step:
        return dataclasses.replace(table, few=tuple(n for n in table.few if n != name))
    changes: dict[str, Any] = {name: None}
    return dataclasses.replace(table, **changes)
