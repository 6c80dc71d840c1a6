"""Rounding against float64: measured for every operator, and what rounds worse than the dense path is named."""

import dataclasses

import pytest
import torch

from wide.profiling import accuracy
from wide.profiling.accuracy import Sizes, describe_accuracy, measure_accuracy

CPU = torch.device("cpu")
SMALL = Sizes(rows=33, hidden=96, ffn=128, group_size=32, tokens=40, batch=3, heads=4, kv_heads=2, head_dim=16)
NAMES = ("gemm_mn", "gemm_k", "prefill", "decode", "gemv")


def test_every_product_and_attention_is_compared_with_float64():
    found = measure_accuracy(("reorder", *NAMES), device=CPU, backends=("torch",), sizes=SMALL)
    operators = [
        "gemm_mn",
        "gemm_k",
        "gemm_k, one sort",
        "gemm_k_rows",
        "attention_prefill",
        "attention_decode",
        "gemv_mn",
        "gemv_k",
    ]
    assert [entry["operator"] for entry in found] == operators
    # References round once, where dense paths do at least as often.
    assert all(entry["within"] and 0 < entry["error"] < 1e-2 and 0 < entry["dense_error"] < 2e-2 for entry in found)


@pytest.mark.parametrize("name", NAMES)
def test_in_float64_nothing_is_left_of_the_errors(name):
    for entry in measure_accuracy((name,), device=CPU, dtype=torch.float32, backends=("torch",), sizes=SMALL):
        assert max(entry["error"], entry["dense_error"]) < 1e-5


def test_what_rounds_worse_is_red(monkeypatch):
    exact, executes = torch.ones(4, dtype=torch.float64), torch.tensor([True, True, True, False])
    spoiled = torch.tensor([1.0, 1.0, 1.01, float("nan")])
    problem = accuracy._Problem(exact=exact, dense=exact * 1.001, run=lambda backend: spoiled, executes=executes)
    monkeypatch.setitem(accuracy._PROBLEMS, "gemm_mn", {"gemm_mn": lambda *_: problem})
    (entry,) = measure_accuracy(("gemm_mn",), device=CPU, backends=("torch",))
    assert entry["ratio"] == pytest.approx(0.01 / 0.001 / 3**0.5, rel=1e-3)
    assert not entry["within"]
    assert "RED" in describe_accuracy(entry)


def test_hopper_kernels_are_left_out_where_there_is_none():
    assert measure_accuracy(("gemm_k", "gemv"), device=CPU, backends=("gluon", "cuda"), sizes=SMALL) == []


def test_the_kernel_in_cuda_is_measured_where_it_can_be_compiled(monkeypatch):
    problem = accuracy._Problem(exact=torch.ones(2).double(), dense=torch.ones(2), run=lambda backend: torch.ones(2))
    monkeypatch.setitem(accuracy._PROBLEMS, "gemm_mn", {"gemm_mn": lambda *_: problem})
    monkeypatch.setattr(accuracy, "hopper_obstacle", lambda device: None)
    refusing = dataclasses.replace(problem, without=("cuda",))
    monkeypatch.setitem(accuracy._PROBLEMS, "gemm_k", {"gemm_k": lambda *_: refusing})
    for missing, backends in ((None, ["gluon", "cuda", "gluon"]), ("no compiler", ["gluon", "gluon"])):
        monkeypatch.setattr(accuracy, "native_obstacle", lambda missing=missing: missing)
        found = measure_accuracy(("gemm_mn", "gemm_k"), device=CPU, backends=("gluon", "cuda"), sizes=SMALL)
        assert [entry["backend"] for entry in found] == backends
