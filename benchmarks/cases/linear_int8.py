"""What `linear_int8`, `expand_int8` and `quantise_rows` promise: their cases, and what a right result is."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.cases.contract import (
    Operator,
    compare_all,
    make_case,
    named,
    random_mask,
    random_values,
)
from wide.kernels.int8 import hadamard, quantise_int8
from wide.kernels.linear_int8.op import (
    BACKENDS,
    EXPAND_BACKENDS,
    QUANTISE_BACKENDS,
    Int8Shape,
    expand_int8,
    linear_int8,
    quantise_rows,
)
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
    found = {"x": x, "weight": values, "scale": scale, "bias": bias, "gate": case.options.get("gate")}
    return in_int8(found, "x", case) if case.options.get("int8") else found


def in_int8(found: dict[str, Any], name: str, case: Case, mask: torch.Tensor | None = None) -> dict[str, Any]:
    """Return the arguments of a product with its rows, which a name tells, in int8."""
    rows, x_scale = quantise_rows(found[name], mask, backend="torch")
    return {**found, name: rows, "x_scale": x_scale, "dtype": case.dtype}


def _build_expanded(case: Case, device: torch.device) -> dict[str, Any]:
    return {"weight": _build(case, device)["weight"], "scale": _build(case, device)["scale"], "dtype": case.dtype}


def _build_rows(case: Case, device: torch.device) -> dict[str, Any]:
    rows, width, groups = named(case, "num_rows", "width", "num_groups")
    x = random_values(case, (rows, width), device, salt=1)
    x[:, width // 2] *= 1e3
    turn = hadamard(width // max(groups, 1), x) if case.options.get("rotates") else None
    if not groups:
        return {"x": x, "mask": None, "rotation": turn}
    mask = random_mask(case, (rows, groups), device)
    x.view(rows, groups, -1)[~mask] = float("nan")
    mask[0] = False
    return {"x": x, "mask": mask, "rotation": turn}


def _compare_rows(arguments: Mapping[str, Any], got: Any, wanted: Any) -> float:
    """Return 0 for rows of which one value in a thousand is off by one at most: sums and roundings differ in order."""
    known = wanted[1].isfinite()
    off = (got[0].int() - wanted[0].int()).abs()[known].float()
    close = torch.allclose(got[1], wanted[1], rtol=1e-5, atol=0, equal_nan=True)
    close = close and (not off.numel() or bool(off.max() <= 1 and off.mean() <= 1e-3))
    return 0.0 if close else float("inf")


def _shape(case: Case) -> Int8Shape:
    rows, width, depth = named(case, "num_rows", "width", "depth")
    return Int8Shape(rows, torch.int8 if case.options.get("int8") else case.dtype, width, depth)


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
        _case((150, 130, 100), int8=True, has_bias=True),
        _case((5, 33, 256), int8=True, outlier=True, dtype=torch.float32),
        _case((6, 96, 64), gate="silu"),
        _case((20, 64, 192), int8=True, gate="gelu_tanh", has_bias=True),
    ),
    # Of the kernels in CUDA C++: few rows, whole tiles, and remainders that are short and thin.
    large_cases=tuple(
        _case(sizes, int8=True, has_bias=biased, gate=gate, dtype=torch.bfloat16)
        for sizes, biased, gate in (
            ((1, 256, 128), False, None),
            ((31, 28672, 128), True, "silu"),
            ((300, 512, 384), True, None),
            ((390, 256, 128), False, "silu"),
            ((1000, 1024, 1280), False, None),
        )
    ),
    shape=_shape,
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
QUANTISE_ROWS = Operator(
    name="quantise_rows",
    call=quantise_rows,
    backends=QUANTISE_BACKENDS,
    cases=tuple(
        make_case(("num_rows", "width", "num_groups"), sizes, dtype=dtype, rotates=rotates)
        for sizes, dtype, rotates in (
            ((3, 5000, 0), torch.float16, False),
            ((2, 100, 0), torch.float32, False),
            ((9, 96, 3), torch.float16, False),
            ((4, 1536, 12), torch.bfloat16, False),
            ((4, 1536, 12), torch.float16, True),
            ((3, 144, 3), torch.float16, True),
            ((2, 192, 0), torch.float32, True),
        )
    ),
    build=_build_rows,
    compare=_compare_rows,
    tolerance=_TOLERANCE,
)
