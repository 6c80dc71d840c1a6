"""What `gemm_k` and `gemm_k_rows` promise: their cases, and what a right result is."""

import functools
from typing import Any

import torch

from benchmarks.cases.contract import Operator, compare_all, make_case, named, random_mask, random_values
from benchmarks.cases.linear_int8 import in_int8
from wide.kernels.gemm_k.op import BACKENDS, ROWS_BACKENDS, KShape, gemm_k, gemm_k_rows
from wide.kernels.int8 import quantise_int8
from wide.kernels.reorder.op import reorder_patterns, reorder_rows
from wide.kernels.tuning import Case

_SIZES = ("num_rows", "num_groups", "group_size", "width")


def _build_product(case: Case, device: torch.device) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the mask and the arguments of GEMM-K but the order: h with NaN where skipped, weight, bias, group size.

    Args:
        case: With the sizes `num_rows` (M), `num_groups` (N_G), `group_size` (G) and `width` (N); the option `biased`
            adds a bias.
    """
    rows, groups, size, width = named(case, *_SIZES)
    mask = random_mask(case, (rows, groups), device)
    h = torch.where(mask.unsqueeze(2), random_values(case, (rows, groups, size), device, salt=1), float("nan"))
    arguments = {
        "h": h.view(rows, groups * size),
        "weight": random_values(case, (width, groups * size), device, salt=2) / (groups * size) ** 0.5,
        "group_size": size,
        "bias": random_values(case, (width,), device, salt=3) if case.options.get("biased") else None,
    }
    if not case.options.get("int8"):
        return mask, arguments
    weight, scale = quantise_int8(arguments["weight"])
    return mask, in_int8({**arguments, "weight": weight, "scale": scale}, "h", case, mask)


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    mask, arguments = _build_product(case, device)
    groups_per_block, block_m = named(case, "groups_per_block", "block_m")
    order = reorder_patterns(
        mask,
        groups_per_block=groups_per_block,
        block_m=block_m,
        keeps_empty=case.options.get("keeps_empty", False),
        backend="torch",
    )
    return {**arguments, "order": order}


def _shape(case: Case) -> KShape:
    rows, groups, size, width = named(case, *_SIZES)
    is_stored = bool(case.options.get("keeps_empty")) and groups <= case.sizes["groups_per_block"]
    return KShape(_rows_dtype(case), rows, groups, size, width, is_stored)


def _rows_shape(case: Case) -> KShape:
    rows, groups, size, width = named(case, *_SIZES)
    return KShape(_rows_dtype(case), rows, groups, size, width)


def _rows_dtype(case: Case) -> torch.dtype:
    return torch.int8 if case.options.get("int8") else case.dtype


def _build_rows(case: Case, device: torch.device) -> dict[str, Any]:
    mask, arguments = _build_product(case, device)
    return {**arguments, "order": reorder_rows(mask, backend="torch")}


def _cases() -> tuple[Case, ...]:
    variants: tuple[tuple[int, dict[str, Any]], ...] = (
        (1, {}),
        (3, {"biased": True}),
        (8, {"keeps_empty": True, "biased": True}),
        (2, {"biased": True, "int8": True}),
        (8, {"keeps_empty": True, "int8": True}),
    )
    shapes = ((1, 1, 32, 0.5), (3, 2, 16, 1.0), (17, 5, 32, 0.5), (64, 3, 48, 0.0), (127, 6, 32, 0.5))
    return tuple(
        Case(
            sizes={
                **dict(zip(_SIZES, (rows, groups, size, 48), strict=True)),
                "block_m": 32,
                "groups_per_block": groups_per_block,
            },
            dtype=dtype,
            active=active,
            options=options,
        )
        for dtype, (rows, groups, size, active) in zip((torch.float32, torch.float16) * 3, shapes, strict=False)
        for groups_per_block, options in variants
    )


_large = functools.partial(make_case, (*_SIZES, "block_m", "groups_per_block"), dtype=torch.bfloat16)
_LARGE_CASES = (
    _large((1, 1, 128, 512, 128, 1), active=1.0),
    _large((127, 3, 128, 512, 128, 2)),
    _large((200, 5, 64, 512, 128, 4), biased=True),
    _large((130, 4, 128, 512, 128, 4), active=0.0),
    _large((300, 3, 512, 512, 128, 8), keeps_empty=True),
    # Stored: units of 64 rows of which one or none executes a group, several tiles a program, nothing executing.
    _large((1, 8, 64, 512, 128, 8), keeps_empty=True, biased=True),
    _large((700, 8, 128, 512, 128, 8), keeps_empty=True),
    _large((190, 5, 192, 512, 128, 5), active=0.1, keeps_empty=True, biased=True),
    _large((65, 2, 64, 512, 128, 2), active=0.0, keeps_empty=True, biased=True),
    _large((128, 4, 64, 512, 128, 4), active=1.0, keeps_empty=True),
    _large((300, 4, 256, 512, 128, 4), active=1.0),
    _large((700, 8, 128, 512, 128, 8), keeps_empty=True, int8=True),
    _large((190, 5, 384, 512, 128, 5), active=0.1, keeps_empty=True, biased=True, int8=True),
    _large((130, 4, 512, 256, 128, 4), active=1.0, keeps_empty=True, int8=True),
)
GEMM_K = Operator(
    name="gemm_k",
    call=gemm_k,
    backends=BACKENDS,
    shape=_shape,
    cases=_cases(),
    large_cases=_LARGE_CASES,
    build=_build,
    compare=compare_all,
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
)
_rows = functools.partial(make_case, _SIZES, dtype=torch.bfloat16)
GEMM_K_ROWS = Operator(
    name="gemm_k_rows",
    call=gemm_k_rows,
    backends=ROWS_BACKENDS,
    shape=_rows_shape,
    cases=(
        _rows((1, 1, 16, 32), active=1.0, dtype=torch.float32),
        _rows((3, 2, 8, 16), biased=True, dtype=torch.float32),
        _rows((70, 40, 8, 24), dtype=torch.float32),
        _rows((130, 5, 16, 16), active=0.0, biased=True, dtype=torch.float32),
        # Of the kernel in CUDA C++: two to four words, rows, units and tiles that are not full, nothing and everything.
        _rows((1, 9, 64, 256)),
        _rows((65, 12, 128, 512), biased=True),
        _rows((127, 33, 64, 256), active=0.1),
        _rows((200, 70, 64, 256)),
        _rows((300, 112, 64, 512), active=0.02, biased=True),
        _rows((130, 40, 64, 256), active=0.0, biased=True),
        _rows((129, 128, 64, 256), active=1.0),
        _rows((190, 112, 64, 256), biased=True, dtype=torch.float16),
        _rows((200, 70, 128, 256), biased=True, int8=True),
        _rows((129, 33, 128, 512), active=0.1, int8=True),
    ),
    # Panels of columns, a narrow one, and more tiles than programs, in emulation and on a GPU.
    large_cases=(_rows((650, 40, 64, 1280), biased=True), _rows((4500, 12, 64, 1280))),
    build=_build_rows,
    compare=compare_all,
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
)
