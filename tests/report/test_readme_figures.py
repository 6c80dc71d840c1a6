"""What the README says of quality and speed is what was measured: every figure is looked up among the records."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs/measurements/records"
README = (ROOT / "README.md").read_text()
QUALITY = json.loads((RECORDS / "lab-quality.json").read_text())
FORWARDS = json.loads((RECORDS / "h200/endtoend.json").read_text())["records"]
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
    for entry in QUALITY:
        kind = entry["run"].partition("_")[0].removeprefix("mean")
        metric, target = metrics[kind]
        assert 100 * abs(entry[metric] - target) <= said


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


def test_the_cost_of_skipping_nothing_is_that_of_the_records():
    _, said, _ = rows("nothing skipped")[0]
    measured = [entry["speedup"] for entry in FORWARDS if entry["candidate"] == "all execute"]
    assert numbers(said) == [pytest.approx(min(measured), abs=0.005), pytest.approx(max(measured), abs=0.005)]
