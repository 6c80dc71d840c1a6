"""The table of targets: every row is found where benches write it, and nothing is made up."""

import gzip
import json
import re
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.targets import fill, main, targets

DOCS = Path(__file__).parents[2] / "docs"
MEASUREMENTS = DOCS / "measurements"
FIELDS = {"what", "value", "floor", "goal", "unit", "reached", "device", "date", "commit", "command"}


def _write(folder, name, records, **more):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"device": "GPU", "records": records, **more}))


def _row(rows, words):
    return next(row for row in rows if words in row["what"])


def _committed(name):
    return json.loads((MEASUREMENTS / "targets" / name).read_text(encoding="utf-8"))


def _measured(row):
    path, _, bench = row["record"].partition(":")
    with gzip.open(DOCS / path, "rt", encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    return next(each["records"] for each in found if (each["run"], each["bench"]) == ("h200", bench))


def _speedups(records, **wanted):
    return [r["speedup"] for r in records if all(r.get(key) == value for key, value in wanted.items())]


def _in_sweep(sweep, candidate):
    return lambda records: max(_speedups(records, sweep=sweep, candidate=candidate))


def _in_race(race, starts):
    return lambda records: max(
        r["speedup"] for r in records if r.get("race") == race and r["candidate"].startswith(starts)
    )


def _forward(what, tokens, candidate="routed 0.5/0.5"):
    return lambda records: max(_speedups(records, what=what, tokens=tokens, batch=1, candidate=candidate))


def _shipped_with_zeros(rows):
    """Return a finder of gate + up with its zeros, over all masks."""

    def find(records):
        shipped = [r for r in records if "(ships)" in r["form"] and r["rows"] == rows]
        times = {(r["seed"], r["candidate"]): r["median_us"] for r in shipped}
        return mean(times[seed, "dense gate_up"] / times[seed, "cuda gate_up"] for seed in {r["seed"] for r in shipped})

    return find


def _least_of_everything(records):
    every = (("prefill", 4096), ("prefill", 16384), ("decode", 2048), ("decode", 16384))
    return min(_forward(what, tokens, "all execute")(records) for what, tokens in every)


# How the record that a row names holds its value.
HOPPER = {
    "GEMM-MN gate+up+SwiGLU, M=4096": _shipped_with_zeros(4096),
    "GEMM-MN gate+up+SwiGLU, M=16384": _shipped_with_zeros(16384),
    "GEMM-MN gate+up+SwiGLU, M=1024": _shipped_with_zeros(1024),
    "GEMM-MN Q, G=512, M=4096": _in_sweep("q G=512 p=0.5 M=4096", "256xcuda 256x256"),
    "GEMM-MN Q, G=512, M=16384": _in_sweep("q G=512 p=0.5 M=16384", "256xcuda 256x256"),
    "GEMM-K down, G=128, M=4096": _in_sweep("down G=128 p=0.5 M=4096", "s=112 128xcuda 128x256"),
    "GEMM-K down, G=128, M=16384": _in_sweep("down G=128 p=0.5 M=16384", "s=112 128xcuda 128x256"),
    "GEMM-K down, G=256, M=16384": _in_sweep("down G=256 p=0.5 M=16384", "s=56 128xcuda 128x256"),
    "GEMM-K O, G=512, M=16384": lambda records: max(_speedups(records, rows=16384, candidate="cuda")),
    "prefill attention causal, T=4096": _in_race("prefill T=4096 p=0.5", "hopper, reorder charged"),
    "prefill attention causal, T=16384": _in_race("prefill T=16384 p=0.5", "hopper, reorder charged"),
    "decode attention, B=32 T=4096": _in_race("decode B=32 T=4096 p=0.5", ("tile", "operator")),
    "end to end prefill, T=4096": _forward("prefill", 4096),
    "end to end prefill, T=16384": _forward("prefill", 16384),
    "end to end decode, prompt 2048": _forward("decode", 2048),
    "end to end decode, prompt 16384": _forward("decode", 16384),
    "0 % sparsity, end to end, least of prefill 4096, 16384 and decode 2048, 16384": _least_of_everything,
}


def test_rows_are_filled_from_records_and_others_stay_empty(tmp_path):
    down = {"sweep": "down G=128 p=0.5 M=16384"}
    _write(
        tmp_path / "a",
        "operators.json",
        [
            {"sweep": "reorder M=16384", "candidate": "112 groups", "median_us": 12.0},
            {**down, "candidate": "dense", "speedup": 1.0},
            {**down, "candidate": "dense on zeros", "speedup": 1.18},
            {**down, "candidate": "s=4 128x1", "speedup": 0.9},
            {**down, "candidate": "s=4 128x1 grouped", "speedup": 1.3},
            {**down, "candidate": "s=4 broken", "failure": "no"},
        ],
    )
    decode = {"what": "decode", "tokens": 2048, "batch": 1}
    _write(
        tmp_path / "b",
        "endtoend.json",
        [
            {**decode, "candidate": "dense", "speedup": 1.0},
            {**decode, "candidate": "routed", "skipped": {"attention": 0.5, "ffn": 0.5}, "speedup": 1.62},
            {**decode, "candidate": "all execute", "skipped": {"attention": 0.0, "ffn": 0.0}, "speedup": 0.93},
        ],
        layers=32,
    )
    rows = fill([tmp_path / "a", tmp_path / "b"], commit="abc", date="2026-01-02")
    assert len(rows) == len(targets())
    assert (_row(rows, "reorder")["value"], _row(rows, "reorder")["reached"]) == (12.0, "floor")
    assert (_row(rows, "down, G=128")["value"], _row(rows, "down, G=128")["reached"]) == (1.18, "floor")
    decode_row = _row(rows, "end-to-end decode")
    assert (decode_row["reached"], decode_row["layers"], decode_row["commit"]) == ("goal", 32, "abc")
    assert _row(rows, "against dense, decode")["reached"] == "missed"
    assert _row(rows, "least of")["value"] is None
    untouched = _row(rows, "O-proj")
    assert (untouched["value"], untouched["device"], untouched["reached"]) == (None, None, "not measured")


def test_kernels_for_hopper_alone_do_not_count_as_triton(tmp_path):
    sweep = {"sweep": "gate_up G=128 p=0.5 M=4096"}
    _write(
        tmp_path / "a",
        "operators.json",
        [
            {**sweep, "candidate": "dense", "speedup": 1.0},
            {**sweep, "candidate": "128x128x64x4x8x1x2", "speedup": 1.5},
            {**sweep, "candidate": "128xgluon 2x256x4x1", "speedup": 1.77},
            {**sweep, "candidate": "256xcuda 256x256", "speedup": 1.94},
        ],
    )
    assert _row(fill([tmp_path / "a"], commit="abc", date="2026-01-02"), "(Triton)")["value"] == 1.5


def test_the_file_has_the_required_fields(tmp_path, capsys):
    _write(tmp_path / "a", "operators.json", [])
    out = tmp_path / "targets" / "operators.json"
    assert main(["--records", str(tmp_path / "a"), "--out", str(out), "--commit", "x"]) == 0
    wanted = {"what", "value", "floor", "goal", "unit", "device", "date", "commit", "command"}
    assert all(wanted <= row.keys() for row in json.loads(out.read_text()))
    assert "not measured" in capsys.readouterr().out


def test_the_committed_rows_are_the_targets():
    rows = _committed("operators.json")
    assert [(r["what"], r["floor"], r["goal"], r["unit"]) for r in rows] == [
        (target.what, target.floor, target.goal, target.unit) for target in targets()
    ]
    assert [row["what"] for row in _committed("hopper.json")] == list(HOPPER)


@pytest.mark.parametrize("name", ["operators.json", "hopper.json"])
def test_committed_rows_say_truly_what_is_reached_and_how_to_repeat_it(name):
    for row in _committed(name):
        assert row.keys() >= FIELDS, row["what"]
        sign = -1 if row["unit"] == "us" else 1
        steps = [step for step in ("floor", "goal") if sign * row["value"] >= sign * row[step]]
        assert row["reached"] == ["missed", *steps][-1], row["what"]
        assert re.fullmatch(r"[0-9a-f]{7}", row["commit"]), row["what"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]), row["what"]
        assert row["command"].startswith(("python ", "wide ")), row["what"]


def test_committed_values_are_those_of_the_records_that_they_name():
    finders = HOPPER | {target.what: target.value for target in targets()}
    for row in _committed("operators.json") + _committed("hopper.json"):
        # Half of the third decimal: one row is the mean of ratios that its record keeps to three.
        assert finders[row["what"]](_measured(row)) == pytest.approx(row["value"], abs=5e-4), row["what"]


def test_what_missed_its_floor_says_by_how_much_its_best_experiment_does():
    missed = [row for row in _committed("hopper.json") if row["reached"] == "missed"]
    assert missed
    assert all("experiment" in row["note"] and "floor" in row["note"] for row in missed)
