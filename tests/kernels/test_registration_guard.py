"""What every registered operator owes the device: its tensors' own is current, and there is only one."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.cases import OPERATORS
from benchmarks.cases.contract import Operator
from wide.errors import ShapeError
from wide.kernels.registration import on_device_of_tensors

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
    given = {
        a: _value(str(a.type), lambda: torch.zeros(1).as_subclass(_OnSecondGpu)) for a in operator._schema.arguments
    }
    # What it does with such arguments does not matter here.
    with contextlib.suppress(Exception):
        operator(
            *(value for a, value in given.items() if not a.kwarg_only),
            **{a.name: value for a, value in given.items() if a.kwarg_only},
        )
    assert switched[:1] == ["enter cuda:1"]
    assert switched[-1] == "leave"


def test_there_are_operators_to_check() -> None:
    assert len(NAMES) == 19


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


_ON_TRITON = [operator for operator in OPERATORS.values() if "triton" in operator.backends]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("operator", _ON_TRITON, ids=lambda operator: operator.name)
def test_tensors_of_a_gpu_that_is_not_current(operator: Operator) -> None:
    second = torch.device("cuda", 1)
    with torch.cuda.device(0):
        case = next(c for c in operator.cases if operator.supports("triton", second, c) is None)
        arguments = operator.build(case, second)
        got = operator.run("triton", **arguments)
        assert operator.compare(arguments, got, operator.reference(**arguments)) <= operator.tolerance[case.dtype]
