"""The table of targets: every row is found where benches write it, and nothing is made up."""

import json
from pathlib import Path

from wide.profiling.targets import fill, main, targets

MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"


def _write(folder, name, records, **more):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"device": "GPU", "records": records, **more}))


def _row(rows, words):
    return next(row for row in rows if words in row["what"])


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


def test_the_committed_rows_are_the_targets_and_say_truly_what_is_reached():
    rows = json.loads((MEASUREMENTS / "targets" / "operators.json").read_text(encoding="utf-8"))
    assert [(r["what"], r["floor"], r["goal"], r["unit"]) for r in rows] == [
        (target.what, target.floor, target.goal, target.unit) for target in targets()
    ]
    for row in rows:
        sign = -1 if row["unit"] == "us" else 1
        steps = [name for name in ("floor", "goal") if sign * row["value"] >= sign * row[name]]
        assert row["reached"] == ["missed", *steps][-1], row["what"]


def test_the_prefill_row_is_what_its_record_says():
    rows = json.loads((MEASUREMENTS / "targets" / "operators.json").read_text(encoding="utf-8"))
    row = _row(rows, "prefill attention")
    target = next(target for target in targets() if target.what == row["what"])
    records = json.loads((MEASUREMENTS / row["record"]).read_text(encoding="utf-8"))["records"]
    assert abs(target.value(records) - row["value"]) < 1e-4
