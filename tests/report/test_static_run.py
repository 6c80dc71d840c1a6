"""A run of a static method: all layers are shown, and nothing is asked for that such a run cannot have."""

import csv
import re

import pytest
from report_words import draw_svg
from test_report import record

from wide.cli.main import main
from wide.models.cost import Sparsity
from wide.records import RecordFile, read_records
from wide.report.folders import draw_folder
from wide.report.run_figures import FIGURES
from wide.report.selection import Selection
from wide.runs.measuring import sparsity_records

pytestmark = pytest.mark.usefixtures("drawn_at_once")

SHARES = ("attention", "ffn", "mean", "linear_flops", "linear_flops_with_fixed", "linear_flops_layers")


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model_folder, prose_folder):
    pytest.importorskip("matplotlib")
    output = tmp_path_factory.mktemp("runs") / "run"
    code = main(
        [
            *("prune", "--method", "shortened-ppl", "--sparsity", "0.5", "--device", "cpu"),
            *("--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", str(output)),
            *("--shortened-ppl.num_windows=2", "--shortened-ppl.window_length=32"),
            *("--shortened-ppl.protect_first=0", "--shortened-ppl.protect_last=0"),
            *("--train.sequence_length", "32", "--eval.tokens", "256", "--eval.window", "64"),
        ]
    )
    assert code == 0
    return output


def by_layer(records):
    return {(each.metric, each.layer): each.value for each in records if each.layer is not None}


def test_layers_that_a_static_method_keeps_are_shown_with_zero(run):
    with (run / "figures/layers.csv").open() as stream:
        rows = [(row["half"], row["layer"], float(row["skipped_share"])) for row in csv.DictReader(stream)]
    assert [row[:2] for row in rows] == [(half, layer) for half in ("attention", "FFN") for layer in "01"]
    assert sorted(share for *_, share in rows) == [0.0, 0.0, 1.0, 1.0]


def test_lora_on_a_static_adapter_says_nothing_of_routers(run, tiny_model_folder, prose_folder, tmp_path, capsys):
    given = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--adapter", str(run), "--device=cpu"]
    given += ["--recover.steps=1", "--recover.batch_size=2", "--recover.sequence_length=32"]
    given += ["--output", str(tmp_path / "run"), "--eval.tokens=256", "--eval.window=64"]
    assert main(["recover", *given]) == 0
    said = capsys.readouterr().out
    assert "pruned, with LoRA" in said
    page = (tmp_path / "run" / "report.html").read_text()
    for text in (said, page):
        assert "routers)" not in text
        assert "routers, LoRA" not in text
        assert "asked for" not in text
    records, _ = read_records(tmp_path / "run" / "records.jsonl")
    assert {"pruned", "pruned + LoRA"} <= {record.subject for record in records}
    # A run that has ended finds what it made.
    assert main(["recover", *given, "--resume"]) == 0
    assert "pruned + LoRA: finished before" in capsys.readouterr().out


def test_a_static_run_is_told_that_routers_are_measured(run):
    page = (run / "report.html").read_text()
    missing = re.findall("<li>([^<]*)</li>", page.partition("<h2>Not drawn</h2>")[2])
    routing = [line for line in missing if "a run with routers measures it" in line]
    assert len(missing) == len(routing) + 1 == 6
    assert "Stage 2" not in page
    assert "<h2>Training</h2>" not in page
    assert "LoRA adapts" not in page


def test_a_half_without_any_rate_has_no_records_by_layer():
    for rates, expected in (
        (((None, None), (1.0, None)), {("sparsity.attention", 0): 0.0, ("sparsity.attention", 1): 1.0}),
        (((None, None), (None, None)), {}),
    ):
        shares = dict.fromkeys((*SHARES, "parameters_removed", "kv_cache_kept"), 0.5)
        records = list(sparsity_records("pruned", Sparsity(**shares, layers=rates, tokens=0), "text"))
        assert by_layer(records) == expected


def pruned(*more):
    yield record("dense", "token_perplexity", 10.0)
    yield record("pruned", "token_perplexity", 20.0)
    yield from more


def test_lora_on_a_static_plan_has_a_course_and_a_caution(tmp_path):
    pytest.importorskip("matplotlib")
    lora = [record("pruned + LoRA", "token_perplexity", 12.0)]
    for metric in ("lm_loss", "sparsity.attention", "sparsity.ffn"):
        lora += [record("pruned + LoRA", f"training.{metric}", 4.0 - step / 10, step=step) for step in range(2)]
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(pruned(*lora))
    page = draw_folder(tmp_path)[0][0].read_text()
    assert "<h2>Training</h2>" in page
    assert "LoRA also learned from the training text" in page
    assert "part of what it gains is that" in page
    assert "Stage 2" not in page
    words = draw_svg(FIGURES[-1], Selection(*read_records(file.path)))[1]
    assert "LM loss: 4.00 at 0, 3.90 at 1" in words


def test_stage_2_is_spoken_of_where_there_is_one(tmp_path):
    pytest.importorskip("matplotlib")
    for subject, is_said in (("stage 1", False), ("stage 1+2", True)):
        file = RecordFile(tmp_path / subject / "records.jsonl")
        file.append(
            [record(each, "token_perplexity", 3.0) for each in ("dense", "stage 1")]
            + [record(subject, "token_perplexity", 2.0)]
        )
        page = draw_folder(file.path.parent)[0][0].read_text()
        assert ("Stage 2 also learned from the training text" in page) == is_said
