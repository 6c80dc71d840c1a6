"""Rows of the languages side by side are found where `wide bench` writes them."""

import json
from pathlib import Path

import torch

from benchmarks import bench as command
from benchmarks import operators as bench
from benchmarks.columns import PARTS, fill, lines, main
from wide.inference.choice.tuning import products
from wide.inference.operators.products import LinearWeights

CPU = torch.device("cpu")
COMMITTED = Path(__file__).parents[2] / "docs/measurements/targets/columns.json"


def _record(race, candidate, speedup, **more):
    kind = "race" if race.startswith(("prefill", "decode", "gemv")) else "sweep"
    return {kind: race, "candidate": candidate, "peer": "dense", "speedup": speedup, **more}


def test_rows_hold_the_best_of_each_language_and_level(tmp_path, capsys):
    race = "gate_up G=128 p=0.5 M=4096"
    records = [
        _record(race, "dense", 1.0),
        _record(race, "128x128x64x4x8x1x2", 1.74),
        _record(race, "256xcuda 256x256", 1.91),
        _record(race, "128xcute 0x3", 1.5, choice={"tile": [0, 3]}),
        _record(race, "128xcute 2x3", 1.6, choice={"tile": [2, 3]}),
        _record(race, "128xtilelang ", 1.85),
        {"sweep": race, "candidate": "64xtilelang ", "failure": "out of resource"},
        _record("prefill T=4096 p=0.5", "operator, reorder charged", 1.5),
    ]
    compiled = [{"kernel": f"gemm_mn_cute {{'LEVEL': {i}}}", "seconds": 10.0 + i} for i in range(3)]
    compiled += [{"kernel": "make_gemm_k {}", "failure": "ValueError: 1"}]
    content = {"device": "GPU", "records": records, "compiled": compiled}
    (tmp_path / "operators.json").write_text(json.dumps(content))
    out = tmp_path / "out.json"
    assert main(["--records", str(tmp_path), "--out", str(out), "--commit", "abcdef0", "--date", "2026-01-02"]) == 0
    rows = {row["what"]: row for row in json.loads(out.read_text())}
    row = rows["gate + up + SwiGLU, 4096 rows, 50% skipped"]
    levels = {"level 0": 1.5, "level 2": 1.6}
    assert row["languages"] == {"triton": 1.74, "cuda": 1.91, "tilelang": 1.85, "cute": 1.6, **levels}
    assert (row["value"], row["reached"], row["device"]) == (1.85, "floor", "GPU")
    # The languages that there were before are no new ones.
    assert rows["prefill attention, 4096 tokens, 50% skipped"]["languages"] == {"triton": 1.5}
    assert rows["prefill attention, 4096 tokens, 50% skipped"]["reached"] == "not measured"
    assert "1.85" in capsys.readouterr().out
    code = {(row["operator"], row["language"]): row for row in json.loads((tmp_path / "code.json").read_text())}
    assert code["gemm_mn", "cute"]["compile_s"] == 11.0
    assert code["gemm_k", "tilelang"]["compile_s"] is None
    assert code["native", "cute"]["lines"] > 100
    # What is not measured again stays, and so does a row whose race lacks a language now.
    fewer = {"device": "GPU", "records": records[:3]}
    assert fill([fewer], list(rows.values()), commit="1234567", date="2026-01-03") == list(rows.values())
    assert fill([], list(rows.values()), commit="1234567", date="2026-01-03") == list(rows.values())


def test_masks_of_a_trained_model_have_a_race_for_each_layer():
    speeds = {0: (1.0, 1.1), 1: (2.0, 1.8), 2: (1.5, 1.5)}
    records = []
    for layer, (cuda, cute) in speeds.items():
        race = f"down trained, layer {layer}"
        records += [_record(race, "s=96 128xcuda 128x256", cuda), _record(race, "s=96 128xcute 1x0", cute)]
    rows = fill([{"device": "GPU", "records": records}], commit="abcdef0", date="2026-01-02")
    row = next(each for each in rows if "trained" in each["what"])
    assert (row["value"], row["reached"], row["device"]) == (1.0, "floor", "GPU")
    assert (row["languages"]["cuda"], row["languages"]["cute"]) == (1.5, 1.5)


def test_races_have_the_names_by_which_rows_are_found(monkeypatch):
    def draw(name, sizes, rows, active, **_):
        mask = torch.ones(rows, sizes.grouped(name)[1], dtype=torch.bool)
        x = torch.zeros(rows, 1)
        return products.Product(
            name=name,
            sizes=sizes,
            active=active,
            mask=mask,
            weights=[LinearWeights(torch.zeros(2, 1, 1))],
            x=x,
            zeros=x,
            holes=x,
        )

    monkeypatch.setattr(products.Product, "draw", draw)
    monkeypatch.setattr(products, "left_to_tiles", lambda mask: 1.0)
    monkeypatch.setattr(bench, "prompt_race", lambda sizes, length, active, *_, **__: f"prefill T={length} p={active}")
    found = set()
    for words, _ in PARTS.values():
        options = command.build(command.BenchOptions, command.arguments().parse(words.split()[2:]))
        shape = options.given("rows", "sparsity")
        request = bench.BenchRequest(names=options.names, quick=options.quick, **shape)
        for name in ("gemm_mn", "gemm_k", "gemv"):
            found |= {race.name for race in bench.races(name, request, CPU)}
        found |= set(bench._prompt_races(request, CPU))
    wanted = {line.race for line in lines() if not line.race.startswith(("decode", "down trained"))}
    assert wanted <= found


def test_parts_end_in_a_quarter_of_an_hour_and_the_committed_rows_are_the_targets():
    assert sum(seconds for _, seconds in PARTS.values()) <= 900
    rows = json.loads(COMMITTED.read_text())
    assert [(r["what"], r["floor"], r["goal"]) for r in rows] == [
        (each.what, each.floor, each.goal) for each in lines()
    ]
