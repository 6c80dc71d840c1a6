"""What `gemm_mn` promises: its cases, and what a right result is."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.cases.contract import Operator, make_case, named, random_mask, random_values, relative_error
from benchmarks.cases.linear_int8 import in_int8
from wide.kernels.gemm_mn.op import BACKENDS, MnShape, finish_dense, gemm_mn
from wide.kernels.int8 import quantise_int8
from wide.kernels.reorder.op import reorder
from wide.kernels.reordering import Reordering
from wide.kernels.tuning import Case


@BACKENDS.register("dense")
def _dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    _: Reordering,
    *,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Compute every channel with the library's GEMM, whose rounding and time others are compared with."""
    values = torch.nn.functional.linear(x, weight, bias)
    if up_weight is not None:
        values = torch.cat((values, torch.nn.functional.linear(x, up_weight, up_bias)), 1)
    return finish_dense(values, activation, mask, gated=up_weight is not None)


def _shape(case: Case) -> MnShape:
    size, depth, block_m = named(case, "group_size", "depth", "block_m")
    dtype = torch.int8 if case.options.get("int8") else case.dtype
    return MnShape(dtype, size, depth, bool(case.options.get("gated")), block_m)


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    rows, groups, size, depth = named(case, "num_rows", "num_groups", "group_size", "depth")
    mask = random_mask(case, (rows, groups), device)
    weights = random_values(case, (2, groups * size, depth), device, salt=1) / depth**0.5
    options = dict(case.options)
    gated, biased = options.pop("gated", False), options.pop("biased", False)
    zeroed, int8 = options.pop("zeroed", False), options.pop("int8", False)
    biases = random_values(case, (2, groups * size), device, salt=2)
    arguments = {
        "x": random_values(case, (rows, depth), device, salt=3),
        "weight": weights[0],
        "order": reorder(mask, block_m=case.sizes["block_m"], backend="torch"),
        "up_weight": weights[1] if gated else None,
        "bias": biases[0] if biased else None,
        "up_bias": biases[1] if biased and gated else None,
        "activation": "none",
        "mask": mask if zeroed else None,
        **options,
    }
    if not int8:
        return arguments
    for weight, scale in (("weight", "scale"), ("up_weight", "up_scale")):
        if arguments[weight] is not None:
            arguments[weight], arguments[scale] = quantise_int8(arguments[weight])
    return in_int8(arguments, "x", case)


def executed(arguments: Mapping[str, Any], out: torch.Tensor) -> torch.Tensor:
    """Return the meant entries of an output as one vector; everything if skipped entries are zeroed."""
    order: Reordering = arguments["order"]
    if arguments["mask"] is not None:
        return out.flatten()
    counts = order.counts.tolist()
    grouped = out.view(out.shape[0], len(counts), -1)
    return torch.cat([grouped[order.index[g, :n].long(), g].flatten() for g, n in enumerate(counts)])


def _compare(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    return relative_error(executed(arguments, got), executed(arguments, wanted))


def _cases() -> tuple[Case, ...]:
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"biased": True},
        {"gated": True, "activation": "silu"},
        {"gated": True, "activation": "gelu_tanh", "biased": True},
        {"activation": "relu2", "zeroed": True},
        {"gated": True, "activation": "silu", "biased": True, "int8": True},
        {"zeroed": True, "int8": True},
    )
    shapes = ((1, 1, 32, 0.5), (3, 2, 16, 1.0), (17, 3, 32, 0.5), (64, 2, 48, 0.0), (127, 2, 32, 0.5))
    return tuple(
        Case(
            sizes={"num_rows": rows, "num_groups": groups, "group_size": size, "depth": 72, "block_m": 32},
            dtype=dtype,
            active=active,
            options=options,
        )
        for dtype, (rows, groups, size, active) in zip((torch.float32, torch.float16) * 3, shapes, strict=False)
        for options in variants
    )


_GATED: dict[str, Any] = {"gated": True, "activation": "silu"}
_large = functools.partial(
    make_case, ("num_rows", "num_groups", "group_size", "depth", "block_m"), dtype=torch.bfloat16
)
_LARGE_CASES = (
    _large((1, 1, 128, 320, 128), active=1.0, **_GATED),
    _large((127, 3, 128, 320, 128), zeroed=True, **_GATED),
    _large((200, 2, 64, 320, 128), gated=True, activation="gelu_tanh", biased=True),
    _large((130, 2, 128, 320, 128), active=0.0, zeroed=True, **_GATED),
    _large((300, 2, 512, 320, 128)),
    _large((127, 2, 256, 320, 128), active=1.0, biased=True),
    # Rows sorted into the tiles that two programs share: whole ones of 256 rows, and remainders of at most 64, at most
    # 128 and more; one part or two.
    _large((300, 2, 256, 320, 256), active=1.0, **_GATED),
    _large((356, 3, 512, 320, 256), active=1.0),
    _large((436, 3, 128, 320, 128), active=1.0, gated=True, activation="gelu_tanh", biased=True),
    _large((700, 3, 256, 320, 256), activation="relu2", biased=True),
    _large((600, 5, 128, 320, 128), zeroed=True, **_GATED),
    # Short ones alone, and most groups empty.
    _large((1, 5, 128, 320, 256), **_GATED),
    _large((90, 9, 256, 320, 256), active=0.02),
    # One step of 64 and an even number of them.
    _large((40, 3, 128, 64, 256), **_GATED),
    _large((300, 2, 512, 384, 256), active=1.0, activation="relu2"),
    _large((260, 2, 256, 320, 256), active=0.0, zeroed=True),
    _large((1, 5, 128, 128, 256), int8=True, **_GATED),
    _large((356, 3, 512, 384, 256), active=1.0, int8=True),
    _large((436, 3, 128, 640, 128), active=1.0, gated=True, activation="gelu_tanh", biased=True, int8=True),
    _large((700, 3, 256, 1280, 256), zeroed=True, int8=True, **_GATED),
    _large((90, 9, 256, 256, 256), active=0.02, int8=True),
)
GEMM_MN = Operator(
    name="gemm_mn",
    call=gemm_mn,
    backends=BACKENDS,
    shape=_shape,
    cases=_cases(),
    large_cases=_LARGE_CASES,
    build=_build,
    compare=_compare,
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
)
