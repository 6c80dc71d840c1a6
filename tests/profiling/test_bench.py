"""What `wide bench` races: named backends beside the dense peers, gates over every backend, files that are drawn."""

import dataclasses
import json
import re
from collections.abc import Callable

import pytest
import torch

from benchmarks import agreement, ahead
from benchmarks import operators as bench
from benchmarks.agreement import rounding, verdicts
from benchmarks.cases.contract import Operator
from benchmarks.cases.gemm_k import GEMM_K
from benchmarks.cases.gemm_mn import GEMM_MN
from benchmarks.cases.gemv import GEMV_MN
from benchmarks.cases.reorder import REORDER
from benchmarks.decode import decode_races, group_races
from benchmarks.languages import cute
from benchmarks.operators import COARSE, BenchRequest, coarse_shapes, parse_backends, races, run_bench
from benchmarks.races import BenchRace, measure
from wide.errors import ConfigError
from wide.kernels.dispatch import Backends
from wide.kernels.native import tilelang
from wide.kernels.tuning import Case
from wide.report.reading import read_profile

CPU = torch.device("cpu")
CANDIDATES = {
    "dense on zeros": 0,
    "dense operator": 1,
    "operator, reorder charged": 2,
    "tilelang operator, reorder charged": 3,
    "tile tilelang 128-128-8-2-0": 4,
    "s=7 128xtilelang ": 5,
    "256xcuda 256x256": 8,
    "128x128x64x4x8x1x2 zeroed": 6,
    "112 groups": 7,
}


def test_dense_peers_stay_whatever_is_timed():
    race = BenchRace(name="q", candidates={name: [] for name in CANDIDATES}, wanted=None)

    def kept(*backends):
        return [CANDIDATES[name] for name in bench._of_backends(race, backends).candidates]

    assert kept("tilelang") == [0, 1, 3, 4, 5]
    assert kept("triton") == [0, 1, 2, 6, 7]
    assert kept("cuda") == [0, 1, 8]
    assert sorted(kept("triton", "tilelang", "cuda")) == list(range(9))
    race = dataclasses.replace(race, shipped="tilelang operator, reorder charged")
    assert kept("triton") == [0, 1, 2, 3, 6, 7]


def test_unknown_backends_and_operators_without_one_are_refused():
    assert parse_backends("cuda, triton", ["decode"]) == ("cuda", "triton")
    assert parse_backends("tilelang", ["prefill"]) == ("tilelang",)
    assert parse_backends("cuda,tilelang", ["gemm_k", "prefill"]) == ("cuda", "tilelang")
    with pytest.raises(ConfigError, match=r"cuda, cute, tilelang and triton, .*got \['torch'\]"):
        parse_backends("torch,triton", ["gemm_k"])
    with pytest.raises(ConfigError, match="decode have no cuda backend; add triton"):
        parse_backends("cuda", ["gemv", "gemm_k", "decode"])
    with pytest.raises(ConfigError, match=r"prefill have no cuda backend; add triton, or time gemm_mn, gemm_k, gemv$"):
        parse_backends("cuda", ["prefill", "gemm_mn", "gemm_k"])
    with pytest.raises(ConfigError, match=r"reorder have no cuda or cute backend.* time gemm_mn, gemm_k, .*gemv$"):
        parse_backends("cuda,cute", ["reorder", "gemm_k"])


def test_cases_of_the_hopper_kernels_fit_them_and_the_reference_takes_them():
    for operator in (GEMM_MN, GEMM_K):
        cases = operator.large_cases
        assert {case.active for case in cases} >= {0.0, 0.5, 1.0}
        for case in cases:
            half = dataclasses.replace(case, dtype=torch.float32)
            arguments = operator.build(half, torch.device("cpu"))
            got = operator.run("torch", **arguments)
            assert operator.compare(arguments, got, operator.reference(**arguments)) == 0.0


