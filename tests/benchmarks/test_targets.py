"""The table of targets: every row is found where benches write it, and nothing is made up."""

import gzip
import itertools
import json
import re
import sys
from functools import cache
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import bench, columns
from benchmarks.targets import PARTS, fill, main, measure, reached, targets
from wide.cli import profile
from wide.errors import DataError

DOCS = Path(__file__).parents[2] / "docs"
MEASUREMENTS = DOCS / "measurements"
FIELDS = {"what", "value", "floor", "goal", "unit", "reached", "device", "date", "commit", "command"}


def _row(rows, words):
    return next(row for row in rows if words in row["what"])


def _committed(name):
    return json.loads((MEASUREMENTS / "targets" / name).read_text(encoding="utf-8"))


@cache
def _contents(path):
    with gzip.open(DOCS / path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _benches():
    """Return what benches and profiles wrote on GPUs, of all results."""
    found = itertools.chain.from_iterable(map(_contents, sorted(DOCS.glob("results/*/records.jsonl.gz"))))
    return [content for content in found if content.get("command") and content.get("commit")]


def _said_now(command):
    """Return a command with the flags' names of today, without the folder of its run."""
    command = re.sub(r"--rates (\S+),(\S+)", r"--sparsities \1/\2", command)
    return re.sub(r"--output \S+", "--output DIR", command).replace("--doors ", "--calls ")


def _measured(row):
    path, _, bench = row["record"].partition(":")
    return next(each["records"] for each in _contents(path) if (each["run"], each["bench"]) == ("h200", bench))


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


def _over(values, value):
    peers = {"speedup": "dense", "speedup_as_loaded": "as loaded"}
    return {
        field: max(values[peer], value) / min(values[peer], value) for field, peer in peers.items() if peer in values
    }


def _race(what, tokens, times, batch=1):
    facts = {"what": what, "tokens": tokens, "batch": batch}
    found = [{**facts, "candidate": name, "median_us": us, **_over(times, us)} for name, us in times.items()]
    return [each | {"speedup": times["dense"] / each["median_us"]} for each in found]


def _content():
    steps = {"as loaded": 21000.0, "dense": 4900.0, "routed 0.5/0.5": 3000.0, "routed 0/0": 5000.0}
    # The next sparsity's race has another dense time, which is no peer of the first one's.
    later = {"dense": 5300.0, "routed 0.7/0.7": 2500.0}
    forwards = {"as loaded": 120000.0, "dense": 100000.0, "routed 0.5/0.5": 69000.0}
    start = {"candidate": "routed 0.5/0.5", "optimize_s": 2.0, "first_call_s": 3.5, "bare_step_us": 2600.0}
    return {
        "device": "GPU",
        "model": "llama-3.1-8b",
        "records": [
            *_race("decode", 2080, steps),
            *_race("decode", 4128, steps),
            *_race("prefill", 4096, forwards),
            *_race("decode", 2080, later),
        ],
        "starts": [{**start, "memory_beyond_dense_bytes": 2**29}],
    }


@pytest.fixture
def folders(tmp_path):
    names = ("as loaded", "dense", "routed 0.5/0.5")
    rates = dict(zip(names, (300.0, 1000.0, 1120.0), strict=True))
    batches = [
        {"what": "generate_batch", "requests": 8, "prompt": 1024, "candidate": name, "tokens_per_s": rates[name]}
        | _over(rates, rates[name])
        for name in names
    ]
    several = _race("decode", 1056, {"dense": 5000.0, "routed 0.5/0.5": 5100.0}, batch=4)
    for name, content in (("a", _content()), ("b", {**_content(), "records": several, "batched": batches})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "endtoend.json").write_text(json.dumps(content))
    return [tmp_path / "a", tmp_path / "b"]


def test_rows_are_filled_from_records_and_others_stay_empty(folders):
    rows = fill(folders, commit="abcdef0", date="2026-01-02")
    assert len(rows) == len(targets())

    def of(words):
        row = _row(rows, words)
        return row["value"], row["reached"]

    assert of("strongest dense peer") == (1.6333, "goal")
    assert of("as loaded") == (7.0, "goal")
    assert of("adds to the bare step") == (0.4, "floor")
    assert of("forward of 4096") == (1.4493, "floor")
    assert of("8 requests") == (1.12, "goal")
    assert of("least speed-up over dense, one sequence") == (0.98, "floor")
    assert of("least speed-up over dense, 2 to 64") == (0.9804, "floor")
    assert of("a first call") == (5.5, "goal")
    assert of("memory beyond") == (0.5, "floor")
    shown = _row(rows, "8 requests")
    assert (shown["as_loaded"], shown["dense"], shown["ours"], shown["unit_shown"]) == (300, 1000, 1120, "tokens/s")
    untouched = _row(rows, "forward of 16384")
    assert (untouched["value"], untouched["device"], untouched["reached"]) == (None, None, "not measured")


def test_rows_that_are_not_measured_again_stay_as_they_are(folders, tmp_path, capsys):
    out = tmp_path / "targets" / "user.json"
    for number, folder in enumerate(folders):
        assert main(["--records", str(folder), "--out", str(out), "--commit", f"abcdef{number}"]) == 0
    rows = json.loads(out.read_text())
    assert all(row.keys() >= FIELDS for row in rows)
    assert _row(rows, "strongest dense peer")["commit"] == "abcdef0"
    assert _row(rows, "8 requests")["commit"] == "abcdef1"
    assert "not measured" in capsys.readouterr().out


def test_a_row_names_the_command_that_measured_it_without_its_folder(folders, tmp_path):
    record = folders[0] / "endtoend.json"
    said = {"command": "wide profile --shape llama-3.1-8b --output /some/where --prompt 2048"}
    record.write_text(json.dumps(json.loads(record.read_text()) | said))
    out = tmp_path / "user.json"
    assert main(["--records", str(folders[0]), "--out", str(out), "--commit", "abcdef0"]) == 0
    row = _row(json.loads(out.read_text()), "strongest dense peer")
    assert row["command"] == "wide profile --shape llama-3.1-8b --output DIR --prompt 2048"


# Writes a record into the folder that a command names, and then does not end.
ENDLESS = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
folder.mkdir(parents=True)
(folder / "endtoend.json").write_text(json.dumps({"given": sys.argv[1:]}))
time.sleep(60)
"""


def test_parts_are_stopped_and_what_they_wrote_counts(tmp_path):
    parts = {"a": ("wide profile --output DIR --prompt 8", 2.0), "none": ("wide --output DIR", 2.0)}
    (tmp_path / "none").mkdir()
    folders = measure(tmp_path, parts, [sys.executable, "-IS", "-c", ENDLESS])
    assert folders == [tmp_path / "a"]
    given = json.loads((tmp_path / "a" / "endtoend.json").read_text())["given"]
    assert given == ["profile", "--output", str(tmp_path / "a"), "--prompt", "8"]


def test_parts_measure_all_rows_in_ten_minutes():
    assert sum(seconds + 5 for _, seconds in PARTS.values()) <= 600
    assert {target.command for target in targets()} == {command for command, _ in PARTS.values()}
    for command, _ in PARTS.values():
        options = profile.build(
            profile.ProfileOptions, profile.arguments().parse(command.removeprefix("wide profile ").split())
        )
        assert (options.output, options.name) == ("DIR", "llama-3.1-8b")
    # What a user is promised is made of 128 tokens.
    assert "--generate" not in PARTS["alone"][0]
    assert profile.ProfileOptions().generate == 128


def test_batches_by_sparsity_and_trained_rates_have_rows(tmp_path):
    times = {"dense": 5000.0, "routed 0.5/0.5": 4900.0}
    grid = [*_race("decode", 1040, times, batch=4), *_race("decode", 1040, {"dense": 5.0, "routed 0/0": 5.1}, batch=8)]
    trained = [
        *_race("decode", 2112, {"dense": 5000.0, "routed 0.66/0.28": 4000.0}),
        *_race("prefill", 4096, {"dense": 5000.0, "routed 0.66/0.28": 2500.0}),
    ]
    for name, records in (("grid", grid), ("trained", trained)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "endtoend.json").write_text(json.dumps(_content() | {"records": records, "starts": []}))
    rows = fill([tmp_path / "grid", tmp_path / "trained"], commit="abcdef0", date="2026-01-02")
    found = {row["what"]: (row["value"], row["reached"]) for row in rows if row["value"] is not None}
    rates = "at the paper's trained rates, 66 % of attention and 28 % of the FFN"
    assert found == {
        "least speed-up over dense, 2 to 64 sequences, 50 %": (1.0204, "goal"),
        "least speed-up over dense, 2 to 64 sequences, 0 to 70 %": (0.9804, "floor"),
        f"`generate()`, a token, prompt of 2048, {rates}": (1.25, "for orientation"),
        f"forward of 4096 tokens, {rates}": (2.0, "for orientation"),
    }


def test_records_of_another_model_are_refused(tmp_path):
    (tmp_path / "endtoend.json").write_text(json.dumps({**_content(), "model": "tiny"}))
    with pytest.raises(DataError, match=r"records of tiny"):
        fill([tmp_path], commit="abcdef0", date="2026-01-02")


def test_the_committed_rows_are_the_targets():
    rows = _committed("user.json")
    assert [(r["what"], r["floor"], r["goal"], r["unit"]) for r in rows] == [
        (target.what, target.floor, target.goal, target.unit) for target in targets()
    ]
    assert [row["what"] for row in _committed("hopper.json")] == list(HOPPER)


@pytest.mark.parametrize("name", ["operators.json", "hopper.json"])
def test_committed_rows_say_truly_what_is_reached_and_how_to_repeat_it(name):
    for row in _committed(name):
        # What a module that is gone has measured through a call that is gone names that module instead of a command.
        assert row.keys() >= FIELDS - {"command"}, row["what"]
        assert ("command" in row) != ("measured_with" in row), row["what"]
        sign = -1 if row["unit"] == "us" else 1
        steps = [step for step in ("floor", "goal") if sign * row["value"] >= sign * row[step]]
        assert row["reached"] == ["missed", *steps][-1], row["what"]
        assert re.fullmatch(r"[0-9a-f]{7}", row["commit"]), row["what"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]), row["what"]
        if "command" in row:
            given = bench.arguments().parse(row["command"].removeprefix("wide bench ").split())
            assert bench.build(bench.BenchOptions, given).output == "DIR"


def test_committed_values_are_those_of_the_records_that_they_name():
    for row in _committed("hopper.json"):
        # Half of the third decimal: one row is the mean of ratios that its record keeps to three.
        assert HOPPER[row["what"]](_measured(row)) == pytest.approx(row["value"], abs=5e-4), row["what"]


def test_what_a_user_gets_is_what_records_of_that_commit_and_command_hold():
    for row, target in zip(_committed("user.json"), targets(), strict=True):
        records = [
            content
            for content in _benches()
            if (content["commit"], _said_now(content["command"])) == (row["commit"], row["command"])
        ]
        found = [each | {"value": round(each["value"], 4)} for each in map(target.find, records) if each is not None]
        # Behind the note that a record gives people may tell more.
        notes = [each.pop("note", "") for each in found]
        assert any(row.items() >= each.items() for each in found), row["what"]
        assert any(row.get("note", "").startswith(note) for note in notes), row["what"]
        assert row["device"] in {content["device"] for content in records}, row["what"]
        assert row["reached"] == reached(target.floor, target.goal, row["value"], target.unit), row["what"]


def test_figures_of_languages_are_those_of_their_records():
    committed = _committed("columns.json")
    benches = [content for content in _benches() if content["run"].startswith("languages")]
    assert columns.fill(benches, commit="", date="") == [
        row | {"commit": "", "date": "", "command": line.command}
        for row, line in zip(committed, columns.lines(), strict=True)
    ]
    commits = {(content["commit"], content["device"]) for content in benches}
    assert all((row["commit"], row["device"]) in commits for row in committed)


def test_what_missed_its_floor_says_by_how_much_its_best_experiment_does():
    missed = [row for row in _committed("hopper.json") if row["reached"] == "missed"]
    assert missed
    assert all("experiment" in row["note"] and "floor" in row["note"] for row in missed)
