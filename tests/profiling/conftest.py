"""The operators' benches on the host: references stand in for the kernels, a fake clock counts."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from wide.profiling import attention, coarse, decode_groups, gemv_races, operators, races, sweeps
from wide.profiling.timing import Timing

SMALL = {"HIDDEN": 64, "FFN": 128, "ATTENTION_GROUP": 32}
HEADS = {"QUERY_HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16}
KERNELS = {"gemm_mn", "gemm_k", "gemv_mn", "gemv_k", "attention_decode", "attention_prefill"}
KERNELS |= {"reorder", "reorder_patterns", "reorder_sequences"}


def reference_of(operator):
    """Return an operator that runs its reference where the GPU's kernels are asked for."""

    def run(*given, backend, tile=None, **options):
        return operator(*given, backend="torch" if backend == "triton" else backend, **options)

    return run


def fake_clock(calls, **_):
    for call in calls.values():
        (call if callable(call) else call[0])()
    return {
        name: Timing(median_us=10.0 + place, low_us=9.0, high_us=99.0, num_samples=1)
        for place, name in enumerate(calls)
    }


class HostGenerator(torch.Generator):
    """A generator of the host, whatever is asked for."""

    def __new__(cls, device=None):
        return super().__new__(cls)


def on_the_host(*shape, scale=1.0):
    return torch.randn(*shape) * scale


@pytest.fixture
def host(monkeypatch):
    """Everything that names the GPU or its kernels points at the host."""
    for module in (sweeps, races, gemv_races, coarse, decode_groups):
        for name, value in (SMALL | HEADS).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
        if hasattr(module, "normal"):
            monkeypatch.setattr(module, "normal", on_the_host)
    for module in (operators, attention):
        monkeypatch.setattr(module, "time_interleaved", fake_clock)
    for module in (sweeps, races, gemv_races, decode_groups):
        for name in KERNELS & vars(module).keys():
            monkeypatch.setattr(module, name, reference_of(getattr(module, name)))
    monkeypatch.setattr(races, "_BACKENDS", {"cudnn": SDPBackend.MATH, "flash": SDPBackend.MATH})
    monkeypatch.setattr(races, "COLD_BYTES", 1)
    monkeypatch.setattr(gemv_races, "COLD_BYTES", 1)
    device = torch.device
    monkeypatch.setattr(torch, "Generator", HostGenerator)
    for name in ("rand", "randperm", "full", "ones", "arange"):
        made = getattr(torch, name)

        def here(*given, made=made, **options):
            if options.get("device") == "cuda":
                options["device"] = device("cpu")
            return made(*given, **options)

        monkeypatch.setattr(torch, name, here)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "host")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
