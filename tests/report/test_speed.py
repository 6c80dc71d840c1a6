"""Benches and runs together: what is joined, what is drawn, and what is said where something is missing."""

import csv
import json

import pytest

from wide.cli.main import main
from wide.errors import DataError
from wide.records import Record, RecordFile
from wide.report.drawing import FOLDER, draw, draw_svg, save_figure
from wide.report.figure import MissingRecordsError
from wide.report.folders import QUALITY_SPEED, evidence_table, read_evidence, write_evidence, write_folder
from wide.report.profiles import read_profile
from wide.report.speed_figures import DEPTH_FIGURES, NAIVE_FIGURES, SPEED_FIGURES, traffic_table


def write_json(path, records, **facts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": "GPU", "records": records, **facts}))


def sweep(name, candidate, median, **facts):
    return {"sweep": name, "candidate": candidate, "median_us": median, "active": 0.5, **facts}


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
    facts |= {"speedup": 3000.0 / median, "breakdown_us": {"attention": 900.0, "gaps": -5.0, "query": 10.0}}
    if skipped is not None:
        facts |= {"skipped": {"attention": skipped[0], "ffn": skipped[1]}, "ceiling": 2.0}
    return facts


def forwards(own=True):
    yield forward("prefill", "dense", 3000.0)
    yield forward("prefill", "routed 0.5/0.5", 2000.0, skipped=(0.5, 0.5))
    yield forward("prefill", "routed 0.66/0.285", 2100.0, skipped=(0.66, 0.285))
    yield forward("prefill", "all execute", 3030.0, skipped=(0.0, 0.0))
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


def test_the_fastest_charged_variant_counts(tmp_path):
    write_bench(tmp_path)
    points = {point.operator: point for point in read_profile(tmp_path).operators()}
    assert set(points) == {"gate_up", "prefill attention"}
    assert points["gate_up"].candidate == "128x128"
    assert points["gate_up"].speedup == pytest.approx(100 / 60)
    assert points["gate_up"].ideal == 2.0
    # Tiles of the prefill attention leave the reordering out, and a run that skips nothing is no gain.
    assert points["prefill attention"].candidate == "operator, reorder charged"
    assert points["prefill attention"].speedup == pytest.approx(100 / 70)


def test_later_files_replace_equal_measurements(tmp_path):
    write_bench(tmp_path)
    profile = read_profile(tmp_path)
    write_bench(tmp_path / "bench")
    again = read_profile(tmp_path)
    assert len((profile + profile).operators()) == len(again.operators()) == 2


@pytest.mark.parametrize("figure", SPEED_FIGURES[:3], ids=lambda figure: figure.name)
def test_figures_of_speed_hold_what_was_measured(figure, tmp_path):
    write_bench(tmp_path)
    write_json(tmp_path / "endtoend.json", list(forwards()), model="M", ffn_group_size=64)
    profile = read_profile(tmp_path)
    _, words = save_figure(figure, profile, tmp_path)
    with (tmp_path / FOLDER / f"{figure.name}.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    if figure.name == "operators":
        assert "gate and up, 50 % skipped, G 128: 1.67 at 4096" in words
        assert [(row["median_us"], row["backend"]) for row in rows] == [("60.0", "Triton"), ("70.0", "Triton")]
    if figure.name == "end-to-end":
        assert "1.50 at 50" in words
        assert {row["candidate"] for row in rows} >= {"dense", "own routing", "all execute"}
        assert "compiled default" not in {row["candidate"] for row in rows}
    if figure.name == "breakdown":
        assert {row["words"] for row in rows} == {
            "",
            "1.50x of 2.00x possible",
            "1.43x of 2.00x possible",
            "1.20x of 2.00x possible",
            "1.25x of 2.00x possible",
        }
        assert {"gaps", "query, key and value", "attention"} == {row["part"] for row in rows}


def test_figures_of_speed_name_what_is_missing(tmp_path):
    write_json(tmp_path / "endtoend.json", [forward("prefill", "dense", 3.0)])
    profile = read_profile(tmp_path)
    for figure, words in zip(SPEED_FIGURES[:3], ("no routed candidate", "", "no records of operators"), strict=True):
        if words:
            with pytest.raises(MissingRecordsError, match=words):
                draw_svg(figure, profile)
    with pytest.raises(MissingRecordsError, match=r"naive\.json"):
        draw_svg(NAIVE_FIGURES[0], profile)


@pytest.mark.parametrize("content", ["{", "[]", '{"records": 3}'])
def test_files_of_other_kinds_are_refused(tmp_path, content):
    (tmp_path / "endtoend.json").write_text(content)
    with pytest.raises(DataError, match=r"endtoend\.json"):
        read_profile(tmp_path)


def test_quality_joins_the_speed_of_the_same_adapter(tmp_path):
    inside, outside, other = tmp_path / "inside", tmp_path / "outside", tmp_path / "other"
    for folder in (inside, outside, other):
        write_run(folder)
    write_json(inside / "profile/endtoend.json", list(forwards()), model="M", ffn_group_size=64)
    adapter = str(outside / "stage1" / "adapter")
    write_json(tmp_path / "bench/endtoend.json", list(forwards()), model="M", adapter=adapter, ffn_group_size=64)
    evidence = read_evidence([inside, outside, other, tmp_path / "bench"])
    points = {(point["run"], point["subject"], point["what"]): point for point in evidence.points()}
    assert set(points) == {
        ("inside", "stage 1+2", "prefill"),
        ("inside", "stage 1+2", "decode"),
        ("outside", "stage 1", "prefill"),
        ("outside", "stage 1", "decode"),
    }
    assert points["inside", "stage 1+2", "decode"]["ratio"] == pytest.approx(1.2)
    assert points["outside", "stage 1", "prefill"]["speedup"] == pytest.approx(1.2)
    lines = {(row[0], row[1]): row for row in evidence_table(evidence).rows}
    assert lines["outside", "stage 1 (routers)"][-2:] == ("1.20x", "1.25x")
    assert lines["other", "stage 1+2 (routers, LoRA)"][-2:] == ("-", "-")
    _, words = draw_svg(QUALITY_SPEED, evidence)
    assert "prefill, inside, stage 1+2 (routers, LoRA): 1.20 at 1.2" in words


def test_runs_of_one_model_keep_their_own_speed(tmp_path):
    for name, time in (("a", 2500.0), ("b", 2000.0)):
        write_run(tmp_path / name)
        own = forward("prefill", "own routing", time, skipped=(0.4, 0.6))
        write_json(tmp_path / name / "profile/endtoend.json", [own], model="M", ffn_group_size=64)
    evidence = read_evidence([tmp_path / "a", tmp_path / "b"])
    assert {point["run"]: point["speedup"] for point in evidence.points()} == {"a": 1.2, "b": 1.5}
    _, words = draw_svg(QUALITY_SPEED, evidence)
    assert "prefill, a, stage 1+2 (routers, LoRA): 1.20 at 1.2" in words


def test_speed_of_another_model_or_of_random_masks_joins_nothing(tmp_path):
    write_run(tmp_path / "run", model="M")
    write_json(tmp_path / "run/endtoend.json", list(forwards()), model="another", ffn_group_size=64)
    assert read_evidence([tmp_path / "run"]).points() == []
    write_json(tmp_path / "run/endtoend.json", list(forwards(own=False)), model="M", ffn_group_size=64)
    evidence = read_evidence([tmp_path / "run"])
    with pytest.raises(MissingRecordsError, match="wide profile --model M --adapter"):
        draw_svg(QUALITY_SPEED, evidence)


def test_a_run_with_a_profile_shows_both_on_its_page(tmp_path):
    write_run(tmp_path)
    write_json(tmp_path / "endtoend.json", list(forwards()), model="M", ffn_group_size=64)
    page = write_folder(tmp_path)[0][0].read_text()
    assert "Quality against measured speed" in page
    assert "Where the time goes" in page
    assert "Perplexity" in page


def test_several_folders_share_a_page(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name / "run")
    page = write_evidence([tmp_path / "a/run", tmp_path / "b/run"], tmp_path / "all")[0].read_text()
    assert "a/run" in page
    assert "b/run" in page
    assert "Not drawn: no run whose quality" in page
    with pytest.raises(DataError, match="another --output"):
        write_evidence([tmp_path / "a/run", tmp_path / "b/run"], tmp_path / "a/run")
    with pytest.raises(DataError, match="named twice"):
        write_evidence([tmp_path / "a/run"] * 2, tmp_path / "all")


def test_a_bench_alone_is_drawn_and_nothing_is_refused(tmp_path):
    record = {"axis": "N", "size": 64, "group_size": 16, "active": 0.5, "candidate": "dense"}
    record |= {"error": 0.0, "accounted_traffic_bytes": 100.0, "accounted_storage_bytes": 0.0}
    write_json(tmp_path / "naive/naive.json", [record])
    ((page,), _) = write_folder(tmp_path / "naive")
    assert "Naive, grouped, fused" in page.read_text()
    assert "Perplexity" not in page.read_text()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds neither"):
        write_folder(tmp_path / "empty")


def test_the_table_of_traffic_needs_no_gpu(tmp_path, capsys):
    assert main(["bench", "--config", "tab-traffic", "--rows", "512", "--out", str(tmp_path)]) == 0
    lines = {(row[0], row[1]): row[2:] for row in traffic_table(read_profile(tmp_path)).rows}
    # Three matrices of bfloat16; gathered weights are read once for each token.
    assert lines["dense", "N"] == ("512", "1.5", "1.00", "0.0")
    assert float(lines["gather-scatter", "N"][2]) > 100
    assert "gather-scatter" in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 0
    assert "by the paper&#x27;s accounting" in (tmp_path / "report.html").read_text().replace("'", "&#x27;")


def depth_record(candidate, median, *, rows=64, **parts):
    size = {"rows": rows, "width_in": 4096, "width_out": 4096, "active": 0.5}
    times = {"median_us": median, "speedup": 20.0 / median, "parts_us": parts}
    return {
        **size,
        **times,
        "candidate": candidate,
        "error": 0.001,
        "accounted_traffic_bytes": dict.fromkeys(parts, 8.0),
    }


def test_naive_depth_is_drawn_by_stage(tmp_path):
    naive = depth_record("gather-scatter", 40.0, indices=15.0, gather=4.0, GEMM=12.0, scatter=6.0)
    write_json(tmp_path / "depth.json", [depth_record("dense", 20.0, GEMM=20.0), naive])
    rows = [row for row in DEPTH_FIGURES[0].table(read_profile(tmp_path)) if row["candidate"] == "gather-scatter"]
    stages = {"indices": 15.0, "gather": 4.0, "GEMM": 12.0, "scatter": 6.0, "rest": 3.0}
    assert {row["part"]: row["us"] for row in rows} == stages
    assert {row["part"]: row["x dense"] for row in rows} == {name: us / 20.0 for name, us in stages.items()}
    ((page,), _) = write_folder(tmp_path)
    assert "Where the time of naive dynamic depth goes" in page.read_text()


def test_the_line_of_the_dense_product_crosses_no_words_of_naive_depth(tmp_path):
    pytest.importorskip("matplotlib")
    ways = [depth_record("dense", 20.0, GEMM=20.0), depth_record("fused", 12.0, sort=1.0, GEMM=11.0)]
    ways.append(depth_record("gather-scatter", 90.0, indices=60.0, gather=4.0, GEMM=12.0, scatter=6.0))
    write_json(tmp_path / "depth.json", [way | {"speedup": 20.0 / way["median_us"]} for way in ways])
    (axes,) = draw(DEPTH_FIGURES[0], read_profile(tmp_path)).axes
    assert [words.xy[0] >= 1.0 for words in axes.texts] == [True] * 3


def test_naive_depth_on_a_cpu_says_what_is_missing(tmp_path):
    record = {"rows": 64, "width_in": 8, "width_out": 8, "active": 0.5, "candidate": "dense", "error": 0.0}
    write_json(tmp_path / "depth.json", [record])
    ((page,), _) = write_folder(tmp_path)
    assert "Not drawn: no timed record of naive dynamic depth" in page.read_text()


def test_the_breakdown_leaves_batches_to_their_own_figure(tmp_path):
    breakdown = next(figure for figure in SPEED_FIGURES if figure.name == "breakdown")
    batch = forward("prefill", "routed 0.5/0.5", 4000.0, skipped=(0.5, 0.5)) | {"batch": 8}
    write_json(tmp_path / "endtoend.json", [*forwards(own=False), batch], model="M", ffn_group_size=64)
    assert {row["batch"] for row in breakdown.table(read_profile(tmp_path))} == {1}


def test_an_operator_timed_at_one_size_shows_its_usual_groups_at_half(tmp_path):
    size = {"num_rows": 1.0}
    records = []
    for group_size, active, ours in ((64, 0.5, 90.0), (128, 0.3, 20.0), (128, 0.5, 50.0), (128, 0.7, 70.0)):
        facts = size | {"sweep": f"down G={group_size} p={active} M=1", "group_size": group_size, "active": active}
        records += [facts | {"candidate": "dense", "median_us": 100.0}, facts | {"candidate": "s=8", "median_us": ours}]
    write_json(tmp_path / "operators.json", records)
    operators = next(figure for figure in SPEED_FIGURES if figure.name == "operators")
    _, words = draw_svg(operators, read_profile(tmp_path))
    assert "down, 50 % skipped, G 128: 2.00 at 1" in words
    assert "G 64" not in words
    assert "30 % skipped" not in words
