"""Naive, grouped and fused products compute the same; the accounting is the paper's."""

import json

import pytest
import torch

from benchmarks.cases.contract import relative_error
from benchmarks.naive import main, measure
from benchmarks.naive_products import AXES, executed, implementations, make_problem, wanted, work
from wide.errors import ShapeError, UnsupportedBackendError

CPU = torch.device("cpu")
HAS_GROUPED = hasattr(torch, "_grouped_mm")


def problem(axis, size=48, group_size=16, active=0.5):
    return make_problem(axis, size, group_size=group_size, active=active, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("active", [0.5, 0.01, 1.0])
def test_all_implementations_agree(axis, active):
    case = problem(axis, active=active)
    reference = wanted(case)
    for name, call in implementations(case, backend="torch").items():
        if name == "grouped product" and not HAS_GROUPED:
            continue
        assert relative_error(executed(case, name, call()), reference) < 1e-5, name


def test_every_row_executes_equally_many_groups():
    case = problem("K", size=64, active=0.5)
    assert case.mask.sum(1).eq(2).all()
    assert case.active == 0.5
    rows = problem("M", size=64, active=0.25)
    assert rows.mask.shape == (64, 1)
    assert rows.active == 0.25


@pytest.mark.parametrize("axis", AXES)
def test_what_is_skipped_is_not_read(axis):
    case = problem(axis)
    if axis == "N":
        # All rows skip the first group, whose weights nobody may read then.
        case.mask[:] = torch.tensor([False, True, True])
        case.indices[:] = torch.tensor([1, 2])
    reference = wanted(case)
    if axis == "N":
        case.b[:16] = torch.nan
    else:
        channels = case.mask if axis == "M" else case.mask.repeat_interleave(case.group_size, 1)
        case.a[~channels.expand_as(case.a)] = torch.nan
    for name in ("gather-scatter", "fused"):
        result = executed(case, name, implementations(case, backend="torch")[name]())
        assert relative_error(result, reference) < 1e-5, name


def test_the_accounting_is_that_of_the_appendix():
    size, p, group = 64, 0.5, 16
    square, cube = size**2, size**3
    assert work("N", "dense", size, group, p).traffic == 3 * square
    assert work("M", "gather-scatter", size, size, p).traffic == 6 * p * square + 2 * square
    assert work("M", "gather-scatter", size, size, p).storage == 2 * p * square
    assert work("N", "gather-scatter", size, group, p).traffic == 2 * square + 3 * p * cube + 3 * p * square
    assert work("K", "gather-scatter", size, group, p).traffic == square + 3 * p * cube + 3 * p * square
    for axis in ("N", "K"):
        assert work(axis, "gather-scatter", size, group, p).storage == p * cube + p * square
    assert work("K", "fused", size, group, p).storage == 0


def test_gathered_intermediates_are_as_large_as_accounted():
    case = problem("N", size=64)
    gathered = case.b[(case.indices.unsqueeze(-1) * 16 + torch.arange(16)).flatten(1)]
    counted = work("N", "gather-scatter", 64, 16, 0.5).storage
    assert gathered.numel() + gathered.shape[0] * gathered.shape[1] == counted


def test_a_wrong_implementation_is_red_and_not_timed(monkeypatch, tmp_path):
    def broken(case, backend):
        return {name: lambda call=call: call() + 1 for name, call in implementations(case, backend=backend).items()}

    monkeypatch.setattr("benchmarks.naive.implementations", broken)
    assert main(["--out", str(tmp_path), "--sizes", "32", "--group-size", "16", "--device", "cpu"]) == 1
    records = json.loads((tmp_path / "naive.json").read_text())["records"]
    assert all(record["error"] > 0.1 and "median_us" not in record for record in records)


def test_an_implementation_that_fails_is_recorded(monkeypatch):
    monkeypatch.delattr(torch, "_grouped_mm", raising=False)
    records = {record["candidate"]: record for record in measure(problem("K"), backend="torch", rounds=1)}
    assert "no grouped product" in records["grouped product"]["failure"]
    assert UnsupportedBackendError.__name__ in records["grouped product"]["failure"]
    assert records["fused"]["error"] < 1e-5


def test_the_bench_writes_records_on_a_cpu(tmp_path):
    assert main(["--out", str(tmp_path), "--sizes", "32,48", "--group-size", "16", "--device", "cpu"]) == 0
    content = json.loads((tmp_path / "naive.json").read_text())
    assert content["device"] == "cpu"
    assert {(record["axis"], record["size"]) for record in content["records"]} == {
        (axis, size) for axis in AXES for size in (32, 48)
    }
    assert all(record["accounted_traffic_bytes"] > 0 for record in content["records"])


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="48"):
        problem("N", group_size=20)
    with pytest.raises(ShapeError, match="'X'"):
        problem("X")


def test_only_the_named_candidates_run_beside_dense(tmp_path, capsys):
    flags = ["--device", "cpu", "--sizes", "256", "--out", str(tmp_path)]
    assert main([*flags, "--candidates", "dense,fused"]) == 0
    records = json.loads((tmp_path / "naive.json").read_text())["records"]
    assert {record["candidate"] for record in records} == {"dense", "fused"}
    assert {record.get("backend") for record in records if record["candidate"] == "fused"} == {"torch"}
    with pytest.raises(SystemExit):
        main([*flags, "--candidates", "fused"])
    assert "wants dense and any of" in capsys.readouterr().err
