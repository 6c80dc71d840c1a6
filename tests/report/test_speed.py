"""Benches and runs together: what is joined, what is drawn, and what is said where something is missing."""

import csv
import json

import pytest
from report_words import draw_svg

from wide.cli.main import main
from wide.errors import DataError
from wide.records import Record, RecordFile
from wide.report.drawing import FOLDER, save_figure
from wide.report.figure import MissingRecordsError
from wide.report.folders import draw_folder, run_table
from wide.report.reading import read_folder, read_profile
from wide.report.speed import SPEED_FIGURES

END_TO_END, PARTS, OPERATORS = SPEED_FIGURES


def write_json(path, records, **facts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": "GPU", "records": records, **facts}))


def sweep(name, candidate, median, **facts):
    return {"sweep": name, "candidate": candidate, "median_us": median, "active": 0.5, **facts}


def product(group_size, active, ours, dense=100.0, rows=4096):
    name = f"down G={group_size} p={active} M={rows}"
    facts = {"num_rows": float(rows), "group_size": float(group_size), "active": active}
    return [sweep(name, "dense", dense, **facts), sweep(name, "s=8", ours, **facts)]


def group(size, speedup, union):
    facts = {"race": f"decode_groups G={size} B=32 T=4096 p=0.5", "peer": "dense cudnn", "batch": 32, "length": 4096}
    facts |= {"active": 0.5, "group_size": size, "group_heads": size // 128, "union": union}
    times = {"dense cudnn": 100.0, "dense operator": 105.0, "operator": 100.0 / speedup}
    return [facts | {"candidate": name, "median_us": t, "speedup": 100.0 / t} for name, t in times.items()]


def step(candidate, batch, speedup, **more):
    facts = {"what": "decode", "tokens": 2048, "batch": batch, "candidate": candidate}
    return facts | {"median_us": 1000.0 / speedup, "speedup": speedup, "peak_memory_bytes": 2**30, **more}


def part(candidate, us, what="prompt"):
    return {"tokens": 4096, "what": what, "candidate": candidate, "part": "attention", "us": us}


def write_bench(folder):
    size = {"num_rows": 4096.0, "group_size": 128.0}
    name = "gate_up G=128 p=0.5 M=4096"
    operators = [
        {"sweep": "reorder M=4096", "candidate": "112 groups", "median_us": 5.0},
        sweep(name, "dense", 100.0, **size),
        sweep(name, "128x128", 60.0, **size),
        sweep(name, "64x64", 70.0, **size),
        {"sweep": name, "candidate": "broken", "failure": "no", "active": 0.5, **size},
    ]
    write_json(folder / "operators.json", operators)
    name = "prefill T=4096 p=0.5"
    race = {"race": name, "peer": "dense cudnn", "length": 4096, "active": 0.5}
    times = {"dense cudnn": 100, "dense flash": 80, "operator, reorder charged": 70, "operator, nothing skipped": 50}
    records = [{**race, "candidate": candidate, "median_us": time} for candidate, time in times.items()]
    write_json(folder / "attention.json", [*records, {**race, "candidate": "tile 1", "median_us": 40}])


def forward(what, candidate, median, *, skipped=None, tokens=1024):
    facts = {"what": what, "tokens": tokens, "batch": 1, "candidate": candidate, "median_us": median}
    facts |= {"speedup": 3000.0 / median, "runtime": "generate()" if what == "decode" else "model(...)"}
    if skipped is not None:
        facts |= {"skipped": {"attention": skipped[0], "ffn": skipped[1]}}
    return facts


def forwards(own=True):
    yield forward("prefill", "dense", 3000.0)
    yield forward("prefill", "routed 0.5/0.5", 2000.0, skipped=(0.5, 0.5))
    yield forward("prefill", "routed 0.66/0.285", 2100.0, skipped=(0.66, 0.285))
    yield {"what": "prefill", "tokens": 1024, "batch": 1, "candidate": "compiled default", "failure": "no"}
    if own:
        yield forward("prefill", "own routing", 2500.0, skipped=(0.4, 0.6))
        yield forward("decode", "own routing", 2400.0, skipped=(0.4, 0.6))


def write_run(folder, model="M", perplexity=12.0):
    file = RecordFile(folder / "records.jsonl")
    values = {("dense", "token_perplexity"): 10.0, ("stage 1", "token_perplexity"): 15.0}
    values |= {("stage 1+2", "token_perplexity"): perplexity, ("stage 1+2", "sparsity.ffn"): 0.5}
    file.append(
        [
            Record(subject="run", metric="model", value=model),
            *(Record(subject=s, metric=m, value=v) for (s, m), v in values.items()),
        ]
    )


def sheet(figure, folder):
    with (folder / FOLDER / f"{figure.name}.csv").open() as stream:
        return list(csv.DictReader(stream))


def test_the_fastest_charged_variant_counts(tmp_path):
    write_bench(tmp_path)
    points = {point["operator"]: point for point in read_profile(tmp_path).operators()}
    assert set(points) == {"gate_up", "prefill attention"}
    assert points["gate_up"]["candidate"] == "128x128"
    assert points["gate_up"]["speedup"] == pytest.approx(100 / 60)
    assert points["gate_up"]["ideal_speedup"] == 2.0
    # Tiles of the prefill attention leave the reordering out, and a run that skips nothing is no gain.
    assert points["prefill attention"]["candidate"] == "operator, reorder charged"
    assert points["prefill attention"]["speedup"] == pytest.approx(100 / 70)


def test_the_tile_that_ships_is_quoted(tmp_path):
    tuned = [*product(128, 0.5, 40.0), *product(128, 0.5, 50.0)]
    tuned[-1] |= {"candidate": "s=16", "shipped": True}
    write_json(tmp_path / "operators.json", tuned)
    (point,) = read_profile(tmp_path).operators()
    assert (point["candidate"], point["speedup"]) == ("s=16", 2.0)


def test_later_files_replace_equal_measurements(tmp_path):
    write_bench(tmp_path)
    write_json(tmp_path / "bench/operators.json", product(128, 0.5, 50.0))
    write_json(tmp_path / "bench/coarse/operators.json", product(128, 0.5, 80.0))
    points = {point["operator"]: point["median_us"] for point in read_profile(tmp_path).operators()}
    assert points == {"gate_up": 60.0, "prefill attention": 70.0, "down": 80.0}


def test_operators_are_drawn_over_tokens(tmp_path):
    records = [*product(128, 0.5, 90.0, rows=1024), *product(128, 0.5, 50.0), *product(64, 0.5, 80.0)]
    write_json(tmp_path / "operators.json", records)
    write_json(tmp_path / "attention.json", [*group(128, 1.2, 0.94), *group(512, 1.9, 0.5)])
    save_figure(OPERATORS, read_profile(tmp_path), tmp_path)
    _, words = draw_svg(OPERATORS, read_profile(tmp_path))
    assert "down, 50 % skipped, G 128: 1.11 at 1024, 2.00 at 4096" in words
    # Points of single sizes are in the values only, but where an operator has nothing else.
    assert "G 64" not in words
    assert "decode attention, 50 % skipped, G 512, B 32: 1.90 at 4096" in words
    rows = {(row["operator"], row["group_size"], row["tokens"]): row for row in sheet(OPERATORS, tmp_path)}
    assert rows["down", "64", "4096"]["speedup"] == "1.25"
    # A cache is read if any head of its group executes.
    assert float(rows["decode attention", "128", "4096"]["ideal_speedup"]) == pytest.approx(1 / 0.94)


def test_whole_models_are_drawn_over_their_size_by_door(tmp_path):
    records = [*forwards(), step("dense", 4, 1.0), step("own routing", 4, 1.5)]
    first = [forward("first token", "own routing", 1500.0) | {"runtime": "generate()"}]
    batched = {"what": "generate_batch", "requests": 8, "prompt": 256, "generate": 16, "tokens_per_s": 4000.0}
    batched |= {"candidate": "own routing", "speedup": 1.25, "speedup_as_loaded": 5.0}
    write_json(tmp_path / "endtoend.json", records, model="M", first_tokens=first, batched=[batched])
    profile = read_profile(tmp_path)
    save_figure(END_TO_END, profile, tmp_path)
    _, words = draw_svg(END_TO_END, profile)
    assert "prefill, model(...), own routing: 1.20 at 1024" in words
    assert "decode, own routing: 1.50 at 2048 x 4" in words
    assert "first token, generate(), own routing: 2.00 at 1024" in words
    assert "generate_batch, own routing: 1.25 at 256 x 8" in words
    assert "dense:" not in words
    rows = {(row["what"], row["candidate"], row["batch"]): row for row in sheet(END_TO_END, tmp_path)}
    assert rows["generate_batch", "own routing", "8"]["median_us"] == "2000.0"
    assert "compiled default" not in {candidate for _, candidate, _ in rows}


def test_parts_of_a_layer_are_drawn_by_call(tmp_path):
    records = [part("dense", 4.0), part("routed", 2.5), part("routed", 0.0, "token"), part("dense", 1.0) | {"us": None}]
    write_json(tmp_path / "breakdown.json", [*records, part("dense", -1.0)], ffn_group_size=64, skipped="0.5")
    write_json(tmp_path / "bench/breakdown.json", [part("routed", 3.0)], ffn_group_size=128, skipped="0.3")
    profile = read_profile(tmp_path)
    assert [row["us"] for row in profile.parts()] == [4.0, 2.5, 0.0, 3.0]
    _, words = draw_svg(PARTS, profile)
    assert "prompt, 4096 tokens, G = 64, 0.5 skipped, routed: 2.50 at attention" in words
    assert "prompt, 4096 tokens, G = 128, 0.3 skipped, routed: 3.00 at attention" in words
    assert len(profile.notes) == 2


def test_group_sizes_and_models_are_told_apart(tmp_path):
    for place, size, model in (("profile", 64, "M"), ("bench", 128, "M"), ("bench/coarse", 128, "N")):
        write_json(tmp_path / place / "endtoend.json", [*forwards(own=False)], model=model, ffn_group_size=size)
    _, words = draw_svg(END_TO_END, read_profile(tmp_path))
    assert "M, prefill, model(...), routed 0.5/0.5, G 64: 1.50 at 1024" in words
    assert "N, prefill, model(...), routed 0.5/0.5, G 128: 1.50 at 1024" in words


@pytest.mark.parametrize("figure", SPEED_FIGURES, ids=lambda figure: figure.name)
def test_figures_of_speed_name_what_is_missing(figure, tmp_path):
    write_json(tmp_path / "endtoend.json", [])
    with pytest.raises(MissingRecordsError, match="run wide"):
        draw_svg(figure, read_profile(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", '{"records": 3}'])
def test_files_of_other_kinds_are_refused(tmp_path, content):
    (tmp_path / "endtoend.json").write_text(content)
    with pytest.raises(DataError, match=r"endtoend\.json"):
        read_profile(tmp_path)


def speeds(folder):
    table = run_table(read_folder(folder))
    lines = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    found = {line["model"]: (line.get("prefill", "-"), line.get("decode", "-")) for line in lines}
    return {model: timed for model, timed in found.items() if timed != ("-", "-")}


def test_quality_joins_the_speed_of_the_same_model(tmp_path):
    one, other, untimed = tmp_path / "one", tmp_path / "other", tmp_path / "untimed"
    for folder in (one, other, untimed):
        write_run(folder)
    write_json(one / "profile/endtoend.json", list(forwards()), model="M", ffn_group_size=64)
    adapter = str(other / "stage1" / "adapter")
    write_json(other / "profile/endtoend.json", list(forwards()), model="M", adapter=adapter, ffn_group_size=64)
    assert speeds(one) == {"stage 1+2 (routers, LoRA)": ("1.20x", "1.25x")}
    # The adapter of its first stage.
    assert speeds(other) == {"stage 1 (routers)": ("1.20x", "1.25x")}
    assert speeds(untimed) == {}


def test_speed_of_another_model_or_of_random_masks_joins_nothing(tmp_path):
    write_run(tmp_path / "run", model="M")
    write_json(tmp_path / "run/endtoend.json", list(forwards()), model="another", ffn_group_size=64)
    assert speeds(tmp_path / "run") == {}
    write_json(tmp_path / "run/endtoend.json", list(forwards(own=False)), model="M", ffn_group_size=64)
    assert speeds(tmp_path / "run") == {}


def test_a_materialised_method_joins_its_run(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append([Record(subject="run", metric="model", value="M")])
    file.append([Record(subject=s, metric="token_perplexity", value=v) for s, v in (("dense", 10.0), ("pruned", 15.0))])
    timed = [step("dense", 1, 1.0), step("pruned", 1, 1.6), step("pruned", 4, 1.2)]
    write_json(tmp_path / "profile/endtoend.json", timed, model="M", method="tyr")
    assert speeds(tmp_path)["pruned"] == ("-", "1.20x-1.60x")


def test_weights_in_eight_bits_are_a_measurement_of_their_own_and_say_so(tmp_path):
    for place, weights, speedup in (("endtoend.json", "model", 1.2), ("profile/endtoend.json", "w8a8", 1.6)):
        timed = [step("dense", 1, 1.0), step("own routing", 1, speedup, runtime="generate()")]
        write_json(tmp_path / place, timed, model="M", weights=weights)
    found = [row for row in read_profile(tmp_path).forwards() if row["candidate"] == "own routing"]
    assert [(row["call"], row["speedup"]) for row in found] == [("generate()", 1.2), ("generate(), w8a8", 1.6)]


def test_a_run_with_a_profile_shows_both_on_its_page(tmp_path):
    pytest.importorskip("matplotlib")
    write_run(tmp_path)
    write_json(tmp_path / "endtoend.json", list(forwards()), model="M", ffn_group_size=64)
    page = draw_folder(tmp_path)[0][0].read_text()
    assert "<td>1.20x</td>" in page
    assert "Speed-up of whole models" in page
    assert "Perplexity" in page


def test_a_bench_without_a_figure_is_a_table_and_nothing_is_refused(tmp_path):
    record = {"axis": "N", "size": 64, "group_size": 16, "active": 0.5, "candidate": "dense", "parts_us": {"sort": 1.0}}
    write_json(tmp_path / "naive/naive.json", [record])
    ((page,), _) = draw_folder(tmp_path / "naive")
    assert "Records of naive.json" in page.read_text()
    assert "Perplexity" not in page.read_text()
    table = read_profile(tmp_path / "naive").others()["naive.json"]
    assert table.header == ("device", "axis", "size", "group_size", "active", "candidate")
    assert table.rows == (("GPU", "N", "64", "16", "0.5", "dense"),)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds neither"):
        draw_folder(tmp_path / "empty")


def test_traffic_needs_no_gpu(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["bench", "--config", "tab-traffic", "--rows", "512", "--output", str(tmp_path)]) == 0
    assert "gather-scatter" in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 0
    assert "gather-scatter" in (tmp_path / "report.html").read_text()


def test_a_page_may_lie_elsewhere(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write_bench(tmp_path / "bench")
    assert main(["report", str(tmp_path / "bench"), "--output", str(tmp_path / "page")]) == 0
    assert not (tmp_path / "bench/report.html").exists()
    assert "Speed-up of operators" in (tmp_path / "page/report.html").read_text()
    assert main(["report", *[str(tmp_path / "bench")] * 2, "--output", str(tmp_path / "page")]) == 2
    assert "one folder, got 2" in capsys.readouterr().err
