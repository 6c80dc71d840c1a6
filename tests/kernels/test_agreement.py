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


# Larger than others of the same kind; the interpreter takes seconds for each.
SLOW = (
    "attention_decode-1-300-32-8-8-64-0-0-0-0.5",
    "attention_decode-3-127-8-4-4-64-50-11-0-0.5",
    "attention_decode-2-90-14-2-2-64-0-0-0-0.8",
    "gemm_k-127-6-32-48-32-1-0.5",
    "gemm_k-127-6-32-48-32-2-0.5-biased=True-int8=True",
    "reorder_patterns-127-33-16-1-0.5-keeps_empty=False",
    "reorder_patterns-300-20-16-1-0.3-keeps_empty=False",
    "reorder_patterns-300-20-16-4-0.3-keeps_empty=False",
    "reorder-300-20-16-0.3",
    "reorder-300-20-64-0.3",
    "reorder-127-33-16-0.5",
    "reorder_sequences-300-20-3-0.3",
    "rope_to_cache-3-2-4-32-8-128-0.5-num_groups=8",
    "rope_to_cache-1-4-8-32-8-128-0.5-has_norm=True",
    # Made for the kernel in CUDA C++, whose source runs them on the CPU.
    "gemv_mn-4-3-48-704-0.4-is_gated=True-activation=silu-zero_skipped=True-weights=int8",
    "gemv_mn-3-4-16-2624-0.5-activation=gelu_tanh-has_bias=True-weights=int8",
    "gemv_k-4-40-64-32-0.4-weights=int8",
    "gemv_k-3-300-64-16-0.3-weights=int8",
)


def _case(operator: Operator, backend: str, case: Case) -> object:
    is_slow = backend == "triton" and DEVICE.type == "cpu" and f"{operator.name}-{_name(case)}" in SLOW
    return pytest.param(operator, backend, case, marks=pytest.mark.slow if is_slow else ())


def _backends(operator: Operator) -> list[str]:
    """Return the names of all but the reference; TileLang, whose import takes seconds, counts by its file."""
    names = set(operator.backends._modules())
    late = names & {"tilelang"} if operator.name not in SPECIAL else set()
    found = {name for name in names - {"tilelang"} if name in operator.backends}
    return sorted((late | found | set(operator.backends._known)) - {"torch"})


@pytest.mark.parametrize(
    ("operator", "backend", "case"),
    [_case(o, b, c) for o in OPERATORS.values() for b in _backends(o) for c in o.cases],
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
    assert set(SLOW) <= {f"{operator.name}-{_name(case)}" for operator in OPERATORS.values() for case in operator.cases}
