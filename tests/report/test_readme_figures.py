"""What the README says of quality and speed is what was measured: every figure is looked up among the records."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest

from wide.records import read_records

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs/measurements/records"
README = (ROOT / "README.md").read_text()
QUALITY = json.loads((RECORDS / "lab-quality.json").read_text())
RECIPES = {
    (entry["run"], entry["stage"]): entry for entry in json.loads((RECORDS / "lab-recipes.json").read_text())["runs"]
}
BENCHMARK = json.loads((RECORDS / "lab-benchmark.json").read_text())
LAB = ROOT / "docs/results/lab-88m"
EQUAL_LORA, EQUAL_WORK, QUARTER_OF_WORK, QUARTER, SEEDS, EQUAL_TOKENS = (
    {
        (record.subject, record.metric): record.value
        for name in names
        for record in read_records(LAB / name / "compare.jsonl")[0]
    }
    for names in (
        ("n50",),
        ("f50-tasks", "f50", "f50-groups", "f50-fitted", "f50-seeds", "f50-seeds-fitted"),
        ("f25-tasks", "f25", "f25-groups", "f25-fitted"),
        ("n25", "n25-fitted"),
        # Of equal cells the last grid counts, as in the table of three seeds.
        ("n50", "n50-rest", "n50-fitted", "seeds", "seeds-tyr", "seeds-tyr-18", "seeds-fitted", "seeds-fitted-18"),
        ("equal",),
    )
)
FORWARDS = json.loads((RECORDS / "h200/endtoend.json").read_text())["records"]
STEPS, BATCHES, *COMPILED = (
    json.loads((RECORDS / f"h200/{name}/endtoend.json").read_text())["records"]
    for name in ("steps", "batches", "compiled/decode", "compiled/prefill")
)
ROUTED = ("wide", "wide-32", "wide-64", "wide-uniform", "wide-fitted")
TARGETS = {"25 % nominal": "mean25", "50 % nominal": "mean50", "50 % of the linear FLOPs": "flops50"}


def rows(first_cell):
    lines = [line for line in README.splitlines() if line.startswith("|")]
    tables = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = [cells for cells in tables if cells[0] == first_cell]
    assert found, f"the README has no row {first_cell!r}"
    return found


def quality(run, stage, metric):
    return next(entry[metric] for entry in QUALITY if (entry["run"], entry["stage"]) == (run, stage))


def forward(what, tokens, **wanted):
    found = [entry for entry in FORWARDS if (entry["what"], entry["tokens"]) == (what, tokens)]
    return next(entry for entry in found if all(entry.get(key) == value for key, value in wanted.items()))


def numbers(text):
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


@pytest.mark.parametrize("target", TARGETS)
def test_perplexities_are_those_of_the_records(target):
    _, groups, *stages = rows(target)[0]
    assert groups == "32 / 128"
    for stage, cell in zip(("stage 1", "stage 1+2"), stages, strict=True):
        measured = [quality(f"{TARGETS[target]}_g{size}", stage, "heldout_token_perplexity") for size in (32, 128)]
        assert cell == " / ".join(f"{value:.1f}" for value in measured)


def test_targets_are_met_as_closely_as_said():
    said = float(re.search(r"target met within ([\d.]+) points", README).group(1))
    metrics = {"25": ("heldout_mean", 0.25), "50": ("heldout_mean", 0.5), "flops50": ("heldout_linear_flops", 0.5)}
    missed = []
    for entry in QUALITY:
        kind = entry["run"].partition("_")[0].removeprefix("mean")
        metric, target = metrics[kind]
        missed.append(100 * abs(entry[metric] - target))
    assert said == math.ceil(10 * max(missed)) / 10


def test_tokens_a_stage_are_those_of_the_runs():
    said = re.findall(r"(\d+\.\d) M tokens", README)
    trained = {entry["training_tokens"] for entry in QUALITY} | {
        RECIPES[run, "stage 1"]["training.tokens"] for run in ("all_lr5e-3", "smooth_lr5e-3")
    }
    assert len(said) == 2
    assert {f"{tokens / 1e6:.1f}" for tokens in trained} == set(said)


def test_ratios_to_dense_are_those_of_the_measurements():
    dense = float(re.search(r"word perplexity (\d+\.\d+)", (ROOT / "docs/measurements/quality-lab.md").read_text())[1])
    said = re.search(r"is ([\d.]+) \(G = 32, LoRA\) to ([\d.]+) \(G = 128, routers only\)", README)
    for value, run, stage in ((said[1], "mean50_g32", "stage 1+2"), (said[2], "mean50_g128", "stage 1")):
        assert value == f"{quality(run, stage, 'wikitext2_word_perplexity') / dense:.2f}"


@pytest.mark.parametrize(("what", "name"), [("prefill", "prefill, "), ("decode", "decode step, ")])
def test_speed_ups_and_ceilings_are_those_of_the_records(what, name):
    label = next(line.split("|")[1].strip() for line in README.splitlines() if line.startswith(f"| {name}"))
    _, measured, ideal = rows(label)[0]
    lengths = [int(number) for number in numbers(label)]
    half = {"attention": 0.5, "ffn": 0.5}
    found = [forward(what, length, candidate="routed 0.5/0.5", skipped=half) for length in lengths]
    assert measured == " / ".join(f"{entry['speedup']:.2f}x" for entry in found)
    assert ideal == " / ".join(f"{entry['ceiling']:.2f}x" for entry in found)


def test_prefills_of_several_runs_are_those_of_the_records():
    said = re.search(
        r"have ([\d.]+)x and ([\d.]+)x in prefill at 4096 tokens, ([\d.]+)x and ([\d.]+)x at 16384; "
        r"four runs before had ([\d.]+)x to ([\d.]+)x and ([\d.]+)x to ([\d.]+)x",
        README,
    )
    figures = []
    for names in (("", "-output-gluon"), ("-gluon", "-idle-host", "-earlier", "-busy-host")):
        runs = [json.loads((RECORDS / f"h200/endtoend{name}.json").read_text())["records"] for name in names]
        for tokens in (4096, 16384):
            wanted = ("prefill", tokens, "routed 0.5/0.5")
            found = [e["speedup"] for run in runs for e in run if (e["what"], e["tokens"], e["candidate"]) == wanted]
            assert len(found) == len(names)
            figures += [min(found), max(found)]
    assert list(said.groups()) == [f"{figure:.2f}" for figure in figures]


def test_the_cost_of_skipping_nothing_is_that_of_the_records():
    _, said, _ = rows("nothing skipped")[0]
    measured = [entry["speedup"] for entry in FORWARDS if entry["candidate"] == "all execute"]
    assert numbers(said) == [pytest.approx(min(measured), abs=0.005), pytest.approx(max(measured), abs=0.005)]


def test_steps_of_other_sparsities_and_batches_are_those_of_the_records():
    def step(rate, batch):
        found = (entry for entry in STEPS if (entry["candidate"], entry["batch"]) == (f"routed {rate}/{rate}", batch))
        return f"{next(found)['speedup']:.2f}"

    rates = re.search(r"At 30 / 70 % a decode step \(2048 cached\) gains ([\d.]+)x / ([\d.]+)x", README)
    assert list(rates.groups()) == [step(rate, 1) for rate in (0.3, 0.7)]
    batches = re.search(r"2 / 32 / 64 sequences gain ([\d.]+)x / ([\d.]+)x / ([\d.]+)x", README)
    assert list(batches.groups()) == [step(0.5, batch) for batch in (2, 32, 64)]
    most = max(entry["speedup"] for entry in BATCHES if entry["candidate"] == "routed 0.5/0.5")
    assert re.search(r"4 to 16 at most ([\d.]+)x", README)[1] == f"{most:.2f}"
    assert {entry["batch"] for entry in BATCHES} == {4, 8, 16}


def test_gains_over_the_compiled_peer_are_those_of_the_records():
    def gain(what, tokens):
        found = {e["candidate"]: e for part in COMPILED for e in part if (e["what"], e["tokens"]) == (what, tokens)}
        assert found["compiled default"]["speedup"] < 1
        return f"{found['compiled default']['median_us'] / found['routed 0.5/0.5']['median_us']:.2f}"

    said = re.search(r"a decode step gains ([\d.]+)x / ([\d.]+)x and a prefill of 4096 tokens ([\d.]+)x", README)
    assert list(said.groups()) == [gain("decode", 2048), gain("decode", 16384), gain("prefill", 4096)]


def test_the_optimised_model_and_its_dense_peer_are_those_of_the_records():
    records = json.loads((RECORDS / "h200/optimised/endtoend-cuda.json").read_text())["records"]
    found = {(entry["what"], entry["candidate"]): entry for entry in records}
    said = re.search(
        r"after `wide\.optimize` keeps .*: ([\d.]+)x in prefill \(4096 tokens\) and ([\d.]+)x in a decode step.*\s.*"
        r"\(([\d.]+) against ([\d.]+) ms, ([\d.]+) against ([\d.]+) ms\)",
        README,
    )
    assert [said[1], said[2]] == [f"{found[what, 'optimised']['speedup']:.2f}" for what in ("prefill", "decode")]
    for number, (what, length, digits) in ((3, ("prefill", 4096, 0)), (5, ("decode", 2048, 1))):
        peers = (found[what, "dense"], forward(what, length, candidate="dense"))
        assert [said[number], said[number + 1]] == [f"{peer['median_us'] / 1e3:.{digits}f}" for peer in peers]


def cell(row, target, metric="token_perplexity", *, stage="calibrated"):
    wanted = {"row": row, "target": target, "seed": 17, "stage": stage}
    cells = BENCHMARK["comparisons"]["nominal"]["cells"]
    return next(entry[metric] for entry in cells if wanted.items() <= entry.items())


def test_the_better_recipe_is_as_good_and_as_costly_as_measured():
    published = next(run for run in BENCHMARK["runs"] if (run["run"], run["subject"]) == ("base", "stage 1"))
    better, recovered = RECIPES["all_lr5e-3", "stage 1"], RECIPES["s2_lr1e-3", "stage 1+2"]
    dense = json.loads((RECORDS / "lab-recipes.json").read_text())["dense_token_perplexity"]
    gaps = [math.log(run["token_perplexity"] / dense) for run in (published, better)]
    beside = RECIPES["smooth_lr5e-3", "stage 1"]
    assert "smooth_lr5e-3" in better["together_with"]
    cost = (better["training.seconds"] + better["start.seconds"]) / beside["training.seconds"]
    whole = json.loads((RECORDS / "lab-recipes.json").read_text())
    said = re.search(
        r"([\d.]+)x the time, stage 1 ends at ([\d.]+) instead of ([\d.]+): the gap .* falls by (\d+) % "
        r"\(three seeds: ([\d.]+) to ([\d.]+)\), and on WikiText-2 by (\d+) %\. With LoRA it ends at ([\d.]+);"
        r"[^()]*\(a dense model\s+with the same: ([\d.]+)\)",
        README,
    )
    seeds = [better["token_perplexity"], *(RECIPES[run, "stage 1"]["token_perplexity"] for run in ("fit18", "fit19"))]
    beside_dense = {(entry["subject"], entry["metric"]): entry["value"] for entry in whole["dense_with_lora"]["values"]}
    figures = [better["token_perplexity"], published["token_perplexity"], min(seeds), max(seeds)]
    figures += [recovered["token_perplexity"], beside_dense["dense/0/17/recovered", "token_perplexity"]]
    assert said[1] == f"{cost:.2f}"
    assert [said[2], said[3], said[5], said[6], said[8], said[9]] == [f"{figure:.1f}" for figure in figures]
    assert said[4] == f"{100 * (1 - gaps[1] / gaps[0]):.0f}"
    words = [whole["tasks"][side]["wikitext"]["value"] for side in ("pruned", "dense")]
    words.append(quality("flops50_g128", "stage 1", "wikitext2_word_perplexity"))
    gaps = [math.log(words[index] / words[1]) for index in (0, 2)]
    assert said[7] == f"{100 * (1 - gaps[0] / gaps[1]):.0f}"


FIRST_RESULTS = {
    "**WIDE, better recipe** (below), G = 128": "wide-fitted",
    "Týr": "tyr",
    "**WIDE** as published, G = 32": "wide-32",
    "**WIDE** as published, G = 128": "wide",
    "**WIDE-uniform**, G = 128": "wide-uniform",
    "DDP": "ddp",
    "SliceGPT": "slicegpt",
    "BlockPruner": "blockpruner",
}
COLUMNS = ((QUARTER, "0.25"), (QUARTER_OF_WORK, "0.25"), (SEEDS, "0.5"), (EQUAL_WORK, "0.5"))


def over_seeds(records, row, target, metric="token_perplexity"):
    keys = ((f"{row}/{target}/{seed}/recovered", metric) for seed in (17, 18, 19))
    found = [records[key] for key in keys if key in records]
    assert len(found) in (1, 3)
    return found


@pytest.mark.parametrize("name", FIRST_RESULTS)
def test_first_results_are_those_of_their_records(name):
    _, *cells = rows(name)[0]
    for said, (records, target) in zip(cells, COLUMNS, strict=True):
        found = over_seeds(records, FIRST_RESULTS[name], target)
        spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
        assert said == f"{statistics.mean(found):.1f}{spread}"


def test_what_is_said_of_the_first_results_holds():
    for records, target in COLUMNS:
        means = {row: statistics.mean(over_seeds(records, row, target)) for row in FIRST_RESULTS.values()}
        assert records[f"skipgpt/{target}/17/recovered", "token_perplexity"] > max(means.values())
        assert min(means, key=means.get) == "wide-fitted"
        words = {row: statistics.mean(over_seeds(records, row, target, "word_perplexity")) for row in means}
        published = min(value for row, value in words.items() if row in ("wide", "wide-32", "wide-uniform"))
        assert words["tyr"] < (1.01 if records is SEEDS else 1) * published
    said = re.search(r"\(dense ([\d.]+), without LoRA ([\d.]+)\)", README)
    stages = [EQUAL_LORA[f"dense/0/17/{stage}", "token_perplexity"] for stage in ("recovered", "calibrated")]
    assert list(said.groups()) == [f"{figure:.1f}" for figure in stages]
    said = re.search(r"saves more of the work \(([\d.]+) %; WIDE ([\d.]+) %\)", README)
    work = [over_seeds(SEEDS, row, "0.5", "sparsity.linear_flops_layers") for row in ("tyr", "wide")]
    assert list(said.groups()) == [f"{100 * statistics.mean(found):.1f}" for found in work]


def test_rows_of_equal_tokens_are_those_of_their_records():
    equal = re.search(
        r"Týr comes to ([\d.]+),\s+ahead of every row of WIDE as published and behind the better recipe "
        r"\(([\d.]+) at 50 %\), SliceGPT to ([\d.]+), with more than the others DDP to ([\d.]+)\.",
        README,
    )
    longer = [EQUAL_TOKENS[f"{row}/0.5/17/recovered", "token_perplexity"] for row in ("tyr", "slicegpt", "ddp")]
    at_half = {row: SEEDS[f"{row}/0.5/17/recovered", "token_perplexity"] for row in ROUTED}
    longer.insert(1, at_half["wide-fitted"])
    assert list(equal.groups()) == [f"{figure:.1f}" for figure in longer]
    assert [row for row, value in at_half.items() if value < longer[0]] == ["wide-fitted"]


def test_small_models_and_the_dense_perplexity_are_those_of_the_records():
    profile = json.loads((ROOT / "docs/results/lab-88m/runs/fitted-50-routers/profile/endtoend.json").read_text())
    own = next(
        entry for entry in profile["records"] if (entry["what"], entry["candidate"]) == ("prefill", "own routing")
    )
    said = re.search(r"Small models gain nothing: .*\(prefill ([\d.]+)x\)", README)
    assert said[1] == f"{own['speedup']:.2f}"
    dense = json.loads((RECORDS / "lab-recipes.json").read_text())["dense_token_perplexity"]
    of_run = re.findall(r"held[- ]out (?:perplexity|text) \(dense (\d+\.\d+)\)", README)
    assert of_run == [f"{dense:.1f}"]
    cells = BENCHMARK["comparisons"]["nominal"]["cells"]
    own = next(entry for entry in cells if (entry["row"], entry["stage"]) == ("dense", "calibrated"))
    assert f"{own['token_perplexity']:.1f}" == f"{dense:.1f}"
