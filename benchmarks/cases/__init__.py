"""What every operator promises, a file each: cases, how their tensors are built, what a right result is."""

import importlib
import pkgutil

from benchmarks.cases.contract import Operator

OPERATORS: dict[str, Operator] = {
    value.name: value
    for found in pkgutil.iter_modules(__path__, f"{__name__}.")
    for value in vars(importlib.import_module(found.name)).values()
    if isinstance(value, Operator)
}
"""All operators by name."""
