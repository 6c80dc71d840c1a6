"""The energy counter reads NVML and says nothing where there is none."""

import ctypes

import pytest
import torch

from wide.profiling.energy import EnergyCounter, energy_counter


class Library:
    """NVML that counts 1500 millijoules at each reading."""

    def __init__(self, code=0):
        self.code, self.read = code, 0

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        assert uuid == b"GPU-1"
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, value):  # noqa: N802
        self.read += 1500
        ctypes.cast(value, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.read
        return self.code


def test_the_counter_is_read():
    counter = EnergyCounter(Library(), "GPU-1")
    assert (counter.millijoules(), counter.millijoules()) == (3000, 4500)


def test_a_gpu_without_a_counter_is_an_error_of_the_counter_and_none_to_callers(monkeypatch):
    with pytest.raises(OSError, match="error 3"):
        EnergyCounter(Library(code=3), "GPU-1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert energy_counter() is None
