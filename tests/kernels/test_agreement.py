"""Every backend of every operator agrees with its reference on executed places."""

import dataclasses

import pytest
import torch

from benchmarks.cases import OPERATORS
from benchmarks.cases.contract import Operator
from wide.kernels.tuning import Case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# They have kernels of their own on one kind of GPU only.
SPECIAL = ("reorder_rows", "gemm_k_rows")


def _name(value: object) -> str:
    if isinstance(value, Operator):
        return value.name
    if isinstance(value, Case):
        facts = [*value.sizes.values(), value.active, *(f"{k}={v}" for k, v in value.options.items())]
        return "-".join(str(fact) for fact in facts)
    return str(value)


@pytest.mark.parametrize(
    ("operator", "backend", "case"),
    [(o, b, c) for o in OPERATORS.values() for b in o.backends if b != "torch" for c in o.cases],
    ids=_name,
)
def test_backend_agrees_with_reference(operator: Operator, backend: str, case: Case) -> None:
    if operator.supports(backend, DEVICE, case) is not None and DEVICE.type == "cuda" and case.dtype != torch.bool:
        case = dataclasses.replace(case, dtype=torch.bfloat16)
    if operator.supports(backend, DEVICE, case) is not None:
        pytest.skip("not supported for this case")
    arguments = operator.build(case, DEVICE)
    got = operator.run(backend, **arguments)
    assert operator.compare(arguments, got, operator.reference(**arguments)) <= operator.tolerance[case.dtype]


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=_name)
def test_contract_is_complete(operator: Operator) -> None:
    assert {"torch", "cuda" if operator.name in SPECIAL else "triton"} <= set(operator.backends)
    assert all(case.dtype in operator.tolerance for case in operator.cases)


def test_all_operators_are_here() -> None:
    assert len(OPERATORS) == 19
