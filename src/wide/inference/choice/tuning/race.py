"""One race: candidates that compute the same are compared first, and those that agree are timed against each other."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wide.inference.choice.tuning.timing import time_interleaved
from wide.kernels.tuning import Case, Choice

Call = Callable[[], torch.Tensor]
Record = dict[str, Any]
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
        name: For example 'prefill T=16384 p=0.5'; its first words name the operator to those who read records.
        candidates: For each candidate one call per copy of the data; names that begin with 'dense' are peers.
        wanted: Makes the result that all are compared with; None compares nothing.
        error: Relative error of a result against the wanted one, on executing places.
        trusted: Candidates that are only timed: peers with other inputs or another layout of the result.
        peer: Candidate that speed-ups refer to; empty takes the fastest whose name begins with 'dense'.
        flop: Operations of executing pairs; 0 if a rate means nothing.
        bytes_moved: Bytes of executing data; 0 if a rate means nothing.
        facts: Shape and mask, for the records.
        operator: Name under which the fastest choice is kept.
        case: The shape under which it is kept; None keeps nothing.
        choices: What candidates stand for in a tuning table.
        shipped: The candidate that `wide.optimize` takes at this shape today; empty if that is not known.
        kind: Field of the records that holds the name: 'race', or 'sweep' for products over many rows.
    """

    name: str
    candidates: Mapping[str, Sequence[Call]]
    wanted: Call | None
    error: Callable[[torch.Tensor, torch.Tensor], float] = relative
    trusted: tuple[str, ...] = ()
    tolerance: float = TOLERANCE
    peer: str = ""
    flop: float = 0.0
    bytes_moved: float = 0.0
    facts: Mapping[str, float] = field(default_factory=dict)
    operator: str = ""
    case: Case | None = None
    choices: Mapping[str, Choice] = field(default_factory=dict)
    shipped: str = ""
    kind: str = "race"


def measure(race: Race, *, rounds: int, until: float = math.inf, with_kernels: bool = False) -> list[Record]:
    """Compare every candidate, time those that agree, and return one JSON-ready record each.

    After `until`, a `time.monotonic`, no further one is tried; peers come first. Records may name the kernels of a
    call.
    """
    outcomes = _compare(race, until)
    agreeing = {
        n: race.candidates[n] for n, found in outcomes.items() if found.get("error", math.inf) <= race.tolerance
    }
    times = time_interleaved(agreeing, rounds=rounds)
    peers = {name: timing.median_us for name, timing in times.items() if name.startswith("dense")}
    peer = race.peer or min(peers, key=lambda name: peers[name])
    records = []
    for name, outcome in outcomes.items():
        record: Record = {race.kind: race.name, "candidate": name, "peer": peer, **race.facts}
        if race.shipped:
            record["shipped"] = name == race.shipped
        if race.case is not None and name in race.choices:
            record["choice"] = dataclasses.asdict(race.choices[name])
            about: Record = {"sizes": dict(race.case.sizes), "dtype": str(race.case.dtype).removeprefix("torch.")}
            about |= {"active": race.case.active, "options": dict(race.case.options)}
            record["case"] = {"operator": race.operator, **about}
        record |= outcome
        if name in times:
            median_us = times[name].median_us
            record |= {"median_us": median_us, "low_us": times[name].low_us, "high_us": times[name].high_us}
            record["speedup"] = times[peer].median_us / median_us
            record["active_tflops"] = race.flop / median_us / 1e6
            if race.bytes_moved:
                record["active_gbytes_per_s"] = race.bytes_moved / median_us / 1e3
            if with_kernels:
                record["kernels"] = launched(race.candidates[name][0])
        records.append(record)
    return records


def _compare(race: Race, until: float) -> dict[str, Record]:
    """Return 'error' or 'failure' of each candidate that was tried."""
    wanted = None if race.wanted is None else race.wanted()
    outcomes: dict[str, Record] = {}
    for name, calls in race.candidates.items():
        if time.monotonic() > until and not name.startswith("dense"):
            continue
        # A tile that does not fit the device is a result: it is reported, never hidden.
        try:
            got = calls[0]()
            error = 0.0 if wanted is None or name in race.trusted else race.error(got, wanted)
            outcomes[name] = {"error": error}
        except Exception as raised:
            outcomes[name] = {"failure": f"{type(raised).__name__}: {str(raised)[:300]}"}
    return outcomes


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
    counts: dict[str, int] = {}
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts
