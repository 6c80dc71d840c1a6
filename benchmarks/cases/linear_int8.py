"""What `linear_int8` and `expand_int8` promise: their cases, and what a right result is."""

import functools
from typing import Any

import torch

from benchmarks.cases.contract import Operator, compare_all, make_case, named, random_values
from wide.kernels.linear_int8 import expand_int8, linear_int8, quantise_int8
from wide.kernels.linear_int8.op import BACKENDS, EXPAND_BACKENDS
from wide.kernels.tuning import Case

_case = functools.partial(make_case, ("num_rows", "width", "depth"))


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    rows, width, depth = named(case, "num_rows", "width", "depth")
    x = random_values(case, (rows, depth), device, salt=1)
    # What stands out in one channel must not cost the others.
    x[:, depth // 2] *= 1e4 if case.options.get("outlier") else 1.0
    weight = random_values(case, (width, depth), device, salt=2) * depth**-0.5
    weight[0] = 0
    values, scale = quantise_int8(weight)
    bias = random_values(case, (width,), device, salt=3) if case.options.get("has_bias") else None
    return {"x": x, "weight": values, "scale": scale, "bias": bias}


def _build_expanded(case: Case, device: torch.device) -> dict[str, Any]:
    return {"weight": _build(case, device)["weight"], "scale": _build(case, device)["scale"], "dtype": case.dtype}


_TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}
LINEAR_INT8 = Operator(
    name="linear_int8",
    call=linear_int8,
    backends=BACKENDS,
    cases=(
        _case((1, 16, 256)),
        _case((5, 33, 100), has_bias=True),
        _case((16, 70, 272), outlier=True, dtype=torch.float32),
        _case((40, 96, 48), has_bias=True, dtype=torch.float32),
        _case((150, 130, 64)),
    ),
    build=_build,
    compare=compare_all,
    tolerance=_TOLERANCE,
)
EXPAND_INT8 = Operator(
    name="expand_int8",
    call=expand_int8,
    backends=EXPAND_BACKENDS,
    cases=(_case((1, 3, 5000)), _case((1, 33, 100)), _case((1, 1, 1), dtype=torch.float32)),
    build=_build_expanded,
    compare=compare_all,
    tolerance=_TOLERANCE,
)
