"""Races of Hugging Face models as they are, captured in CUDA graphs, so that none waits for the host."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from wide.inference.tuning.timing import time_interleaved
from wide.profiling.endtoend_races import peak_memory, times_record
from wide.profiling.energy import EnergyCounter, joules
from wide.profiling.hugging_face import prefill_call, step_call

_SPARE_PLACES = 64
Call = Callable[[], Tensor]


def captured_call(model: Any, what: str, ids: Tensor, length: int) -> Call:
    """Return a call of a model that a graph can capture.

    Args:
        model: A causal LM in evaluation mode.
        what: 'prefill' or 'decode'.
        ids: Tokens of each sequence, [B, T] for a prefill and [B, 1] for a step.
        length: Tokens of a prompt, or cached before the step.
    """
    if what == "prefill":
        return prefill_call(model, ids, None)
    return step_call(model, ids, length=length, room=length + _SPARE_PLACES, mode=None)


def captured_race(
    calls: Mapping[str, Call], what: str, length: int, batch: int, *, quick: bool, energy: EnergyCounter | None
) -> list[dict[str, Any]]:
    """Return one record of each call; speed-ups are over the one named 'dense'.

    Args:
        calls: By name of the candidate.
        what: 'prefill' or 'decode'.
        length: Tokens of a prompt, or cached before the step.
        batch: Sequences.
        quick: Fewer samples.
        energy: The counter that joules are measured with; None leaves them out.
    """
    times = time_interleaved(calls, rounds=6 if quick else 20)
    records = []
    for name, call in calls.items():
        record: dict[str, Any] = {"what": what, "metric": "TTFT" if what == "prefill" else "TPOT", "tokens": length}
        record |= {"batch": batch, "candidate": name, "runtime": "transformers in a CUDA graph"}
        record |= times_record(times[name]) | {"speedup": times["dense"].median_us / times[name].median_us}
        record |= peak_memory(call)
        if energy is not None:
            record["energy_j"] = joules(call, energy)
        records.append(record)
    return records
