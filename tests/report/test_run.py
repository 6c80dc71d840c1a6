"""A whole small run: routing is measured, figures and curves are written, and all is drawn again from records."""

import importlib
import json

import pytest

from wide.cli.main import main
from wide.records import read_records
from wide.report.drawing import FOLDER
from wide.report.run_figures import FIGURES
from wide.report.selection import Selection
from wide.report.table import summary_table
from wide.runs.measuring import training_records

pytestmark = pytest.mark.usefixtures("drawn_at_once")

CURVES = {"loss", "lm_loss", "sparsity.attention", "sparsity.ffn", "temperature", "tokens_per_second"}
SHORT = ["--train.steps", "3", "--train.batch_size", "2", "--train.sequence_length", "32"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model_folder, prose_folder):
    output = tmp_path_factory.mktemp("runs") / "run"
    code = main(
        [
            "prune",
            *("--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", str(output)),
            *("--sparsity", "0.5", "--ffn_group_size", "16", "--router_rank", "4", "--device", "cpu", *SHORT),
            *("--eval.tokens", "256", "--eval.window", "64", "--report", "false"),
        ]
    )
    assert code == 0
    return output


def test_the_routing_of_the_trained_model_is_among_the_records(run):
    records, _ = read_records(run / "records.jsonl")
    measured = {record.metric for record in records if record.subject == "stage 1"}
    for half in ("attention", "ffn"):
        for name in ("by_group", "same_as_previous", "token_correlation", "group_correlation", "flips_bfloat16"):
            assert f"routing.{half}.{name}" in measured
    assert not [r for r in records if r.subject == "dense" and r.metric.startswith("routing.")]
    sample = Selection(records).content("stage 1", "routing.sample")
    assert len(sample["tokens"]) == len(sample["ffn"]) == 64
    assert len(sample["ffn"][0]) == 2


def test_curves_are_written_for_tensorboard_where_it_is_installed(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard/stage1"))
    board.Reload()
    assert {f"stage 1/{name}" for name in CURVES} <= set(board.Tags()["scalars"])
    assert [event.step for event in board.Scalars("stage 1/lm_loss")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "at least one folder"),
        (["--to", "x"], 2, "no flag --to"),
        (["x", "--output="], 2, "--output needs a folder"),
        (["nowhere"], 1, "no folder nowhere"),
        (["--help"], 0, "usage: wide report"),
    ],
)
def test_words_that_cannot_be_understood_are_refused(words, code, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == code
    said = capsys.readouterr()
    assert message in said.out + said.err


def test_reports_are_drawn_from_records(run):
    assert not (run / "report.html").exists()
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<h2>Not drawn</h2>" not in page
    assert "The speed of this model was not measured" in page
    for figure in FIGURES:
        assert (run / FOLDER / f"{figure.name}.csv").is_file()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.mark.parametrize(
    ("stage", "where"),
    [
        ("stage1", "wide.training.stages.meet_target"),
        pytest.param("stage1", "wide.runs.materials.evaluate", marks=pytest.mark.slow),
        pytest.param("stage2", "wide.training.stages.meet_target", marks=pytest.mark.slow),
        ("stage2", "wide.runs.materials.evaluate"),
    ],
)
def test_a_resume_keeps_what_was_measured_and_one_with_nothing_to_do_changes_nothing(
    stage, where, tmp_path, tiny_model_folder, prose_folder, monkeypatch, capsys
):
    output = tmp_path / "run"
    given = ["prune", "--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", str(output)]
    given += ["--sparsity", "0.5", "--ffn_group_size", "16", "--router_rank", "4", "--device", "cpu", *SHORT]
    given += ["--recover.steps=2", "--recover.batch_size=2", "--recover.sequence_length=32", "--recover.lora_rank=2"]
    given += ["--eval.tokens", "128", "--eval.window", "64", "--tensorboard", "false"]
    module, _, name = where.rpartition(".")
    real = getattr(importlib.import_module(module), name)

    def stop(*args, **options):
        if (output / stage / "metrics.jsonl").is_file():
            raise KeyboardInterrupt
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(where, stop)
        assert main(given) == 130
    assert main([*given, "--resume"]) == 0
    provenance = json.loads((output / "adapter/wide_config.json").read_text())["provenance"]
    for part in ("prune", "recover"):
        facts = provenance[part]
        assert facts["at_the_end_of_training"]["lm_loss"] > 0
        assert facts["tokens_per_second"] > 0
        assert 0 < facts["seconds_before"] <= facts["seconds"] or stage == "stage2" or part == "recover"
    assert provenance["held_out"]["token_perplexity"]["perplexity"] > 1
    records = read_records(output / "records.jsonl")[0]
    places = [(record.subject, record.metric, record.layer, record.step) for record in records]
    assert len(set(places)) == len(places)
    assert summary_table(Selection(records)).header[-1] == "trained tokens/s"
    before = contents(output)
    capsys.readouterr()
    assert main([*given, "--resume"]) == 0
    assert contents(output) == before
    assert "stage 1+2: finished before" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [["--recover.steps", "2"], ["--eval.tokens", "0"]])
def test_a_method_that_is_resumed_when_it_is_finished_changes_nothing(
    changes, tmp_path, tiny_model_folder, prose_folder
):
    output = tmp_path / "run"
    given = ["prune", "--model", str(tiny_model_folder), "--data", str(prose_folder), "--output", str(output)]
    given += ["--method", "slicegpt", "--sparsity", "0.5", "--device", "cpu", "--train.sequence_length", "32", *changes]
    given += [
        "--slicegpt.num_windows=2",
        "--slicegpt.window_length=32",
        "--recover.batch_size=2",
        "--recover.sequence_length=32",
    ]
    given += [*(["--eval.tokens", "128"] if "--eval.tokens" not in changes else []), "--eval.window", "64"]
    assert main([*given, "--report", "false"]) == 0
    before = contents(output)
    assert main([*given, "--report", "false", "--resume"]) == 0
    assert contents(output) == before


def test_the_records_of_training_are_those_of_the_summary(tmp_path):
    run = Selection(list(training_records("stage 1", {"tokens_per_second": 5.0}, tmp_path)))
    assert run.number("stage 1", "training.tokens_per_second") == 5.0
    assert not list(training_records("pruned", {"tokens_per_second": None}, tmp_path / "none"))
