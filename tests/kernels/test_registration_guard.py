"""What every registered operator owes the device: its tensors' own is current, and there is only one."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wide.kernels
from wide.errors import ShapeError
from wide.kernels.attention_decode import ATTENTION_DECODE, attention_decode
from wide.kernels.attention_prefill import ATTENTION_PREFILL, attention_prefill
from wide.kernels.clear_skipped import CLEAR_SKIPPED, cleared
from wide.kernels.contract import Operator
from wide.kernels.gemm_k import GEMM_K, gemm_k
from wide.kernels.gemm_mn import GEMM_MN, gemm_mn
from wide.kernels.gemv import GEMV_K, GEMV_MN, gemv_k, gemv_mn
from wide.kernels.registration import on_device_of_tensors
from wide.kernels.reorder import REORDER, REORDER_PATTERNS, reorder, reorder_patterns
from wide.kernels.reorder_rows import REORDER_ROWS, reorder_rows
from wide.kernels.reordering import SequenceReordering
from wide.kernels.rms_norm import RMS_NORM, rms_norm
from wide.kernels.route import NORM_ROUTE, ROUTE, norm_route, route

for _folder in sorted(Path(wide.kernels.__file__).parent.glob("*/operator.py")):
    importlib.import_module(f"wide.kernels.{_folder.parent.name}.operator")
NAMES = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("wide::"))


class _OnSecondGpu(torch.Tensor):
    """A tensor of the host that says it lies on another GPU than the current one."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return where it seems to lie."""
        return torch.device("cuda", 1)


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what happens to the current device, which is the first GPU's."""
    seen: list[str] = []

    @contextlib.contextmanager
    def device(where: torch.device) -> Iterator[None]:
        seen.append(f"enter {where}")
        try:
            yield
        finally:
            seen.append("leave")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return seen


def _value(kind: str, tensor: Callable[[], torch.Tensor]) -> Any:
    if kind in ("Tensor", "Optional[Tensor]"):
        return tensor()
    return {"str": "torch", "bool": False, "float": 0.0, "int": 1, "List[int]": ()}.get(kind)


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_runs_with_its_tensors_device_current(name: str, switched: list[str]) -> None:
    operator = getattr(torch.ops.wide, name.removeprefix("wide::")).default
    arguments = [
        _value(str(a.type), lambda: torch.zeros(1).as_subclass(_OnSecondGpu)) for a in operator._schema.arguments
    ]
    # What it does with such arguments does not matter here.
    with contextlib.suppress(Exception):
        operator(*arguments)
    assert switched[:1] == ["enter cuda:1"]
    assert switched[-1] == "leave"


def test_there_are_operators_to_check() -> None:
    assert len(NAMES) == 16


def test_nothing_is_switched_on_the_current_device_or_the_host(switched: list[str]) -> None:
    class OnFirstGpu(torch.Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    guarded = on_device_of_tensors("any", lambda *_, **__: "ran")
    assert guarded(torch.zeros(1).as_subclass(OnFirstGpu), 3, mask=None) == "ran"
    assert guarded(torch.zeros(1)) == "ran"
    assert switched == []


def test_tensors_of_several_devices_are_refused() -> None:
    guarded = on_device_of_tensors("rms_norm", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(ShapeError, match=r"rms_norm wants all tensors on one device, got \['cpu', 'meta'\]"):
        guarded(torch.zeros(1), 1.0, addend=torch.zeros(1, device="meta"))


def _prefill(index: torch.Tensor, counts: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return attention_prefill(reordering=SequenceReordering(index, counts), **arguments)


def _clear(values: torch.Tensor, mask: torch.Tensor, *, backend: str) -> torch.Tensor:
    del backend
    return cleared(values.clone(), mask)


_CALLS: list[tuple[Operator, Callable[..., Any]]] = [
    (REORDER, lambda **arguments: reorder(**arguments)[:6]),
    (REORDER_PATTERNS, lambda **arguments: reorder_patterns(**arguments)[:5]),
    (REORDER_ROWS, lambda **arguments: reorder_rows(**arguments)[:4]),
    (GEMM_MN, gemm_mn),
    (GEMM_K, gemm_k),
    (ATTENTION_PREFILL, _prefill),
    (ATTENTION_DECODE, attention_decode),
    (GEMV_MN, gemv_mn),
    (GEMV_K, gemv_k),
    (RMS_NORM, rms_norm),
    (ROUTE, route),
    (NORM_ROUTE, norm_route),
    (CLEAR_SKIPPED, _clear),
]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("operator", "call"), _CALLS, ids=lambda value: getattr(value, "name", "call"))
def test_tensors_of_a_gpu_that_is_not_current(operator: Operator, call: Callable[..., Any]) -> None:
    second = torch.device("cuda", 1)
    with torch.cuda.device(0):
        case = next(c for c in operator.cases if operator.supports("triton", second, c) is None)
        arguments = operator.build(case, second)
        got = call(**arguments, backend="triton")
        assert operator.compare(arguments, got, operator.reference(**arguments)) <= operator.tolerance[case.dtype]
