"""What `gemv_mn` and `gemv_k` promise: their cases, and what a right result is."""

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.cases.contract import Operator, compare_all, random_mask, random_values, relative_error
from wide.kernels.gemv.op import K_BACKENDS, MN_BACKENDS, GemvShape, gemv_k, gemv_mn
from wide.kernels.int8 import quantise_int8
from wide.kernels.tuning import Case


def _build_mn(case: Case, device: torch.device) -> dict[str, Any]:
    sizes = case.sizes
    width, width_in = sizes["num_groups"] * sizes["group_size"], sizes["width_in"]
    options = dict(case.options)
    mask = random_mask(case, (sizes["num_rows"], sizes["num_groups"]), device)
    arguments = {
        "x": random_values(case, (sizes["num_rows"], width_in), device, salt=1),
        "weight": random_values(case, (width, width_in), device, salt=2) * width_in**-0.5,
        "mask": mask,
    }
    is_gated = options.pop("is_gated", False)
    if is_gated:
        arguments["up_weight"] = random_values(case, (width, width_in), device, salt=3) * width_in**-0.5
    if options.pop("has_bias", False):
        arguments["bias"] = random_values(case, (width,), device, salt=4)
        if is_gated:
            arguments["up_bias"] = random_values(case, (width,), device, salt=5)
    if options.pop("weights", None) == "int8":
        for name in ("weight", "up_weight")[: 1 + is_gated]:
            scale = name.replace("weight", "scale")
            arguments[name], arguments[scale] = quantise_int8(arguments[name])
    unused = ~mask.any(0).repeat_interleave(sizes["group_size"])
    arguments["scale" if "scale" in arguments else "weight"][unused] = float("nan")
    return {**arguments, **options}


def _build_k(case: Case, device: torch.device) -> dict[str, Any]:
    sizes = case.sizes
    group_size, num_groups, width = sizes["group_size"], sizes["num_groups"], sizes["width_out"]
    options = dict(case.options)
    mask = random_mask(case, (sizes["num_rows"], num_groups), device)
    h = random_values(case, (sizes["num_rows"], num_groups * group_size), device, salt=1)
    weight = random_values(case, (width, num_groups * group_size), device, salt=2) * (num_groups * group_size) ** -0.5
    h[~mask.repeat_interleave(group_size, 1)] = float("nan")
    bias = random_values(case, (width,), device, salt=3) if options.pop("has_bias", False) else None
    weight, scale = quantise_int8(weight) if options.pop("weights", None) == "int8" else (weight, None)
    return {"h": h, "weight": weight, "mask": mask, "bias": bias, "scale": scale}


def _shape(case: Case) -> GemvShape:
    size, int8 = case.sizes["group_size"], case.options.get("weights") == "int8"
    width_in, width_out = case.sizes.get("width_in"), case.sizes.get("width_out")
    return GemvShape(case.dtype, width_in or size, width_out or size, int8)


def _compare_mn(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    executes = arguments["mask"].repeat_interleave(got.shape[1] // arguments["mask"].shape[1], 1)
    if arguments.get("zero_skipped") and not torch.equal(got[~executes], torch.zeros_like(got[~executes])):
        return float("inf")
    return relative_error(got[executes], wanted[executes])


def _case(num_rows: int, groups: tuple[int, int], active: float, **more: Any) -> Case:
    sizes = {"num_rows": num_rows, "num_groups": groups[0], "group_size": groups[1]}
    sizes |= {name: more.pop(name) for name in ("width_in", "width_out") if name in more}
    return Case(sizes=sizes, dtype=more.pop("dtype", torch.float16), active=active, options=more)


_TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}

# Of the kernel in CUDA C++.
_INT8_MN = (
    _case(1, (3, 16), 0.5, width_in=192, weights="int8"),
    _case(4, (3, 48), 0.4, width_in=704, is_gated=True, activation="silu", zero_skipped=True, weights="int8"),
    _case(3, (4, 16), 0.5, width_in=2624, activation="gelu_tanh", has_bias=True, weights="int8", dtype=torch.bfloat16),
    _case(2, (2, 32), 0.6, width_in=64, is_gated=True, activation="relu2", has_bias=True, weights="int8"),
)
_INT8_K = (
    _case(1, (9, 128), 0.5, width_out=48, has_bias=True, weights="int8"),
    _case(4, (40, 64), 0.4, width_out=32, weights="int8", dtype=torch.bfloat16),
    _case(3, (300, 64), 0.3, width_out=16, weights="int8"),
    _case(2, (3, 192), 0.0, width_out=16, weights="int8"),
)

GEMV_MN = Operator(
    name="gemv_mn",
    call=gemv_mn,
    backends=MN_BACKENDS,
    shape=_shape,
    cases=(
        _case(1, (1, 16), 1.0, width_in=64),
        _case(1, (5, 32), 0.5, width_in=100, has_bias=True),
        _case(2, (4, 24), 0.5, width_in=128, is_gated=True, activation="silu", zero_skipped=True),
        _case(3, (3, 16), 0.5, width_in=200, is_gated=True, activation="gelu_tanh", has_bias=True),
        _case(4, (6, 12), 0.3, width_in=64, activation="relu2", zero_skipped=True),
        _case(4, (3, 16), 0.0, width_in=64, zero_skipped=True),
        _case(1, (4, 7), 0.5, width_in=65, dtype=torch.float32),
        _case(1, (5, 32), 0.5, width_in=100, has_bias=True, weights="int8"),
        _case(3, (3, 16), 0.5, width_in=192, is_gated=True, activation="silu", has_bias=True, weights="int8"),
        _case(4, (6, 12), 0.3, width_in=64, is_gated=True, activation="silu", zero_skipped=True, weights="int8"),
        *_INT8_MN,
    ),
    build=_build_mn,
    compare=_compare_mn,
    tolerance=_TOLERANCE,
)
GEMV_K = Operator(
    name="gemv_k",
    call=gemv_k,
    backends=K_BACKENDS,
    shape=_shape,
    cases=(
        _case(1, (1, 64), 1.0, width_out=16),
        _case(1, (7, 32), 0.5, width_out=33, has_bias=True),
        _case(2, (5, 128), 0.5, width_out=20),
        _case(3, (6, 16), 0.5, width_out=24),
        _case(4, (3, 24), 0.3, width_out=9, has_bias=True),
        _case(4, (3, 16), 0.0, width_out=8),
        _case(1, (4, 6), 0.5, width_out=5, dtype=torch.float32),
        _case(1, (7, 32), 0.5, width_out=33, has_bias=True, weights="int8"),
        _case(3, (6, 16), 0.5, width_out=24, weights="int8"),
        _case(4, (3, 24), 0.0, width_out=9, weights="int8"),
        *_INT8_K,
    ),
    build=_build_k,
    compare=compare_all,
    tolerance=_TOLERANCE,
)
