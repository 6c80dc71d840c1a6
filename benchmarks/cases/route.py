"""What `route` and `norm_route` promise: their cases, and what right decisions are."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.cases.contract import Operator, compare_all, make_case, named, random_values
from wide.kernels.route.op import BACKENDS, NORM_BACKENDS, Three, norm_route, route
from wide.kernels.route.reference import margins
from wide.kernels.route.weights import split_weights
from wide.kernels.tuning import Case

# Margins closer to 0 than this, of the mean, may fall on either side.
_NEAR = 1e-3
_SIZES = ("num_rows", "width", "rank", "num_groups")
_case = functools.partial(make_case, _SIZES)


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    rows, width, rank, groups = named(case, *_SIZES)
    whole = Case(sizes=case.sizes, dtype=torch.float32, seed=case.seed)
    bias = random_values(whole, (2 * groups,), device, salt=4) if case.options.get("has_bias") else None
    weights = split_weights(
        random_values(whole, (rank, width), device, salt=2) * width**-0.5,
        random_values(whole, (2 * groups, rank), device, salt=3),
        bias,
        dtype=case.dtype,
    )
    return {
        "x": random_values(case, (rows, width), device, salt=1),
        "weights": weights,
    } | ({"overlaps": True} if case.options.get("overlaps") else {})


def _build_norm(case: Case, device: torch.device) -> dict[str, Any]:
    arguments = _build(case, device)
    shape = arguments["x"].shape
    return arguments | {
        "weight": random_values(case, shape[1:], device, salt=5),
        "addend": random_values(case, shape, device, salt=6) if case.options.get("has_addend") else None,
        "eps": 1e-5,
        "unit_offset": bool(case.options.get("unit_offset")),
        "reads_residual": bool(case.options.get("reads_residual")),
    }


def _flips(x: torch.Tensor, arguments: Mapping[str, Any], got: torch.Tensor) -> float:
    """Return the share of decisions that differ although their margin is not near 0."""
    margin = margins(x, arguments["weights"])
    wrong = (got != (margin >= 0)) & (margin.abs() > _NEAR * margin.abs().mean())
    return wrong.float().mean().item()


def _compare(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    del wanted
    return _flips(arguments["x"], arguments, got)


def _compare_norm(arguments: Mapping[str, Any], got: Three, wanted: Three) -> float:
    # The decision is judged on the rows that the backend itself made: their last bit may differ.
    flips = _flips(got[0] if arguments["reads_residual"] else got[1], arguments, got[2])
    return max(flips, compare_all(arguments, got[:2], wanted[:2]))


_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}

ROUTE = Operator(
    name="route",
    call=route,
    backends=BACKENDS,
    cases=(
        _case((1, 64, 4, 8)),
        _case((3, 200, 16, 7), has_bias=True),
        _case((17, 256, 32, 112)),
        _case((70, 136, 5, 1), has_bias=True),
        _case((33, 128, 16, 20), dtype=torch.float32),
        _case((1, 136, 16, 9), overlaps=True),
        _case((8, 256, 32, 112), has_bias=True, overlaps=True),
    ),
    build=_build,
    compare=_compare,
    tolerance=dict.fromkeys(_TOLERANCE, 0.0),
)
NORM_ROUTE = Operator(
    name="norm_route",
    call=norm_route,
    backends=NORM_BACKENDS,
    cases=(
        _case((1, 64, 4, 8)),
        _case((4, 300, 16, 140), has_addend=True, has_bias=True),
        _case((2, 256, 32, 9), has_addend=True, unit_offset=True, reads_residual=True),
        _case((3, 128, 16, 20), dtype=torch.float32, has_addend=True),
        _case((16, 200, 8, 12), has_addend=True),
        _case((5, 128, 64, 140), has_bias=True),
    ),
    build=_build_norm,
    compare=_compare_norm,
    tolerance=_TOLERANCE,
)
