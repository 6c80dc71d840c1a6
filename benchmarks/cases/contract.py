"""What an operator promises: one description that tests and benches read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wide.kernels.dispatch import AnyShape, Backends, Run, Shape
from wide.kernels.tuning import Case


def _any_shape(case: Case) -> Shape:
    return AnyShape(case.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator with its implementations, its cases and what a right result is.

    Args:
        name: As in messages, records and the tuning table.
        call: Takes the arguments that a case builds, and `backend`; 'torch', plain PyTorch with float32 accumulation,
            is the reference.
        backends: By name.
        cases: Inputs on which every backend must agree with the reference.
        large_cases: Further ones for kernels of one kind of GPU, too large for Triton's interpreter.
        build: Makes the keyword arguments of all backends for a case on a device; skipped places hold NaN.
        compare: Returns the relative error of a result against the reference's on executed places only.
        tolerance: Largest relative error by dtype.
        shape: Returns the shape of a case, as backends look at it.
    """

    name: str
    call: Run
    backends: Backends
    cases: tuple[Case, ...]
    build: Callable[[Case, torch.device], dict[str, Any]]
    compare: Callable[[Mapping[str, Any], Any, Any], float]
    tolerance: Mapping[torch.dtype, float]
    large_cases: tuple[Case, ...] = ()
    shape: Callable[[Case], Shape] = _any_shape

    def run(self, backend: str, **arguments: Any) -> Any:
        """Return what a backend makes of the arguments that a case builds."""
        return self.call(**arguments, backend=backend)

    def reference(self, **arguments: Any) -> Any:
        """Return what all backends are compared with."""
        return self.run("torch", **arguments)

    def supports(self, backend: str, device: torch.device, case: Case) -> str | None:
        """Return None if `backend` can run `case` on `device`, otherwise the reason in words."""
        return self.backends.obstacle(backend, device, self.shape(case))


def make_case(names: Sequence[str], sizes: Sequence[int], **more: Any) -> Case:
    """Return a case; `dtype` (else float16), `active` (else 0.5) and its options follow by name."""
    dtype, active = more.pop("dtype", torch.float16), more.pop("active", 0.5)
    return Case(sizes=dict(zip(names, sizes, strict=True)), dtype=dtype, active=active, options=more)


def named(case: Case, *names: str) -> list[int]:
    """Return some extents of a case."""
    return [case.sizes[name] for name in names]


def compare_all(arguments: Mapping[str, Any], got: Any, wanted: Any) -> float:
    """Return the largest relative error of a tensor, or of several, everywhere."""
    del arguments
    if isinstance(got, torch.Tensor):
        return relative_error(got, wanted)
    return max(relative_error(g, w) for g, w in zip(got, wanted, strict=True))


def compare_exactly(arguments: Mapping[str, Any], got: Any, wanted: Any) -> float:
    """Return 0 if a tensor, or several, are equal everywhere, otherwise infinity."""
    del arguments
    pairs = [(got, wanted)] if isinstance(got, torch.Tensor) else zip(got, wanted, strict=True)
    return 0.0 if all(torch.equal(g, w) for g, w in pairs) else float("inf")


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `wanted`, in float64; NaN or infinity anywhere gives inf."""
    if got.shape != wanted.shape:
        return float("inf")
    difference = (got.double() - wanted.double()).norm()
    error = (difference / wanted.double().norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def random_mask(case: Case, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a random bool mask with share `case.active` of True; the same on every device for the same seed."""
    generator = torch.Generator().manual_seed(case.seed)
    return (torch.rand(shape, generator=generator) < case.active).to(device)


def random_values(case: Case, shape: tuple[int, ...], device: torch.device, *, salt: int) -> torch.Tensor:
    """Return standard normal values of the case's dtype; `salt` tells the tensors of one case apart."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + salt)
    return torch.randn(shape, generator=generator).to(device=device, dtype=case.dtype)
