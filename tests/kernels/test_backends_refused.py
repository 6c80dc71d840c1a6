"""Backends that cannot run a case are refused by name and reason, above all where wrong values would come out."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from wide.errors import UnsupportedBackendError
from wide.kernels.attention_decode import ATTENTION_DECODE, attention_decode
from wide.kernels.attention_prefill import ATTENTION_PREFILL, attention_prefill
from wide.kernels.contract import Operator
from wide.kernels.device import interprets_triton
from wide.kernels.gemm_k import GEMM_K, gemm_k
from wide.kernels.gemm_mn import GEMM_MN, gemm_mn
from wide.kernels.gemv import GEMV_K, GEMV_MN
from wide.kernels.reordering import SequenceReordering
from wide.kernels.rms_norm import RMS_NORM
from wide.kernels.route import NORM_ROUTE, ROUTE, norm_route, route

CPU = torch.device("cpu")


def _prefill(index: torch.Tensor, counts: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return attention_prefill(reordering=SequenceReordering(index, counts), **arguments)


PRODUCTS: list[tuple[Operator, Callable[..., Any]]] = [
    (GEMM_MN, gemm_mn),
    (GEMM_K, gemm_k),
    (ROUTE, route),
    (NORM_ROUTE, norm_route),
    (ATTENTION_PREFILL, _prefill),
    (ATTENTION_DECODE, attention_decode),
]


@pytest.mark.parametrize(("operator", "call"), PRODUCTS, ids=lambda value: getattr(value, "name", "call"))
def test_products_of_bfloat16_are_refused_in_the_interpreter(
    operator: Operator, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = dataclasses.replace(operator.cases[1], dtype=torch.bfloat16)
    assert "multiplies bfloat16 wrongly" in str(operator.supports("triton", CPU, case))
    assert operator.supports("torch", CPU, case) is None
    with pytest.raises(
        UnsupportedBackendError, match="bfloat16 wrongly; use float16 or float32; choose backend='torch'"
    ):
        call(**operator.build(case, CPU), backend="triton")


@pytest.mark.skipif(not interprets_triton(), reason="the interpreter stands in for a GPU")
@pytest.mark.parametrize("operator", [RMS_NORM, GEMV_MN, GEMV_K], ids=lambda operator: operator.name)
def test_kernels_without_products_run_there_in_bfloat16(operator: Operator) -> None:
    for case in operator.cases:
        case = dataclasses.replace(case, dtype=torch.bfloat16)
        arguments = operator.build(case, CPU)
        assert operator.supports("triton", CPU, case) is None
        got = operator.backends["triton"].run(**arguments)
        # It cuts bits off where GPUs round.
        assert operator.compare(arguments, got, operator.reference(**arguments)) <= 2 * operator.tolerance[case.dtype]


def test_bfloat16_on_the_host_needs_a_gpu_or_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    case = dataclasses.replace(GEMM_MN.cases[0], dtype=torch.bfloat16)
    assert "need a CUDA device" in str(GEMM_MN.supports("triton", CPU, case))


def test_operators_take_explicit_backends_only() -> None:
    for operator, call in PRODUCTS[:2]:
        with pytest.raises(UnsupportedBackendError, match=r"has the backends .*'triton'.*, got 'auto'"):
            call(**operator.build(operator.cases[0], CPU), backend="auto")
    assert "unknown backend" in str(GEMM_MN.supports("auto", CPU, GEMM_MN.cases[0]))
