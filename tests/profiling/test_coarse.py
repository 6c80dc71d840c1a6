"""Coarse sweeps and decode over groups on the host: references stand in for the kernels, a fake clock counts."""

import json

import pytest
import torch

from wide.profiling import attention, coarse, decode_groups
from wide.profiling.decode_groups import group_race
from wide.report.profiles import read_profile


def test_shapes_vary_one_coordinate_at_a_time():
    found = list(coarse.shapes((1024, 4096, 16384)))
    assert found[0] == (4096, 128, 0.5)
    assert len(set(found)) == len(found) == 9
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
