"""Does a backend agree with its reference on this device? A speed-up is never reported past a red gate."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from wide.kernels.contract import Case, Operator


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Outcome of one operator, backend and case.

    Args:
        operator: Name of the operator.
        backend: Name of the backend.
        case: What was run.
        error: Relative error on executed places; inf if any of them is not finite.
        tolerance: Largest error allowed.
        failure: What a backend raised that had said it runs the case; its error is inf.
    """

    operator: str
    backend: str
    case: Case
    error: float
    tolerance: float
    failure: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


class PoisonedMemory:
    """Fills uninitialised memory with NaN (floats) or extreme values (integers) while entered."""

    def __enter__(self) -> None:
        """Turn poisoning on."""
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        """Restore the former state."""
        torch.use_deterministic_algorithms(self._before[0], warn_only=self._before[1])


def verdicts(
    operators: Sequence[Operator], device: torch.device, *, backends: Sequence[str], dtypes: Sequence[torch.dtype]
) -> Iterator[Verdict]:
    """Run every case on every backend that supports it, with poisoned memory.

    Args:
        operators: What to check.
        device: Where.
        backends: Names of backends to check.
        dtypes: Types in which cases with floating-point inputs run, instead of their own.
    """
    for operator in operators:
        cases = operator.cases
        if cases[0].dtype.is_floating_point:
            cases = tuple(dataclasses.replace(case, dtype=dtype) for case in cases for dtype in dtypes)
        for case in cases:
            for backend in backends:
                if backend in operator.backends and operator.supports(backend, device, case) is None:
                    yield _verdict(operator, backend, case, device)


def _verdict(operator: Operator, backend: str, case: Case, device: torch.device) -> Verdict:
    failure = ""
    with PoisonedMemory():
        arguments = operator.build(case, device)
        wanted = operator.reference(**arguments)
        # One that fails is as red as one that is wrong, and the others are still to be checked.
        try:
            error = operator.compare(arguments, operator.backends[backend].run(**arguments), wanted)
        except Exception as raised:
            error, failure = float("inf"), f"{type(raised).__name__}: {str(raised)[:300]}"
    return Verdict(
        operator=operator.name,
        backend=backend,
        case=case,
        error=error,
        tolerance=operator.tolerance[case.dtype],
        failure=failure,
    )
