"""Energy of a call, from the counter of the driver (NVML)."""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from wide.inference.tuning.timing import graph_of

# The counter moves every 20 to 100 ms.
_SECONDS = 1.5
_MIN_REPLAYS = 3
_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0


class EnergyCounter:
    """The driver's energy counter of the current GPU.

    Args:
        library: NVML as `ctypes` loads it.
        uuid: Of the GPU, 'GPU-...'.

    Raises:
        OSError: If the GPU has no such counter, or NVML does not know it.
    """

    def __init__(self, library: Any, uuid: str) -> None:
        """Open the counter and read it once."""
        self._library, self._handle = library, ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))
        self.millijoules()

    def millijoules(self) -> int:
        """Return what the whole GPU has used since its driver was loaded, millijoules."""
        value = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(value))
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            raise OSError(f"{name} of NVML returned error {code}")


def energy_counter() -> EnergyCounter | None:
    """Return the counter of the current GPU, None where there is no GPU, no NVML or no counter."""
    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        return EnergyCounter(ctypes.CDLL(_LIBRARY), f"GPU-{properties.uuid}")
    except (OSError, AttributeError):
        return None


def joules(call: Callable[[], object], counter: EnergyCounter) -> float:
    """Return the energy of one call in joules, averaged over replays of its CUDA graph for 1.5 s.

    The counter is the whole GPU's: idle power counts, as it does in a deployment, and so does what others run on it.

    Args:
        call: Reads and writes the same memory every time.
        counter: Of the GPU that the call runs on.
    """
    graph = graph_of([call], warm_up=1)
    graph.replay()
    torch.cuda.synchronize()
    count, began = 0, time.perf_counter()
    before = counter.millijoules()
    while count < _MIN_REPLAYS or time.perf_counter() - began < _SECONDS:
        graph.replay()
        # One in flight at a time would idle between replays; a few keep the queue full and the clock honest.
        if count % 8 == 7:
            torch.cuda.synchronize()
        count += 1
    torch.cuda.synchronize()
    return (counter.millijoules() - before) / 1000.0 / count
