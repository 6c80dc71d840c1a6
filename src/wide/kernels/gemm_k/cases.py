"""What `gemm_k` promises: its cases, and what a right result is."""

from typing import Any

import torch

from wide.kernels.contract import (
    Case,
    Operator,
    Supports,
    Work,
    anywhere,
    backends,
    compare_all,
    named,
    random_mask,
    random_values,
)
from wide.kernels.gemm_k.op import fits, gemm_k
from wide.kernels.reorder import reorder_patterns
from wide.kernels.reordering import PATTERN_GROUPS

SIZES = ("num_rows", "num_groups", "group_size", "width")


def least_work(case: Case) -> Work:
    """Return the least work of GEMM-K, over super-blocks of groups or over rows in one order.

    Args:
        case: With the sizes `num_rows` (M), `num_groups` (N_G), `group_size` (G) and `width` (N).

    Returns:
        Products of the executing pairs; their channels and the weights [N, N_G * G] are read, [M, N] is written.
    """
    rows, groups, size, width = named(case, *SIZES)
    bytes_each = case.dtype.itemsize
    pairs = case.active * rows * groups
    return Work(
        flop=int(2 * pairs * size * width),
        bytes_read=int((pairs + width * groups) * size * bytes_each),
        bytes_written=rows * width * bytes_each,
    )


def build_product(case: Case, device: torch.device) -> dict[str, Any]:
    """Return the arguments of GEMM-K over any order of rows: h with NaN where skipped, weight, bias, mask, group size.

    Args:
        case: With the sizes of `least_work`; the option `biased` asks for a bias.
        device: Of the tensors.
    """
    rows, groups, size, width = named(case, *SIZES)
    mask = random_mask(case, (rows, groups), device)
    h = torch.where(mask.unsqueeze(2), random_values(case, (rows, groups, size), device, salt=1), float("nan"))
    return {
        "h": h.view(rows, groups * size),
        "weight": random_values(case, (width, groups * size), device, salt=2) / (groups * size) ** 0.5,
        "group_size": size,
        "bias": random_values(case, (width,), device, salt=3) if case.options.get("biased") else None,
        "mask": mask,
    }


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    arguments = build_product(case, device)
    groups_per_block, block_m = named(case, "groups_per_block", "block_m")
    order = reorder_patterns(
        arguments["mask"],
        groups_per_block=groups_per_block,
        block_m=block_m,
        keeps_empty=case.options.get("keeps_empty", False),
        backend="torch",
    )
    return {**arguments, "order": order}


def _supports(backend: str) -> Supports:
    def supports(device: torch.device, case: Case) -> str | None:
        _, groups, size, width = named(case, *SIZES)
        per_block = case.sizes.get("groups_per_block", PATTERN_GROUPS)
        is_stored = bool(case.options.get("keeps_empty")) and groups <= per_block
        return fits(backend, device, case.dtype, group_size=size, width=width, is_stored=is_stored)

    return supports


def _cases() -> tuple[Case, ...]:
    variants: tuple[tuple[int, dict[str, Any]], ...] = (
        (1, {}),
        (3, {"biased": True}),
        (8, {"keeps_empty": True, "biased": True}),
    )
    shapes = ((1, 1, 32, 0.5), (3, 2, 16, 1.0), (17, 5, 32, 0.5), (64, 3, 48, 0.0), (127, 6, 32, 0.5))
    return tuple(
        Case(
            sizes={
                **dict(zip(SIZES, (rows, groups, size, 48), strict=True)),
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


GEMM_K = Operator(
    name="gemm_k",
    backends=backends(gemm_k, triton=_supports("triton"), cuda=_supports("cuda"), dense=anywhere),
    cases=_cases(),
    build=_build,
    compare=compare_all,
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    work=least_work,
)
