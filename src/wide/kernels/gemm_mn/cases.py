"""What `gemm_mn` promises: its cases, and what a right result is."""

from collections.abc import Mapping
from typing import Any

import torch

from wide.kernels.contract import (
    Case,
    Operator,
    Supports,
    Work,
    backends,
    named,
    random_mask,
    random_values,
    relative_error,
)
from wide.kernels.gemm_mn.op import fits, gemm_mn
from wide.kernels.reorder import reorder
from wide.kernels.reordering import Reordering


def _supports(backend: str) -> Supports:
    def supports(device: torch.device, case: Case) -> str | None:
        size, depth = named(case, "group_size", "depth")
        block_m = case.sizes.get("block_m", 128)
        options: dict[str, Any] = {"gated": bool(case.options.get("gated")), "block_m": block_m}
        return fits(backend, device, case.dtype, group_size=size, depth=depth, **options)

    return supports


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    rows, groups, size, depth = named(case, "num_rows", "num_groups", "group_size", "depth")
    mask = random_mask(case, (rows, groups), device)
    weights = random_values(case, (2, groups * size, depth), device, salt=1) / depth**0.5
    options = dict(case.options)
    gated, biased = options.pop("gated", False), options.pop("biased", False)
    zeroed = options.pop("zeroed", False)
    biases = random_values(case, (2, groups * size), device, salt=2)
    return {
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


def _work(case: Case) -> Work:
    rows, groups, size, depth = named(case, "num_rows", "num_groups", "group_size", "depth")
    weights = 2 if case.options.get("gated") else 1
    bytes_each = case.dtype.itemsize
    pairs = case.active * rows * groups
    return Work(
        flop=int(2 * weights * pairs * size * depth),
        bytes_read=(rows + weights * groups * size) * depth * bytes_each,
        bytes_written=int(pairs * size * bytes_each),
    )


def _cases() -> tuple[Case, ...]:
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"biased": True},
        {"gated": True, "activation": "silu"},
        {"gated": True, "activation": "gelu_tanh", "biased": True},
        {"activation": "relu2", "zeroed": True},
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


GEMM_MN = Operator(
    name="gemm_mn",
    backends=backends(gemm_mn, **{name: _supports(name) for name in ("triton", "cuda", "dense")}),
    cases=_cases(),
    build=_build,
    compare=_compare,
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    work=_work,
)
