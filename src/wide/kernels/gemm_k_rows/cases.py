"""What `gemm_k_rows` promises: its cases, and what a right result is."""

import functools
from typing import Any

import torch

from wide.kernels.contract import Case, Operator, anywhere, backends, compare_all, make_case, named
from wide.kernels.gemm_k.cases import SIZES, build_product, least_work
from wide.kernels.gemm_k_rows.op import fits, gemm_k_rows
from wide.kernels.reorder_rows import reorder_rows


def _cuda_supports(device: torch.device, case: Case) -> str | None:
    _, groups, size, width = named(case, *SIZES)
    return fits("cuda", device, case.dtype, group_size=size, num_groups=groups, width=width)


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    arguments = build_product(case, device)
    return {**arguments, "order": reorder_rows(arguments["mask"], backend="torch")}


_case = functools.partial(make_case, SIZES, dtype=torch.bfloat16)
GEMM_K_ROWS = Operator(
    name="gemm_k_rows",
    backends=backends(gemm_k_rows, cuda=_cuda_supports, dense=anywhere),
    cases=(
        _case((1, 1, 16, 32), active=1.0, dtype=torch.float32),
        _case((3, 2, 8, 16), biased=True, dtype=torch.float32),
        _case((70, 40, 8, 24), dtype=torch.float32),
        _case((130, 5, 16, 16), active=0.0, biased=True, dtype=torch.float32),
        # Of the kernel in CUDA C++: two to four words, rows, units and tiles that are not full, nothing and everything.
        _case((1, 9, 64, 256)),
        _case((65, 12, 128, 512), biased=True),
        _case((127, 33, 64, 256), active=0.1),
        _case((200, 70, 64, 256)),
        _case((300, 112, 64, 512), active=0.02, biased=True),
        _case((130, 40, 64, 256), active=0.0, biased=True),
        _case((129, 128, 64, 256), active=1.0),
        _case((190, 112, 64, 256), biased=True, dtype=torch.float16),
    ),
    build=_build,
    compare=compare_all,
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    work=least_work,
)
