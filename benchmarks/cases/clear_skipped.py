"""What `clear_skipped` promises: its cases, and what a right result is."""

import functools
from typing import Any

import torch

from benchmarks.cases.contract import Operator, compare_exactly, make_case, named, random_mask, random_values
from wide.kernels.clear_skipped.op import BACKENDS, clear_skipped
from wide.kernels.tuning import Case

_SIZES = ("num_rows", "num_groups", "group_size")
_case = functools.partial(make_case, _SIZES)


def _run(values: torch.Tensor, mask: torch.Tensor, *, backend: str) -> torch.Tensor:
    # The contract compares what is returned, and all backends get the same arguments.
    copy = values.clone()
    clear_skipped(copy, mask, backend=backend)
    return copy


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    rows, groups, size = named(case, *_SIZES)
    mask = random_mask(case, (rows, groups), device)
    values = random_values(case, (rows, groups * size), device, salt=1)
    values.unflatten(1, (groups, size))[~mask] = float("nan")
    return {"values": values, "mask": mask}


CLEAR_SKIPPED = Operator(
    name="clear_skipped",
    call=_run,
    backends=BACKENDS,
    cases=(
        _case((1, 1, 1)),
        _case((3, 8, 512), active=0.0),
        _case((17, 3, 24)),
        _case((64, 4, 600), dtype=torch.float32),
        _case((127, 112, 16), active=1.0),
        _case((1000, 5, 13), active=0.9),
    ),
    build=_build,
    compare=compare_exactly,
    tolerance=dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 0.0),
)