def test_cases_of_the_kernel_whose_programs_share_tiles_reach_all_of_it(monkeypatch):
    monkeypatch.setattr("wide.kernels.device.hopper_obstacle", lambda device: None)
    monkeypatch.setattr("wide.kernels.device.native_obstacle", lambda: None)
    operator, cpu = GEMM_MN, torch.device("cpu")
    cases = [case for case in operator.large_cases if operator.supports("cuda", cpu, case) is None]
    counts, parts, seen = [], set(), set()
    for case in cases:
        counts += operator.build(case, cpu)["order"].counts.tolist()
        gated = case.options.get("gated", False)
        parts.add((gated, case.sizes["group_size"] // (128 if gated else 256)))
        seen |= {
            case.options.get("activation", "none"),
            *(name for name in ("biased", "zeroed") if name in case.options),
        }
    left = {count % 256 for count in counts if count > 256}
    assert any(0 < rows <= 64 for rows in left)
    assert any(64 < rows <= 128 for rows in left)
    assert any(rows > 128 for rows in left)
    assert {0, 1} <= set(counts)
    assert parts == {(False, 1), (False, 2), (True, 1), (True, 2)}
    assert seen == {"none", "silu", "gelu_tanh", "relu2", "biased", "zeroed"}
    assert {case.sizes["block_m"] for case in cases} == {128, 256}


def test_the_general_kernel_is_spared_tiles_that_two_programs_share(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    operator = GEMM_MN
    for case in operator.cases + operator.large_cases:
        reason = operator.supports("triton", torch.device("cpu"), dataclasses.replace(case, dtype=torch.float16))
        assert (reason is None) == (case.sizes["block_m"] <= 128)


def _with_triton(operator: Operator, run: Callable[..., torch.Tensor]) -> Operator:
    """Return an operator whose Triton kernel is a function that runs anywhere."""
    backends = Backends(operator.name, None, run)
    backends.register("triton")(run)

    def call(backend, **arguments):
        return run(**arguments) if backend == "triton" else operator.run(backend, **arguments)

    return dataclasses.replace(operator, backends=backends, call=call)


def test_a_backend_that_fails_where_it_said_it_runs_is_red():
    def fail(**_):
        raise RuntimeError("out of resource")

    broken = _with_triton(REORDER, fail)
    found = list(verdicts([broken], torch.device("cpu"), backends=("triton", "torch"), dtypes=()))
    assert len(found) == 2 * len(REORDER.cases)
    assert [verdict.agrees for verdict in found[:2]] == [False, True]
    assert found[0].failure == "RuntimeError: out of resource"


SMALL = {
    "gemm_mn": (
        GEMM_MN,
        Case(
            sizes={"num_rows": 33, "num_groups": 4, "group_size": 32, "depth": 96, "block_m": 32},
            dtype=torch.bfloat16,
            options={"gated": True, "activation": "silu"},
        ),
    ),
    "gemv_mn": (
        GEMV_MN,
        Case(
            sizes={"num_rows": 1, "num_groups": 4, "group_size": 32, "width_in": 96},
            dtype=torch.bfloat16,
            options={"is_gated": True, "activation": "silu"},
        ),
    ),
}


def test_rounding_is_compared_with_the_dense_path():
    found = rounding([GEMM_MN, REORDER], CPU, backends=("torch", "cuda"), cases=SMALL)
    # Where a backend does not run there is nothing to measure, and so where an operator has no case.
    assert [(entry["operator"], entry["backend"]) for entry in found] == [("gemm_mn", "torch")]
    assert found[0]["within"]
    assert 0 < found[0]["error"] < 1e-2
    assert found[0]["ratio"] == pytest.approx(found[0]["error"] / found[0]["dense_error"])


def test_what_rounds_worse_is_red_and_named():
    def coarse(**arguments):
        return GEMV_MN.reference(**arguments) * 1.01

    worse = _with_triton(GEMV_MN, coarse)
    (entry,) = rounding([worse], CPU, backends=("triton",), cases={"gemv_mn": (worse, SMALL["gemv_mn"][1])})
    assert not entry["within"]
    assert "RED" in bench._rounding_line(entry)


def test_every_operator_that_computes_has_a_case_of_its_own():
    named = {operator.name for operators in bench.OPERATORS.values() for operator in operators}
    assert {operator.name for operator, _ in agreement.ROUNDED.values()} == {n for n in named if "reorder" not in n}


def test_shapes_vary_one_coordinate_at_a_time():
    found = list(coarse_shapes((16, 32, 64)))
    assert found[0] == (4096, 128, 0.5)
    middle = list(coarse_shapes((1024, 4096, 16384)))
    assert len(set(middle)) == len(middle) == 9
    assert all(sum(a != b for a, b in zip(shape, middle[0], strict=True)) <= 1 for shape in middle)


def test_coarse_races_run_and_are_drawn(host, tmp_path):
    host.setattr(bench, "coarse_shapes", lambda rows: [(32, 128, 0.5), (16, 128, 0.5), (32, 128, 0.3), (32, 64, 0.5)])
    request = BenchRequest(names=(COARSE,), rows=(16, 32))
    assert run_bench(request, tmp_path, device=CPU, say=lambda line: None) == []
    content = json.loads((tmp_path / COARSE / "attention.json").read_text())
    assert content["agreement"] == "timed shapes"
    points = read_profile(tmp_path / COARSE).operators()
    assert {point["operator"] for point in points} == {
        "gate_up",
        "down",
        "q",
        "o",
        "prefill attention",
        "decode attention",
        "gemv gate_up",
        "gemv down",
    }
    assert {point["tokens"] for point in points if point["operator"] == "gate_up"} == {16, 32}
    assert {point["active"] for point in points if point["operator"] == "decode attention"} == {0.3, 0.5}
    assert {point["group_size"] for point in points if point["operator"] == "gemv down"} == {64, 128}
    assert {point["batch"] for point in points if point["operator"] == "decode attention"} == {1, 8, 32}


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", ["gemm_mn", "gemm_k", "gemv", "decode", "decode_groups", "reorder", "prefill"])
def test_every_bench_races_candidates_that_agree(host, quick, name):
    host.setattr(bench, "_LEAST_ROWS", 16)
    host.setattr(
        bench, "_prompt_races", lambda request, device: [bench.prompt_race(bench.SIZES, 24, 0.5, (), device=CPU)]
    )
    request = BenchRequest(names=(name,), rows=(16,), group_size=128, quick=quick)
    for race in races(name, request, CPU):
        for record in measure(race, rounds=1):
            assert record["error"] <= race.tolerance, record


def test_red_and_rounding_are_written_and_what_is_red_is_returned(host, tmp_path):
    def wrong(**arguments):
        raise RuntimeError("out of resource")

    broken = _with_triton(REORDER, wrong)
    host.setitem(bench.OPERATORS, "reorder", (broken,))
    host.setattr(bench, "_LEAST_ROWS", 16)
    said = []
    request = BenchRequest(names=("reorder",), rows=(16,), backends=("triton",), quick=True)
    assert run_bench(request, tmp_path, device=CPU, say=said.append) == ["reorder"]
    content = json.loads((tmp_path / "operators.json").read_text())
    assert content["agreement"] == "all cases"
    assert {entry["backend"] for entry in content["red"]} == {"triton"}
    assert content["records"]
    assert any("RED" in line for line in said)
    assert content["compiled"] == []


def test_what_nvcc_compiles_is_compiled_before_the_first_race(host, tmp_path):
    def asks(operators, device, backends, dtypes):
        if backends == ["cute"]:
            cute.function(tmp_path / "none.cu", CPU, LEVEL=2)()
        return []

    host.setattr(bench, "verdicts", asks)
    host.setattr(bench, "_LEAST_ROWS", 16)
    request = BenchRequest(names=("reorder",), rows=(16,), backends=("triton", "cute"), quick=True)
    run_bench(request, tmp_path, device=CPU, say=lambda line: None)
    (found,) = json.loads((tmp_path / "operators.json").read_text())["compiled"]
    assert found["kernel"] == "none {'LEVEL': 2}"
    assert re.search("FileNotFoundError|UnsupportedBackendError", found["failure"])


def test_kernels_in_tilelang_are_noted_instead_of_compiled(monkeypatch):
    monkeypatch.setattr(tilelang, "_architecture", lambda device: "sm_90a")
    compiles = tilelang.compiled
    with ahead.noting() as notes:
        tilelang.kernel(len, CPU, N=2)()
    assert [(note.name, note.build, note.arguments) for note in notes] == [
        ("len {'N': 2}", compiles, (len, "sm_90a", (("N", 2),)))
    ]
    assert tilelang.compiled is compiles


def test_groups_of_decode_agree_on_what_executes(host):
    found = list(group_races(0.5, quick=True, device=CPU))
    assert [race.facts["group_heads"] for race in found] == [1, 2, 4, 8]
    for race in found:
        assert all(record["error"] <= race.tolerance for record in measure(race, rounds=1))
        # Only groups smaller than a KV head's share of queries can be read another way.
        assert ("operator, whole KV heads" in race.candidates) == (race.facts["group_heads"] < 4)
        assert race.facts["group_size"] == race.facts["group_heads"] * 16
        assert 0.0 < race.facts["union"] <= 1.0
    assert all("union" not in race.facts for race in decode_races(0.5, quick=True, device=CPU))
