"""What benches time: named backends beside the dense peers, rates of memory, and gates over every backend."""

import dataclasses

import pytest
import torch

from wide.errors import ConfigError
from wide.kernels.contract import Backend, Case
from wide.kernels.gemm_k import GEMM_K
from wide.kernels.gemm_mn import GEMM_MN
from wide.kernels.reorder import REORDER
from wide.profiling import operators
from wide.profiling.agreement import verdicts
from wide.profiling.backends import only_backends, parse_backends
from wide.profiling.hopper_cases import with_hopper_cases
from wide.profiling.sweeps import Sweep
from wide.profiling.timing import Timing

CANDIDATES = {
    "dense on zeros": 0,
    "dense operator": 1,
    "operator, reorder charged": 2,
    "hopper, reorder charged": 3,
    "tile hopper 128-2-0": 4,
    "s=7 128xgluon 2x256x4x0x1": 5,
    "256xcuda 256x256": 8,
    "128x128x64x4x8x1x2 zeroed": 6,
    "112 groups": 7,
}


def test_dense_peers_stay_whatever_is_timed():
    assert list(only_backends(CANDIDATES, ("gluon",)).values()) == [0, 1, 3, 4, 5]
    assert list(only_backends(CANDIDATES, ("triton",)).values()) == [0, 1, 2, 6, 7]
    assert only_backends(CANDIDATES, ("cuda",)) == {"dense on zeros": 0, "dense operator": 1, "256xcuda 256x256": 8}
    assert only_backends(CANDIDATES, ("triton", "gluon", "cuda")) == CANDIDATES


def test_unknown_backends_and_operators_without_one_are_refused():
    assert parse_backends("gluon, triton", ["decode"]) == ("gluon", "triton")
    assert parse_backends("gluon", ["gemm_k", "prefill"]) == ("gluon",)
    assert parse_backends("cuda,gluon", ["gemm_k", "gemm_mn"]) == ("cuda", "gluon")
    with pytest.raises(ConfigError, match=r"triton, gluon and cuda.*got \['torch'\]"):
        parse_backends("torch,triton", ["gemm_k"])
    with pytest.raises(ConfigError, match="decode, gemv have no gluon backend; add triton"):
        parse_backends("gluon", ["gemv", "gemm_k", "decode"])
    with pytest.raises(ConfigError, match=r"prefill have no cuda backend; add triton, or time gemm_mn, gemm_k$"):
        parse_backends("cuda", ["prefill", "gemm_mn", "gemm_k"])
    with pytest.raises(ConfigError, match=r"gemv have no cuda or gluon backend.* time gemm_mn, gemm_k, prefill$"):
        parse_backends("cuda,gluon", ["gemv", "gemm_k"])


def test_cases_of_the_hopper_kernels_fit_them_and_the_reference_takes_them():
    for operator in (GEMM_MN, GEMM_K):
        cases = with_hopper_cases(operator).cases[len(operator.cases) :]
        assert {case.active for case in cases} >= {0.0, 0.5, 1.0}
        for case in cases:
            reason = operator.supports("gluon", torch.device("cpu"), case)
            assert "Hopper GPU" in reason
            half = dataclasses.replace(case, dtype=torch.float32)
            arguments = operator.build(half, torch.device("cpu"))
            got = operator.backends["torch"].run(**arguments)
            assert operator.compare(arguments, got, operator.reference(**arguments)) == 0.0
    assert with_hopper_cases(REORDER) == REORDER


def test_cases_of_the_hopper_kernels_are_supported_on_one(monkeypatch):
    for name in ("gemm_mn", "gemm_k"):
        monkeypatch.setattr(f"wide.kernels.{name}.hopper.hopper_obstacle", lambda device: None)
    for operator in (GEMM_MN, GEMM_K):
        for case in with_hopper_cases(operator).cases[len(operator.cases) :]:
            assert operator.supports("gluon", torch.device("cpu"), case) is None


def test_cases_of_the_kernel_whose_programs_share_tiles_reach_all_of_it(monkeypatch):
    monkeypatch.setattr("wide.kernels.gemm_mn.hopper.hopper_obstacle", lambda device: None)
    monkeypatch.setattr("wide.kernels.gemm_mn.hopper.native_obstacle", lambda: None)
    operator, cpu = with_hopper_cases(GEMM_MN), torch.device("cpu")
    cases = [case for case in operator.cases if operator.supports("cuda", cpu, case) is None]
    counts, parts, seen = [], set(), set()
    for case in cases:
        counts += operator.build(case, cpu)["order"].counts.tolist()
        gated = case.options.get("gated", False)
        parts.add((gated, case.sizes["group_size"] // (128 if gated else 256)))
        seen |= {
            case.options.get("activation", "none"),
            *(name for name in ("biased", "packed", "zeroed") if name in case.options),
        }
    left = {count % 256 for count in counts if count > 256}
    assert any(0 < rows <= 64 for rows in left)
    assert any(64 < rows <= 128 for rows in left)
    assert any(rows > 128 for rows in left)
    assert {0, 1} <= set(counts)
    assert parts == {(False, 1), (False, 2), (True, 1), (True, 2)}
    assert seen == {"none", "silu", "gelu_tanh", "relu2", "biased", "packed", "zeroed"}
    assert {case.sizes["block_m"] for case in cases} == {128, 256}


def test_the_general_kernel_is_spared_tiles_that_two_programs_share(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    operator = with_hopper_cases(GEMM_MN)
    for case in operator.cases:
        reason = operator.supports("triton", torch.device("cpu"), dataclasses.replace(case, dtype=torch.float16))
        assert (reason is None) == (case.sizes["block_m"] <= 128)


def test_a_backend_that_fails_where_it_said_it_runs_is_red():
    def fail(**_):
        raise RuntimeError("out of resource")

    broken = dataclasses.replace(
        REORDER, backends={**REORDER.backends, "triton": Backend(run=fail, supports=lambda device, case: None)}
    )
    found = list(verdicts([broken], torch.device("cpu"), backends=("triton", "torch"), dtypes=()))
    assert len(found) == 2 * len(REORDER.cases)
    assert [verdict.agrees for verdict in found[:2]] == [False, True]
    assert found[0].failure == "RuntimeError: out of resource"


def test_records_of_products_hold_rates_of_memory_too(monkeypatch):
    timing = Timing(median_us=10.0, low_us=9.0, high_us=11.0, num_samples=3)
    monkeypatch.setattr(operators, "time_interleaved", lambda calls, rounds: dict.fromkeys(calls, timing))
    case = Case(sizes={"num_rows": 8, "num_groups": 2, "group_size": 4, "depth": 16}, dtype=torch.bfloat16, active=0.5)
    sweep = Sweep(
        name="q", peer="dense", candidates={"dense": lambda: torch.ones(1)}, flop=1e6, error=None, operator="gemm_mn",
        case=case,
    )  # fmt: skip
    (record,) = operators.run(sweep, rounds=1)
    # x and the weights once, and what executes of the output, in bytes of two.
    moved = 2 * (8 * 16 + 8 * 16 + 8 * 8 / 2)
    assert record["active_gbytes_per_s"] == pytest.approx(moved / 10.0 / 1e3)
    (record,) = operators.run(dataclasses.replace(sweep, case=None), rounds=1)
    assert "active_gbytes_per_s" not in record
