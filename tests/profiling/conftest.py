"""Races on the host: references stand in for the kernels, a fake clock counts."""

import dataclasses

import pytest
from torch.nn.attention import SDPBackend

from benchmarks import decode, races
from benchmarks import operators as bench
from wide.inference.choice.tuning import attention, products, race
from wide.inference.choice.tuning.timing import Timing
from wide.inference.operators import products as executors
from wide.kernels.dispatch import Backends

KERNELS = {"gemm_mn", "gemm_k", "gemv_mn", "gemv_k", "attention_decode", "attention_prefill"}
KERNELS |= {"reorder", "reorder_patterns", "reorder_sequences", "sort_sequences"}


def reference_of(operator):
    """Return an operator that runs its reference where the GPU's kernels are asked for."""

    def run(*given, backend, tile=None, **options):
        return operator(*given, backend="torch" if backend == "triton" else backend, **options)

    return run


@pytest.fixture
def triton_everywhere(monkeypatch):
    """Have the host count as a device of Triton's."""
    missing = Backends.missing

    def of_others(self, name, device, dtype):
        return None if name == "triton" else missing(self, name, device, dtype)

    monkeypatch.setattr(Backends, "missing", of_others)


def clock(dense_us=30.0, sparse_us=10.0):
    """Return a clock by which every dense candidate takes one time, and every other one another."""

    def time(calls, **_):
        for call in calls.values():
            (call if callable(call) else call[0])()
        return {
            name: Timing(
                median_us=dense_us if name.startswith("dense") else sparse_us, low_us=1.0, high_us=99.0, num_samples=1
            )
            for name in calls
        }

    return time


@pytest.fixture
def host(monkeypatch, triton_everywhere):
    """Everything that names the GPU's kernels points at the host; layers are small."""
    for module in (executors, products, attention, bench, decode, races):
        for name in KERNELS & vars(module).keys():
            monkeypatch.setattr(module, name, reference_of(getattr(module, name)))
        if hasattr(module, "COLD_BYTES"):
            monkeypatch.setattr(module, "COLD_BYTES", 1)
    libraries = {"cudnn": SDPBackend.MATH, "flash": SDPBackend.MATH}
    monkeypatch.setattr(attention, "LIBRARIES", libraries)
    monkeypatch.setattr(race, "time_interleaved", clock())
    small = {"hidden_size": 64, "query_width": 64, "head_dim": 16, "num_kv_heads": 2, "attention_groups": 2}
    monkeypatch.setattr(bench, "SIZES", dataclasses.replace(bench.SIZES, **small, ffn_width=512, ffn_groups=4))
    monkeypatch.setattr(decode, "QUERY_HEADS", 8)
    monkeypatch.setattr(decode, "KV_HEADS", 2)
    monkeypatch.setattr(decode, "HEAD_DIM", 16)
    monkeypatch.setattr(decode, "GROUP_HEADS", (1, 2, 4, 8))
    monkeypatch.setattr(decode, "_LONG", ((3, 20),))
    monkeypatch.setattr(decode, "_MORE", ())
    monkeypatch.setattr(bench, "_MIDDLE", 32)
    return monkeypatch
