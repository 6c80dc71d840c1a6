"""Figures of sweeps: drawn from what varies, the same bytes every time, and a sentence where nothing does."""

import csv
import json

import pytest

from wide.cli.main import main
from wide.records import Record, RecordFile
from wide.report.drawing import FOLDER, draw_svg, save_figure
from wide.report.figure import MissingRecordsError
from wide.report.folders import read_evidence
from wide.report.profiles import read_profile
from wide.report.speed_figures import SPEED_FIGURES

SPEED = {figure.name: figure for figure in SPEED_FIGURES}
FIGURES = {
    name: SPEED[name]
    for name in ("operators-groups", "operators-sparsity", "decode-groups", "end-to-end-groups", "batches")
}


def write_json(path, records, **facts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": "GPU", "records": records, **facts}))


def product(group_size, active, ours, dense=100.0, rows=4096):
    name = f"down G={group_size} p={active} M={rows}"
    facts = {"sweep": name, "num_rows": float(rows), "group_size": float(group_size), "active": active}
    return [facts | {"candidate": "dense", "median_us": dense}, facts | {"candidate": "s=8", "median_us": ours}]


def group(size, speedup, union):
    facts = {"race": f"decode_groups G={size} B=32 T=4096 p=0.5", "peer": "dense cudnn", "batch": 32, "length": 4096}
    facts |= {"active": 0.5, "group_size": size, "group_heads": size // 128, "union": union}
    times = {"dense cudnn": 100.0, "dense operator": 105.0, "operator": 100.0 / speedup}
    return [facts | {"candidate": name, "median_us": t, "speedup": 100.0 / t} for name, t in times.items()]


def step(candidate, batch, speedup, **more):
    facts = {"what": "decode", "tokens": 2048, "batch": batch, "candidate": candidate}
    return facts | {"median_us": 1000.0 / speedup, "speedup": speedup, "peak_memory_bytes": 2**30, **more}


def write_all(folder):
    records = product(64, 0.5, 90.0) + product(128, 0.5, 80.0) + product(128, 0.3, 50.0)
    write_json(folder / "operators.json", records)
    write_json(folder / "attention.json", group(128, 1.2, 0.94) + group(512, 1.9, 0.5))
    skipped = {"skipped": {"attention": 0.5, "ffn": 0.5}, "ceiling": 1.9}
    steps = [step("dense", 1, 1.0, energy_j=2.0), step("routed 0.5/0.5", 1, 1.5, energy_j=1.0, **skipped)]
    steps += [step("dense", 4, 1.0, energy_j=4.0), step("routed 0.5/0.5", 4, 1.1, energy_j=3.0, **skipped)]
    write_json(folder / "endtoend.json", [*steps, step("all execute", 4, 0.9)], model="M", ffn_group_size=128)
    for place, size, speedup in (("profile", 32, 1.2), ("bench", 256, 1.6)):
        other = step("routed 0.5/0.5", 1, speedup, **skipped)
        write_json(folder / place / "endtoend.json", [other], model="M", ffn_group_size=size)


@pytest.mark.parametrize("name", FIGURES)
def test_sweeps_hold_what_was_measured_and_are_the_same_every_time(name, tmp_path):
    write_all(tmp_path)
    profile = read_profile(tmp_path)
    svg, words = save_figure(FIGURES[name], profile, tmp_path)
    assert draw_svg(FIGURES[name], read_profile(tmp_path)) == (svg, words)
    with (tmp_path / FOLDER / f"{name}.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    if name == "operators-groups":
        assert [(row["group_size"], row["median_us"]) for row in rows] == [("64", "90.0"), ("128", "80.0")]
        assert "1.11 at 64, 1.25 at 128" in words
    if name == "operators-sparsity":
        assert "1.25 at 50, 2.00 at 70" in words
    if name == "decode-groups":
        assert "operator: 1.20 at 128, 1.90 at 512" in words
        assert {row["candidate"] for row in rows} == {"dense cudnn", "dense operator", "operator"}
    if name == "end-to-end-groups":
        assert [(row["group_size"], row["batch"]) for row in rows] == [("32", "1"), ("128", "1"), ("256", "1")]
        assert "decode, M, 2048 cached, 0.5/0.5: 1.20 at 32, 1.50 at 128, 1.60 at 256" in words
    if name == "batches":
        assert "speed-up over dense, routed 0.5/0.5: 1.50 at 1, 1.10 at 4" in words
        assert {row["energy_per_token_j"] for row in rows} == {"2.0", "1.0", "0.75"}
        assert "all execute" not in {row["candidate"] for row in rows}


@pytest.mark.parametrize("name", FIGURES)
def test_without_anything_that_varies_the_figure_says_what_to_run(name, tmp_path):
    write_json(tmp_path / "operators.json", product(128, 0.5, 80.0))
    with pytest.raises(MissingRecordsError, match="run wide"):
        draw_svg(FIGURES[name], read_profile(tmp_path))


def test_decode_groups_are_no_point_of_the_operators(tmp_path):
    write_all(tmp_path)
    assert {point.operator for point in read_profile(tmp_path).operators()} == {"down"}


def test_a_materialised_method_joins_its_run(tmp_path):
    run = tmp_path / "run"
    values = {"dense": 10.0, "pruned": 15.0}
    file = RecordFile(run / "records.jsonl")
    file.append([Record(subject="run", metric="model", value="M")])
    file.append([Record(subject=name, metric="token_perplexity", value=value) for name, value in values.items()])
    facts = {"model": "M", "method": "tyr", "adapter": str(run / "adapter")}
    write_json(tmp_path / "speed/endtoend.json", [step("dense", 1, 1.0), step("pruned", 1, 1.6)], **facts)
    (point,) = read_evidence([run, tmp_path / "speed"]).points()
    assert [point[name] for name in ("method", "subject", "ratio", "speedup")] == ["tyr", "pruned", 1.5, 1.6]


def test_only_the_common_page_is_drawn(tmp_path, capsys):
    write_all(tmp_path / "bench")
    assert main(["report", str(tmp_path / "bench"), "--output", str(tmp_path / "all"), "--only"]) == 0
    assert not (tmp_path / "bench/report.html").exists()
    page = (tmp_path / "all/report.html").read_text()
    assert "Batched decode" in page
    assert main(["report", str(tmp_path / "bench"), "--only"]) == 2
    assert "name it" in capsys.readouterr().err


def test_batches_leave_out_what_was_timed_at_one_batch_only(tmp_path):
    write_all(tmp_path)
    write_json(tmp_path / "profile/endtoend.json", [step("routed 0.3/0.3", 1, 1.2)], model="M", ffn_group_size=128)
    rows = FIGURES["batches"].table(read_profile(tmp_path))
    assert {row["candidate"] for row in rows} == {"dense", "routed 0.5/0.5"}


def test_a_sweep_over_groups_does_not_crowd_the_lines_over_sparsity(tmp_path):
    write_all(tmp_path)
    rates = [(0.0, 1.0), (0.3, 1.2), (0.7, 2.0)]
    line = [
        step(f"routed {rate:g}/{rate:g}", 1, speedup, skipped={"attention": rate, "ffn": rate}, ceiling=3.0)
        for rate, speedup in rates
    ]
    write_json(tmp_path / "bench/coarse/endtoend.json", line, model="M", ffn_group_size=128)
    _, words = draw_svg(SPEED["end-to-end"], read_profile(tmp_path))
    assert "G 128: 1.00 at 0, 1.20 at 30, 1.50 at 50, 2.00 at 70" in words
    assert "G 32" not in words
    assert "G 256" not in words
