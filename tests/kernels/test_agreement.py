"""Every backend of every GEMM-side operator agrees with its reference on executed places."""

import pytest
import torch

from wide.kernels.contract import Case, Operator
from wide.kernels.gemm_k import GEMM_K
from wide.kernels.gemm_k_rows import GEMM_K_ROWS
from wide.kernels.gemm_mn import GEMM_MN
from wide.kernels.reorder import REORDER, REORDER_PATTERNS, REORDER_SEQUENCES
from wide.kernels.reorder_rows import REORDER_ROWS

GENERAL = (REORDER, REORDER_SEQUENCES, REORDER_PATTERNS, GEMM_MN, GEMM_K)
# The last two have kernels of their own on one kind of GPU only.
OPERATORS = (*GENERAL, REORDER_ROWS, GEMM_K_ROWS)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
    arguments = operator.build(case, DEVICE)
    wanted = operator.reference(**arguments)
    got = operator.backends[backend].run(**arguments)
    assert operator.compare(arguments, got, wanted) <= operator.tolerance[case.dtype]


@pytest.mark.parametrize("operator", OPERATORS, ids=_name)
def test_contract_is_complete(operator: Operator) -> None:
    assert {"torch", "triton" if operator in GENERAL else "cuda"} <= set(operator.backends)
    assert all(case.dtype in operator.tolerance for case in operator.cases)
    work = operator.work(operator.cases[0])
    assert work.bytes_read > 0
