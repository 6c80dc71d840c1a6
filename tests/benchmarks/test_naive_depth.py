"""The ways to skip whole tokens compute the same stage by stage; stages are timed with what the one before returned."""

import json

import pytest
import torch

from benchmarks import naive_depth
from benchmarks.cases.contract import relative_error
from benchmarks.naive_depth import accounted, depth_problem, main, measure, run_stages, ways
from benchmarks.naive_products import executed, wanted
from wide.errors import ShapeError
from wide.inference.choice.tuning.timing import Timing

CPU = torch.device("cpu")
HAS_GROUPED = hasattr(torch, "_grouped_mm")


def problem(rows=40, active=0.5):
    return depth_problem(rows, 32, 48, active=active, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("active", [0.5, 0.03, 1.0])
def test_all_ways_agree(active):
    case = problem(active=active)
    for name, stages in ways(case, backend="torch").items():
        if name == "grouped product" and not HAS_GROUPED:
            continue
        result = executed(case, name, run_stages(stages))
        assert relative_error(result, wanted(case)) < 1e-5, name


def test_skipped_rows_are_not_read():
    case = problem()
    reference = wanted(case)
    case.a[~case.mask[:, 0]] = torch.nan
    for name in ("gather-scatter", "fused"):
        result = executed(case, name, run_stages(ways(case, backend="torch")[name]))
        assert relative_error(result, reference) < 1e-5, name


def test_the_stages_add_up_to_the_traffic_of_the_paper():
    m, k, n, p = 40, 32, 48, 0.25
    stages = ("indices", "gather", "GEMM", "scatter")
    assert (
        sum(accounted("gather-scatter", stage, m, k, n, p) for stage in stages) == 3 * p * m * (n + k) + n * k + m * n
    )
    assert accounted("dense", "GEMM", m, k, n, p) == m * k + n * k + m * n


def test_every_stage_is_timed_with_its_own_input_and_waiting_is_charged(monkeypatch):
    case = problem()
    raced = []

    def race(calls, rounds):
        raced.append({name: call() for name, call in calls.items()})
        return {
            name: Timing(median_us=10.0 + place, low_us=9.0, high_us=11.0, num_samples=rounds)
            for place, name in enumerate(calls)
        }

    monkeypatch.setattr("benchmarks.naive_depth.time_interleaved", race)
    monkeypatch.setattr(naive_depth, "_host_us", lambda call, rounds: 100.0 if call() is not None else 0.0)
    chosen = {name: ways(case, backend="torch")[name] for name in ("dense", "gather-scatter", "fused")}
    records = {name: {} for name in chosen}
    naive_depth._time(chosen, records, 3)
    assert [list(calls) for calls in raced] == [
        ["whole", "GEMM"],
        ["dense", "whole", "gather", "GEMM", "scatter"],
        ["dense", "whole", "sort", "GEMM"],
    ]
    assert torch.equal(raced[1]["whole"], raced[1]["scatter"])
    assert relative_error(raced[1]["scatter"], wanted(case)) < 1e-5
    assert records["dense"]["speedup"] == 1.0
    assert records["gather-scatter"]["median_us"] == 111.0
    assert records["gather-scatter"]["speedup"] == pytest.approx(10 / 111)
    assert records["gather-scatter"]["parts_us"] == {"indices": 100.0, "gather": 12.0, "GEMM": 13.0, "scatter": 14.0}
    assert records["fused"]["parts_us"] == {"sort": 12.0, "GEMM": 13.0}


def test_what_cannot_be_captured_is_recorded(monkeypatch):
    def refuse(calls, rounds):
        raise RuntimeError("not permitted while capturing")

    monkeypatch.setattr("benchmarks.naive_depth.time_interleaved", refuse)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    records = {"dense": {}}
    naive_depth._time({"dense": ways(problem(), backend="torch")["dense"]}, records, 3)
    assert records["dense"] == {"failure": "RuntimeError: not permitted while capturing"}


def test_a_way_that_fails_is_recorded(monkeypatch):
    monkeypatch.delattr(torch, "_grouped_mm", raising=False)
    records = {record["candidate"]: record for record in measure(problem(), backend="torch", rounds=1)}
    assert "no grouped product" in records["grouped product"]["failure"]
    assert records["fused"]["error"] < 1e-5


def test_the_bench_writes_records_on_a_cpu(tmp_path, monkeypatch):
    given = ["--out", str(tmp_path), "--rows", "16,40", "--products", "32x48,48x32", "--device", "cpu"]
    assert main(given) == 0
    content = json.loads((tmp_path / "depth.json").read_text())
    assert content["device"] == "cpu"
    sizes = {(record["rows"], record["width_in"], record["width_out"]) for record in content["records"]}
    assert sizes == {(rows, *widths) for rows in (16, 40) for widths in ((32, 48), (48, 32))}
    assert all("median_us" not in record for record in content["records"])
    monkeypatch.setattr(naive_depth, "wanted", lambda case: wanted(case) + 1)
    assert main(given) == 1


def test_a_problem_in_which_nothing_executes_is_refused():
    with pytest.raises(ShapeError, match="of 40 rows are none"):
        problem(active=0.001)
