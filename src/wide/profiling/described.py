"""Cases as records hold them and flags name them."""

import argparse
from typing import Any

from wide.kernels.contract import Case


def describe_case(operator: str, case: Case) -> dict[str, Any]:
    """Return a case and the operator it belongs to, JSON-ready."""
    return {
        "operator": operator,
        "sizes": dict(case.sizes),
        "dtype": str(case.dtype).removeprefix("torch."),
        "active": case.active,
        "options": dict(case.options),
    }


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `only_shape` reads."""
    parser.add_argument("--group-size", type=int, help="of the FFN, instead of the usual ones")
    parser.add_argument("--sparsity", type=float, help="share that is skipped, instead of the usual ones")


def only_shape(options: argparse.Namespace) -> tuple[int, float] | None:
    """Return the FFN's group size and the share that executes, None if neither was given."""
    if options.group_size is None and options.sparsity is None:
        return None
    return options.group_size or 128, 0.5 if options.sparsity is None else 1.0 - options.sparsity
