"""What `reorder_rows` promises: its cases, and what a right result is."""

import functools
from typing import Any

import torch

from wide.kernels.contract import Case, Operator, Work, backends, compare_exactly, make_case, random_mask
from wide.kernels.device import hopper_obstacle
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.reorder_rows.op import reorder_rows
from wide.kernels.reorder_rows.reference import num_words

_case = functools.partial(make_case, ("num_rows", "num_groups"), dtype=torch.bool)


def _cuda_supports(device: torch.device, case: Case) -> str | None:
    del case
    return hopper_obstacle(device) or native_obstacle()


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    return {"mask": random_mask(case, (case.sizes["num_rows"], case.sizes["num_groups"]), device)}


def _work(case: Case) -> Work:
    rows, groups = case.sizes["num_rows"], case.sizes["num_groups"]
    return Work(flop=0, bytes_read=2 * rows * groups, bytes_written=4 * rows * (1 + num_words(groups)))


REORDER_ROWS = Operator(
    name="reorder_rows",
    backends=backends(reorder_rows, cuda=_cuda_supports),
    cases=(
        _case((1, 1)),
        _case((3, 9)),
        _case((64, 33), active=0.0),
        _case((65, 64), active=1.0),
        _case((127, 40), active=0.3),
        _case((300, 112)),
        _case((520, 128), active=0.9),
        _case((4096, 96), active=0.2),
        # More than one chunk.
        _case((16900, 40), active=0.1),
    ),
    build=_build,
    compare=compare_exactly,
    tolerance={torch.bool: 0.0},
    work=_work,
)
