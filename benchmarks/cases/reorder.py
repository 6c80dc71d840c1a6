"""What the operators that reorder promise: their cases, and what a right result is."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.cases.contract import Operator, compare_exactly, make_case, random_mask
from wide.kernels.reorder.op import (
    BACKENDS,
    PATTERNS_BACKENDS,
    ROWS_BACKENDS,
    SEQUENCES_BACKENDS,
    reorder,
    reorder_patterns,
    reorder_rows,
    reorder_sequences,
)
from wide.kernels.reordering import PatternReordering, Reordering
from wide.kernels.tuning import Case

Tensors = tuple[torch.Tensor, ...]


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    shape = (case.sizes["num_rows"], case.sizes["num_groups"])
    return {"mask": random_mask(case, shape, device), "block_m": case.sizes["block_m"], **case.options}


def _build_sequences(case: Case, device: torch.device) -> dict[str, Any]:
    shape = (case.sizes["num_sequences"], case.sizes["num_rows"], case.sizes["num_groups"])
    return {"mask": random_mask(case, shape, device)}


def _build_patterns(case: Case, device: torch.device) -> dict[str, Any]:
    return {**_build(case, device), "groups_per_block": case.sizes["groups_per_block"]}


def _build_rows(case: Case, device: torch.device) -> dict[str, Any]:
    return {"mask": random_mask(case, (case.sizes["num_rows"], case.sizes["num_groups"]), device)}


def _prefixes(lists: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Replace what lies beyond each count by -1."""
    places = torch.arange(lists.shape[-1], device=lists.device)
    return torch.where(places < counts.unsqueeze(-1), lists, -1)


def _compare(arguments: Mapping[str, Any], got: Reordering, wanted: Reordering) -> float:
    def meaning(order: Reordering) -> Tensors:
        tiles = order.tiles[: int(order.num_tiles[0])]
        return _prefixes(order.index, order.counts), order.counts, order.offsets, tiles, order.num_tiles

    return compare_exactly(arguments, meaning(got), meaning(wanted))


def _compare_sequences(arguments: Mapping[str, Any], got: Tensors, wanted: Tensors) -> float:
    return compare_exactly(arguments, (_prefixes(*got), got[1]), (_prefixes(*wanted), wanted[1]))


def _compare_patterns(arguments: Mapping[str, Any], got: PatternReordering, wanted: PatternReordering) -> float:
    def meaning(order: PatternReordering) -> Tensors:
        lists = _prefixes(order.index, order.counts), _prefixes(order.patterns, order.counts)
        return *lists, order.counts, order.tiles[: int(order.num_tiles)]

    return compare_exactly(arguments, meaning(got), meaning(wanted))


def _cases(more: Mapping[str, int], options: Mapping[str, Any]) -> tuple[Case, ...]:
    shapes = ((1, 1, 0.5), (3, 2, 0.5), (17, 8, 0.5), (64, 5, 0.0), (127, 33, 0.5), (300, 20, 0.3), (130, 7, 1.0))
    return tuple(
        Case(sizes={"num_rows": rows, "num_groups": groups, **more}, dtype=torch.bool, active=active, options=options)
        for rows, groups, active in shapes
    )


REORDER = Operator(
    name="reorder",
    call=reorder,
    backends=BACKENDS,
    cases=_cases({"block_m": 16}, {}) + _cases({"block_m": 64}, {}),
    build=_build,
    compare=_compare,
    tolerance={torch.bool: 0.0},
)
REORDER_SEQUENCES = Operator(
    name="reorder_sequences",
    call=reorder_sequences,
    backends=SEQUENCES_BACKENDS,
    cases=_cases({"num_sequences": 3}, {}),
    build=_build_sequences,
    compare=_compare_sequences,
    tolerance={torch.bool: 0.0},
)
REORDER_PATTERNS = Operator(
    name="reorder_patterns",
    call=reorder_patterns,
    backends=PATTERNS_BACKENDS,
    cases=_cases({"block_m": 16, "groups_per_block": 4}, {"keeps_empty": False})
    + _cases({"block_m": 32, "groups_per_block": 8}, {"keeps_empty": True})
    + _cases({"block_m": 16, "groups_per_block": 1}, {"keeps_empty": False}),
    build=_build_patterns,
    compare=_compare_patterns,
    tolerance={torch.bool: 0.0},
)
_rows = functools.partial(make_case, ("num_rows", "num_groups"), dtype=torch.bool)
REORDER_ROWS = Operator(
    name="reorder_rows",
    call=reorder_rows,
    backends=ROWS_BACKENDS,
    cases=(
        _rows((1, 1)),
        _rows((3, 9)),
        _rows((64, 33), active=0.0),
        _rows((65, 64), active=1.0),
        _rows((127, 40), active=0.3),
        _rows((300, 112)),
        _rows((520, 128), active=0.9),
        _rows((4096, 96), active=0.2),
        # More than one chunk.
        _rows((16900, 40), active=0.1),
    ),
    build=_build_rows,
    compare=compare_exactly,
    tolerance={torch.bool: 0.0},
)
