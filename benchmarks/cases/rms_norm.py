"""What `rms_norm` promises: its cases, and what a right result is."""

import functools
from typing import Any

import torch

from benchmarks.cases.contract import Operator, compare_all, make_case, random_values
from wide.kernels.rms_norm.op import BACKENDS, rms_norm
from wide.kernels.tuning import Case

_case = functools.partial(make_case, ("num_rows", "width"))


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    shape = (case.sizes["num_rows"], case.sizes["width"])
    options = dict(case.options)
    has_addend = options.pop("has_addend", True)
    return {
        "x": random_values(case, shape, device, salt=1),
        "weight": random_values(case, shape[1:], device, salt=2),
        "addend": random_values(case, shape, device, salt=3) if has_addend else None,
        **options,
    }


RMS_NORM = Operator(
    name="rms_norm",
    call=rms_norm,
    backends=BACKENDS,
    cases=(
        _case((1, 64)),
        _case((3, 100), has_addend=False),
        _case((17, 96), unit_offset=True, eps=1e-5),
        _case((5, 1), dtype=torch.float32),
        _case((4, 130), dtype=torch.float32, has_addend=False, unit_offset=True),
    ),
    build=_build,
    compare=compare_all,
    tolerance={torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3},
)
