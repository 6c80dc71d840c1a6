"""Every backend of the attention and decode operators agrees with its reference on executed places."""

import dataclasses

import pytest
import torch

from wide.kernels.attention_decode import ATTENTION_DECODE
from wide.kernels.attention_prefill import ATTENTION_PREFILL
from wide.kernels.contract import Case, Operator
from wide.kernels.gemv import GEMV_K, GEMV_MN

OPERATORS = (ATTENTION_PREFILL, ATTENTION_DECODE, GEMV_MN, GEMV_K)
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def _name(value: object) -> str:
    if isinstance(value, Operator):
        return value.name
    if isinstance(value, Case):
        facts = [*value.sizes.values(), value.active, *(f"{k}={v}" for k, v in value.options.items())]
        return "-".join(str(fact) for fact in facts)
    return str(value)


@pytest.mark.parametrize(
    ("operator", "backend", "case"),
    [(o, b, c) for o in OPERATORS for b in o.backends if b != "torch" for c in o.cases],
    ids=_name,
)
def test_backend_agrees_with_reference(operator: Operator, backend: str, case: Case) -> None:
    if operator.supports(backend, DEVICE, case) is not None:
        pytest.skip("not supported for this case")
    if HAS_GPU:
        case = dataclasses.replace(case, dtype=torch.bfloat16)
    arguments = operator.build(case, DEVICE)
    got = operator.backends[backend].run(**arguments)
    assert operator.compare(arguments, got, operator.reference(**arguments)) <= operator.tolerance[case.dtype]


@pytest.mark.parametrize("operator", OPERATORS, ids=_name)
def test_contract_is_complete(operator: Operator) -> None:
    assert {"torch", "triton"} <= set(operator.backends)
    assert all(case.dtype in operator.tolerance for case in operator.cases)
    work = operator.work(operator.cases[0])
    assert min(work.flop, work.bytes_read, work.bytes_written) > 0
