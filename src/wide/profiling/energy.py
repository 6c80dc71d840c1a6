"""Energy of a call, from the counter of the driver (NVML)."""

import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

_SECONDS = 1.5
_MIN_REPLAYS = 3


def can_measure_energy() -> bool:
    """Return whether NVML's Python binding is installed."""
    return find_spec("pynvml") is not None


def joules(call: Callable[[], object]) -> float | None:
    """Return the energy of one call in joules, averaged over replays of its CUDA graph for 1.5 s; None if unknown.

    The counter is the whole GPU's: idle power counts, as it does in a deployment.

    Args:
        call: Reads and writes the same memory every time.
    """
    if not can_measure_energy():
        return None
    pynvml: Any = import_module("pynvml")
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(_uuid())
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    graph = _graph(call)
    graph.replay()
    torch.cuda.synchronize()
    count, began = 0, time.perf_counter()
    before = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    while count < _MIN_REPLAYS or time.perf_counter() - began < _SECONDS:
        graph.replay()
        # One in flight at a time would idle between replays; a few keep the queue full and the clock honest.
        if count % 8 == 7:
            torch.cuda.synchronize()
        count += 1
    torch.cuda.synchronize()
    millijoules = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before
    return float(millijoules) / 1000.0 / count


def _uuid() -> str:
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"GPU-{properties.uuid}"


def _graph(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
