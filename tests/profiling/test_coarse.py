"""Coarse sweeps and decode over groups on the host: references stand in for the kernels, a fake clock counts."""

import json

import pytest
import torch
from torch.nn.attention import SDPBackend

from wide.profiling import attention, coarse, decode_groups, gemv_races, operators, races, sweeps
from wide.profiling.decode_groups import group_race
from wide.profiling.timing import Timing
from wide.report.profiles import read_profile

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
    monkeypatch.setattr(torch, "Generator", lambda device, make=torch.Generator: make())
    for name in ("rand", "randperm", "full", "ones", "arange"):
        made = getattr(torch, name)

        def here(*given, made=made, **options):
            if options.get("device") == "cuda":
                options["device"] = device("cpu")
            return made(*given, **options)

        monkeypatch.setattr(torch, name, here)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "host")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_shapes_vary_one_coordinate_at_a_time():
    found = list(coarse.shapes((1024, 4096, 16384)))
    assert found[0] == (4096, 128, 0.5)
    assert len(set(found)) == len(found) == 8
    assert all(sum(a != b for a, b in zip(shape, found[0], strict=True)) <= 1 for shape in found)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_groups_of_decode_agree_on_what_executes(heads):
    torch.manual_seed(3)
    q, caches = torch.randn(3, 8, 16), [torch.randn(2, 3, 2, 20, 16) for _ in range(2)]
    mask = torch.rand(3, 8 // heads) < 0.5
    race = group_race(q, caches, heads, 0.5, mask, backend="torch")
    wanted = race.wanted()
    for calls in race.candidates.values():
        assert torch.allclose(calls[0]()[race.executes], wanted[race.executes])
    # Only groups smaller than a KV head's share of queries can be read another way.
    assert ("operator, whole KV heads" in race.candidates) == (heads < 4)
    share = mask.repeat_interleave(heads, 1).view(3, 2, 4).any(2).float().mean().item()
    assert race.facts["union"] == pytest.approx(share)
    assert race.facts["group_size"] == heads * 16


def test_the_sweeps_run_and_are_drawn(host, monkeypatch, tmp_path):
    for name, value in {"_ROWS": 32, "_GROUP": 32, "_OTHER_GROUPS": (16,), "_BATCHES": (1, 3)}.items():
        monkeypatch.setattr(coarse, name, value)
    monkeypatch.setattr(coarse, "_SUPER_BLOCKS", {16: 8, 32: 4})
    assert coarse.main(["--out", str(tmp_path), "--rows", "16,32"]) == 0
    content = json.loads((tmp_path / "attention.json").read_text())
    assert content["agreement"] == "timed shapes"
    points = read_profile(tmp_path).operators()
    assert {point.operator for point in points} == {
        "gate_up",
        "down",
        "q",
        "o",
        "prefill attention",
        "decode attention",
        "gemv gate_up",
        "gemv down",
    }
    assert {point.tokens for point in points if point.operator == "gate_up"} == {16, 32}
    assert {point.active for point in points if point.operator == "decode attention"} == {0.3, 0.5, 0.7}
    assert {point.group_size for point in points if point.operator == "gemv down"} == {16, 32}


def test_the_limit_stops_the_sweeps(host, monkeypatch, tmp_path, capsys):
    for name, value in {"_ROWS": 32, "_GROUP": 32, "_OTHER_GROUPS": ()}.items():
        monkeypatch.setattr(coarse, name, value)
    assert coarse.main(["--out", str(tmp_path), "--rows", "32", "--limit", "-1"]) == 0
    assert "left out" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_decode_groups_run_in_the_attention_bench(host, monkeypatch, tmp_path):
    monkeypatch.setattr(decode_groups, "_SHAPES", ((3, 20),))
    monkeypatch.setattr(decode_groups, "GROUP_HEADS", (1, 2, 4))
    monkeypatch.setattr(decode_groups, "COLD_BYTES", 1)
    given = ["--operators", "decode_groups", "--timed-only", "--quick", "--out", str(tmp_path)]
    assert attention.main(given) == 0
    records = json.loads((tmp_path / "attention.json").read_text())["records"]
    assert {record["group_size"] for record in records} == {16, 32, 64}
    assert not [record for record in records if "failure" in record]
