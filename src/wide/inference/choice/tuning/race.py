"""One race: candidates that compute the same are compared first, and those that agree are timed against each other."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from wide.inference.choice.tuning.timing import Timing, time_interleaved
from wide.kernels.tuning import Case, Choice

Call = Callable[[], torch.Tensor]
TOLERANCE = 1e-2
"""Relative error above which a candidate is not timed; rounding to bfloat16 alone gives about 0.004."""


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `wanted`; what is no number is infinitely wrong."""
    error = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    return error if error == error else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """Candidates that compute the same thing on executing places.

    Args:
        candidates: For each candidate one call per copy of the data; names that begin with 'dense' are peers.
        wanted: Makes the result that all are compared with; None compares nothing.
        error: Relative error of a result against the wanted one, on executing places.
        trusted: Candidates that are only timed: peers with other inputs or another layout of the result.
        operator: Name under which the fastest choice is kept.
        case: The shape under which it is kept; None keeps nothing.
        choices: What candidates stand for in a tuning table.
    """

    candidates: Mapping[str, Sequence[Call]]
    wanted: Call | None
    error: Callable[[torch.Tensor, torch.Tensor], float] = relative
    trusted: tuple[str, ...] = ()
    tolerance: float = TOLERANCE
    operator: str = ""
    case: Case | None = None
    choices: Mapping[str, Choice] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a candidate: why it failed, or its relative error, and its time if it agreed."""

    failure: str = ""
    error: float = math.inf
    timing: Timing | None = None


def run(race: Race, *, rounds: int, until: float = math.inf) -> dict[str, Outcome]:
    """Compare every candidate, time those that agree, and return what came of each that was tried.

    After `until`, a `time.monotonic`, no further one is tried; peers come first.
    """
    wanted = None if race.wanted is None else race.wanted()
    found: dict[str, Outcome] = {}
    for name, calls in race.candidates.items():
        if time.monotonic() > until and not name.startswith("dense"):
            continue
        # A tile that does not fit the device is a result: it is reported, never hidden.
        try:
            got = calls[0]()
            error = 0.0 if wanted is None or name in race.trusted else race.error(got, wanted)
            found[name] = Outcome(error=error)
        except Exception as raised:
            found[name] = Outcome(failure=f"{type(raised).__name__}: {str(raised)[:300]}")
    agreeing = {name: race.candidates[name] for name, each in found.items() if each.error <= race.tolerance}
    times = time_interleaved(agreeing, rounds=rounds)
    return {name: replace(each, timing=times.get(name)) for name, each in found.items()}


def launched(call: Callable[[], object]) -> dict[str, int]:
    """Return how often a call launches each kernel, by the kernel's name; nothing where there is no GPU."""
    if not torch.cuda.is_available():
        return {}
    from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return dict(Counter(event.name for event in profiler.events() if event.device_type == DeviceType.CUDA))
