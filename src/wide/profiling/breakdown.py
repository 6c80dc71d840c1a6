"""Where the time of a forward goes: its kernels, by the part of the layer that launched them."""

import bisect
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_PREFIX = "wide."
_WARM_UP_CALLS, _CALLS = 5, 3
_PARTS = {"norm": "elementwise", "rope": "elementwise", "route": "router"}
LIST_KERNELS = (
    "_transpose_kernel",
    "_place_kernel",
    "_histogram_kernel",
    "_sort_kernel",
    "_tiles_kernel",
    "_one_list_kernel",
    "_unions_kernel",
    "_items_kernel",
    "rows_pack",
    "rows_rank",
    "rows_order",
    "rows_words",
    "rows_items",
)
"""Kernels that list what executes, for whichever operator: the part 'reorder'. All others count with their operator."""
QUERY_KERNELS = ("_gemm_mn_kernel", "_gemv_mn", "_clear_skipped")
"""Kernels of the query projection that have nothing to do with keys and values."""
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def breakdown(call: Callable[[], object]) -> dict[str, float]:
    """Return microseconds on the device by part for one call, which names its parts (`Run.traced`)."""
    # Clocks fall under load: what is compared with replays must be as warm as they were.
    for _ in range(_WARM_UP_CALLS):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_CALLS):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return {name: round(value / _CALLS, 2) for name, value in sum_parts(events).items()}


def sum_parts(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return microseconds of device work by part from the events of a Chrome trace.

    Args:
        events: With annotations 'wide.<part>' on the host, launches, and device work that names its launch.
    """
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(_PREFIX))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(_PREFIX)
    )
    starts = [span[0] for span in spans]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
    }
    sums: dict[str, float] = {}
    for event in events:
        if event.get("cat") not in _DEVICE_WORK:
            continue
        when = launched.get(event["args"].get("correlation"))
        place = -1 if when is None else bisect.bisect_right(starts, when) - 1
        part = spans[place][2] if place >= 0 and when is not None and when <= spans[place][1] else "embedding and head"
        name = _category(part, event["name"])
        sums[name] = sums.get(name, 0.0) + event["dur"]
    return {name: round(sums[name], 2) for name in sorted(sums)}


def _category(part: str, kernel: str) -> str:
    # Kernels of our own are named as their functions, a compiler's suffix aside; names in C++ never begin this way.
    if kernel.startswith(LIST_KERNELS):
        return "reorder"
    if part == "query":
        return "query" if kernel.startswith(QUERY_KERNELS) else "query or key and value"
    return _PARTS.get(part, part)
