"""Cases on which the Hopper products must agree: those of the contracts are too small for them."""

import dataclasses
from typing import Any

import torch

from wide.kernels.contract import Case, Operator

_BLOCK_M = 128
# Rows of a tile that two programs share.
_SHARED_M = 256


def with_hopper_cases(operator: Operator) -> Operator:
    """Return an operator with cases for its Hopper kernels beside its own; one without such a kernel as it is."""
    return dataclasses.replace(operator, cases=(*operator.cases, *_CASES.get(operator.name, ())))


def _case(sizes: dict[str, int], active: float, **options: Any) -> Case:
    return Case(sizes={"block_m": _BLOCK_M, **sizes}, dtype=torch.bfloat16, active=active, options=options)


def _mn(rows: int, groups: int, size: int, active: float = 0.5, depth: int = 320, **options: Any) -> Case:
    sizes = {"num_rows": rows, "num_groups": groups, "group_size": size, "depth": depth}
    return _case(sizes, active, **options)


def _shared(rows: int, groups: int, size: int, active: float = 0.5, **options: Any) -> Case:
    """Return a case whose rows are already sorted into tiles that two programs share."""
    case = _mn(rows, groups, size, active, **options)
    return dataclasses.replace(case, sizes={**case.sizes, "block_m": _SHARED_M})


def _k(rows: int, groups: int, size: int, groups_per_block: int, active: float = 0.5, **options: Any) -> Case:
    sizes = {"num_rows": rows, "num_groups": groups, "group_size": size, "width": 512}
    return _case({**sizes, "groups_per_block": groups_per_block}, active, **options)


_GATED: dict[str, Any] = {"gated": True, "activation": "silu"}
_CASES = {
    "gemm_mn": (
        _mn(1, 1, 128, 1.0, **_GATED),
        _mn(127, 3, 128, zeroed=True, **_GATED),
        _mn(200, 2, 64, gated=True, activation="gelu_tanh", biased=True),
        _mn(130, 2, 128, 0.0, zeroed=True, **_GATED),
        _mn(300, 2, 512),
        _mn(127, 2, 256, 1.0, biased=True),
        # Whole tiles of 256 rows, and remainders of at most 64, at most 128 and more; one part or two.
        _shared(300, 2, 256, 1.0, **_GATED),
        _shared(356, 3, 512, 1.0),
        _mn(436, 3, 128, 1.0, gated=True, activation="gelu_tanh", biased=True),
        _shared(700, 3, 256, activation="relu2", biased=True),
        _mn(600, 5, 128, zeroed=True, **_GATED),
        # Short ones alone, and most groups empty.
        _shared(1, 5, 128, **_GATED),
        _shared(90, 9, 256, 0.02),
        # One step of 64 and an even number of them.
        _shared(40, 3, 128, depth=64, **_GATED),
        _shared(300, 2, 512, 1.0, depth=384, activation="relu2"),
        _shared(260, 2, 256, 0.0, zeroed=True),
    ),
    "gemm_k": (
        _k(1, 1, 128, 1, 1.0),
        _k(127, 3, 128, 2),
        _k(200, 5, 64, 4, biased=True),
        _k(130, 4, 128, 4, 0.0),
        _k(300, 3, 512, 8, keeps_empty=True),
        # Stored: units of 64 rows of which one or none executes a group, several tiles a program, nothing executing.
        _k(1, 8, 64, 8, keeps_empty=True, biased=True),
        _k(700, 8, 128, 8, keeps_empty=True),
        _k(190, 5, 192, 5, 0.1, keeps_empty=True, biased=True),
        _k(65, 2, 64, 2, 0.0, keeps_empty=True, biased=True),
        _k(128, 4, 64, 4, 1.0, keeps_empty=True),
        _k(300, 4, 256, 4, 1.0),
    ),
}
