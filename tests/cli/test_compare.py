"""A whole comparison on a tiny model: cells, resuming, failures, shards, tables; and `wide prune --method`."""

import csv
import json
import shutil
from contextlib import ExitStack

import pytest
import yaml

import wide
from wide.cli.main import main
from wide.comparison import run as cell_runner
from wide.comparison.run import draw
from wide.data import documents
from wide.data.batches import load_blocks
from wide.data.tokenizer import load_tokenizer
from wide.errors import ConfigError, DataError
from wide.methods.apply import shares_of
from wide.models.attach import attachment
from wide.records import Cell, Stage, read_records
from wide.report.selection import Selection
from wide.runs.folder import RunFolder
from wide.runs.process import held

SHORT = [
    *("--dtype=float32", "--device=cpu", "--sparsities=0.5"),
    *("--train.steps=2", "--train.batch_size=2", "--train.sequence_length=32", "--eval.tokens=128", "--eval.window=32"),
    *("--recover.batch_size=2", "--recover.sequence_length=32"),
]
METHODS = "--methods=slicegpt,wide"


@pytest.fixture(scope="module")
def everyday(tiny_model_folder, prose_folder, tmp_path_factory, drawn_at_once):
    """Return a command line; the settings of methods stand in a file, so that it serves any of them."""
    settings = tmp_path_factory.mktemp("settings") / "methods.yaml"
    wide = {"ffn_group_size": 16, "router_rank": 4}
    settings.write_text(yaml.safe_dump({"slicegpt": {"num_windows": 2, "window_length": 32}, "wide": wide}))
    where = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--config", str(settings)]
    return ["compare", METHODS, *SHORT, *where]


@pytest.fixture(scope="module")
def finished(everyday, tmp_path_factory):
    """Return the folder of a finished comparison of two seeds with LoRA."""
    folder = tmp_path_factory.mktemp("comparisons") / "run"
    assert main([*everyday, "--output", str(folder), "--seeds=1,2", "--recover.steps=1"]) == 0
    return folder


def rows(folder):
    lines = csv.DictReader((folder / "table.csv").read_text().splitlines())
    return {(line["method"], line["recovered"] == "1"): line for line in lines}


def test_every_row_is_measured(finished):
    found = rows(finished)
    assert list(found) == [(m, r) for m in ("dense", "slicegpt", "wide") for r in (False, True)]
    for (method, recovered), line in found.items():
        assert line["seeds"] == ("1" if (method, recovered) == ("dense", False) else "2")
        assert float(line["token_perplexity"]) > 1
        assert line["failed"] == ""
    assert float(found["dense", False]["token_perplexity.ratio"]) == 1.0
    assert float(found["slicegpt", False]["sparsity.mean"]) == pytest.approx(0.5)
    assert float(found["slicegpt", True]["sparsity.mean"]) == pytest.approx(0.5)
    assert float(found["wide", False]["method.tokens_backward"]) == 2 * 2 * 32
    assert float(found["wide", True]["method.tokens_backward"]) == 2 * 32
    assert found["slicegpt", False]["token_perplexity"] != found["slicegpt", True]["token_perplexity"]


def test_a_row_with_lora_records_its_own_shares_and_all_it_read(everyday, tiny_model_folder, prose_folder, tmp_path):
    pytest.importorskip("peft")
    lora = ["--recover.steps=6", "--recover.learning_rate=0.05", "--recover.distillation=0.5"]
    assert main([*everyday, "--methods=wide", *lora, "--output", str(tmp_path / "run")]) == 0
    cell = Cell("wide", 0.5, 17)
    folder = tmp_path / "run" / "cells" / cell.folder
    model = wide.load(tiny_model_folder, folder / "recovered" / "adapter", dtype="float32")
    # Before what held-out text says of it.
    records = [r for r in read_records(folder / "records.jsonl")[0] if not r.where]
    first, found = ({r.metric: r.value for r in records if r.subject == Stage(cell, lora)} for lora in (False, True))
    blocks = load_blocks(prose_folder, load_tokenizer(tiny_model_folder), split="train", sequence_length=32)
    shares = shares_of(model, blocks)
    assert found["sparsity.mean"] == pytest.approx(shares["nominal"], abs=1e-6)
    assert found["sparsity.linear_flops_layers"] == pytest.approx(shares["linear_flops"], abs=1e-6)
    assert found["sparsity.mean"] != first["sparsity.mean"]
    facts = attachment(model).provenance["recover"]
    assert found["method.tokens_backward"] == facts["tokens"] == 6 * 2 * 32
    # Of the teacher, and of the thresholds.
    assert found["method.tokens_forward"] == facts["tokens"] + facts["inference"]["tokens_forward"] > facts["tokens"]


def test_python_compares_as_the_command_does(finished, everyday, tiny_model_folder, prose_folder, tmp_path, capsys):
    found = wide.compare(
        tiny_model_folder,
        prose_folder,
        ["slicegpt", "wide"],
        output=tmp_path / "run",
        sparsities=[0.5],
        seeds=[1, 2],
        settings={
            "slicegpt": {"num_windows": 2, "window_length": 32},
            "wide": {"ffn_group_size": 16, "router_rank": 4},
        },
        stage=wide.StageConfig(steps=2, batch_size=2, sequence_length=32),
        recover=wide.RecoverConfig(steps=1, batch_size=2, sequence_length=32),
        tokens=128,
        window=32,
        dtype="float32",
        device="cpu",
    )
    lines = rows(finished)
    assert [(row["method"], row["recovered"] == 1) for row in found.rows] == list(lines)
    for row in found.rows:
        line = lines[row["method"], row["recovered"] == 1]
        assert row["token_perplexity"] == pytest.approx(float(line["token_perplexity"]))
        assert row["token_perplexity.ratio"] == pytest.approx(float(line["token_perplexity.ratio"]))
        assert (row["seeds"], row["failed"]) == (int(line["seeds"]), "")
    assert "slicegpt + LoRA" in found.table
    assert found.folder == tmp_path / "run"
    # The command goes on with it.
    capsys.readouterr()
    assert main([*everyday, "--output", str(found.folder), "--seeds=1,2", "--recover.steps=1", "--resume"]) == 0
    assert capsys.readouterr().out.count("finished before") == 11


def test_python_goes_on_with_what_the_command_began(everyday, tiny_model_folder, prose_folder, tmp_path, capsys):
    usual = wide.RecoverConfig()
    given = [f"--recover.batch_size={usual.batch_size}", f"--recover.sequence_length={usual.sequence_length}"]
    assert main([*everyday, "--output", str(tmp_path / "run"), "--methods=slicegpt", *given]) == 0
    capsys.readouterr()
    found = wide.compare(
        tiny_model_folder,
        prose_folder,
        ["slicegpt"],
        output=tmp_path / "run",
        sparsities=[0.5],
        settings={
            "slicegpt": {"num_windows": 2, "window_length": 32},
            "wide": {"ffn_group_size": 16, "router_rank": 4},
        },
        stage=wide.StageConfig(steps=2, batch_size=2, sequence_length=32),
        tokens=128,
        window=32,
        dtype="float32",
        device="cpu",
        resume=True,
    )
    assert capsys.readouterr().out.count("finished before") == len(found.rows) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": {"slicegpt": {"roundto": 8}}}, "did you mean round_to?"),
        ({"settings": {"slicegpta": {}}}, "did you mean slicegpt?"),
        ({"methods": ["slicegpta"]}, "did you mean slicegpt?"),
        ({"sparsities": [0.0]}, "lie in"),
        ({"tokens": 0}, "nothing to compare by"),
    ],
)
def test_python_refuses_what_is_no_comparison(changes, words, tmp_path):
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        wide.compare("./nowhere", "nowhere", **{"methods": ["slicegpt"], "output": tmp_path / "run"} | changes)
    assert not (tmp_path / "run").exists()


def test_a_cell_does_not_depend_on_those_before_it(finished, everyday, tmp_path):
    assert main([*everyday, "--output", str(tmp_path / "run"), "--seeds=2", "--methods=wide"]) == 0
    name = "cells/wide-0.5-seed2"
    alone, among_others = (
        Selection(*read_records(folder / name / "records.jsonl")).number(
            Stage(Cell("wide", 0.5, 2), False), "token_perplexity"
        )
        for folder in (tmp_path / "run", finished)
    )
    assert alone == among_others


def test_each_cell_has_its_folder_with_adapter_and_records(finished):
    cells = sorted(path.name for path in (finished / "cells").iterdir())
    assert cells == sorted(
        [f"dense-0-seed{seed}" for seed in (1, 2)]
        + [f"{method}-0.5-seed{seed}" for method in ("slicegpt", "wide") for seed in (1, 2)]
    )
    for cell in cells:
        assert (finished / "cells" / cell / "adapter" / "wide_config.json").is_file()
        assert (finished / "cells" / cell / "recovered" / "adapter" / "lora").is_dir()
        assert (finished / "cells" / cell / "records.jsonl").is_file()


@pytest.mark.parametrize("seed", [1, 2])
def test_routers_and_lora_of_a_cell_have_its_seed(finished, seed):
    adapter = finished / f"cells/wide-0.5-seed{seed}/recovered/adapter/wide_config.json"
    provenance = json.loads(adapter.read_text())["provenance"]
    assert [provenance[name]["stage"]["seed"] for name in ("prune", "recover")] == [seed, seed]


def test_tables_and_page_say_the_same(finished, capsys):
    table = (finished / "table.md").read_text()
    assert "| slicegpt + LoRA" in table
    assert "settings: num_windows 2 (original: 128)" in table
    page = (finished / "report.html").read_text()
    assert "<table>" in page
    assert "1 steps of 2 x 32 tokens" in page
    for name in ("table.md", "table.csv"):
        (finished / name).unlink()
    assert main(["report", str(finished)]) == 0
    assert (finished / "table.md").read_text() == table


def test_resuming_a_finished_comparison_runs_nothing(finished, everyday, monkeypatch, capsys):
    monkeypatch.setattr(cell_runner, "apply", None)
    monkeypatch.setattr(cell_runner, "recover", None)
    assert main([*everyday, "--output", str(finished), "--seeds=1,2", "--recover.steps=1", "--resume"]) == 0
    assert capsys.readouterr().out.count("finished before") == 11


def test_resuming_with_another_grid_is_refused(finished, everyday, capsys):
    assert main([*everyday, "--output", str(finished), "--seeds=1", "--recover.steps=1", "--resume"]) == 1
    assert "seeds '1,2' -> 1" in capsys.readouterr().err


@pytest.mark.parametrize("is_held_out", [False, True])
@pytest.mark.parametrize("command", ["compare", "prune"])
def test_what_was_begun_on_another_text_is_not_gone_on_with(
    command, is_held_out, everyday, tiny_model_folder, prose_folder, tmp_path, capsys
):
    shutil.copytree(prose_folder, tmp_path / "text")
    given = [*everyday, "--methods=slicegpt"]
    if command == "prune":
        given = ["prune", "--method=slicegpt", "--slicegpt.num_windows=2", "--slicegpt.window_length=32", *SHORT[:2]]
        given += ["--train.sequence_length=32", *SHORT[6:8], "--report=false", "--model", str(tiny_model_folder)]
    given += ["--data", str(tmp_path / "text"), "--output", str(tmp_path / "run")]
    assert main(given) == 0
    assert main([*given, "--resume"]) == 0
    files = sorted((tmp_path / "text").iterdir())
    edited = next(file for file in files if documents.is_held_out(file.name) is is_held_out)
    edited.write_text("Other words.")
    assert main([*given, "--resume"]) == 1
    assert "or the held-out text, is not what" in capsys.readouterr().err
    assert main([*given, "--overwrite"]) == 0


def test_a_failure_costs_no_other_cell_and_is_run_again(everyday, tmp_path, monkeypatch, capsys):
    real = cell_runner.apply

    def fail_for_slicegpt(model, method, *args, **kwargs):
        # Not in the rehearsal.
        if method.name == "slicegpt" and kwargs["output"] is not None:
            raise ConfigError("no | such\nluck")
        return real(model, method, *args, **kwargs)

    output = ["--output", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(cell_runner, "apply", fail_for_slicegpt)
        assert main([*everyday, *output]) == 1
    captured = capsys.readouterr()
    assert "1 of 3 cells failed" in captured.err
    assert "failed: slicegpt, 0.5, seed 17: ConfigError: no | such luck" in captured.out
    assert rows(tmp_path / "run")["slicegpt", False]["failed"] == "ConfigError: no | such luck"
    assert float(rows(tmp_path / "run")["wide", False]["token_perplexity"]) > 1
    assert main([*everyday, *output, "--resume"]) == 0
    assert capsys.readouterr().out.count("finished before") == 2
    assert rows(tmp_path / "run")["slicegpt", False]["failed"] == ""


def test_tasks_give_word_perplexity_accuracy_and_retention(everyday, tmp_path):
    pytest.importorskip("lm_eval")
    choices = [{"goal": f"Open {n}", "sol1": "Turn the lid", "sol2": "Sleep", "label": n % 2} for n in range(6)]
    (tmp_path / "piqa.validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in choices))
    pages = [" = A page = \n\n Some text with words . \n", " = Another = \n\n Text of other words . \n"]
    (tmp_path / "test.pages.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    tasks = ["--eval.tokens=0", "--eval.tasks=wikitext,piqa", "--eval.local_data", str(tmp_path)]
    assert main([*everyday, "--output", str(tmp_path / "run"), "--methods=slicegpt", *tasks]) == 0
    dense, slicegpt = rows(tmp_path / "run").values()
    assert float(slicegpt["word_perplexity"]) > 1
    assert 1 < float(slicegpt["wikitext.token_perplexity"]) < float(slicegpt["word_perplexity"])
    accuracies = float(slicegpt["accuracy.average"]), float(dense["accuracy.average"])
    assert float(slicegpt["accuracy.retention"]) == pytest.approx(accuracies[0] / accuracies[1])
    assert float(slicegpt["accuracy.average.error"]) > 0
    assert slicegpt["token_perplexity"] == ""
    for name in ("word_perplexity", "wikitext.token_perplexity", "accuracy.piqa (6-item subset)"):
        assert float(slicegpt[f"{name}.error"]) > 0
    table = (tmp_path / "run" / "table.md").read_text()
    assert "50 %: retention %" in table
    assert "50 %: ppl" not in table
    assert "PIQA (6-item subset)" in table


def test_variants_of_a_method_are_rows_of_one_table(everyday, tmp_path):
    file = tmp_path / "variants.yaml"
    variants = {
        "wide-g8": {"method": "wide", "ffn_group_size": 8},
        "wide-even": {"method": "wide", "uniform": True},
        "wide-flops": {"method": "wide", "match": "linear_flops"},
    }
    targets = {"wide": "mean", "wide-g8": "mean", "wide-even": "uniform", "wide-flops": "linear_flops"}
    file.write_text(yaml.safe_dump({"variants": variants}))
    given = [*everyday, "--config", str(file), "--output", str(tmp_path / "run"), "--methods", ",".join(targets)]
    assert main(given) == 0
    found = rows(tmp_path / "run")
    assert [method for method, _ in found] == ["dense", *targets]
    sizes = {}
    for name in targets:
        adapter = tmp_path / "run" / "cells" / f"{name}-0.5-seed17" / "adapter" / "wide_config.json"
        config = json.loads(adapter.read_text())
        sizes[name] = config["plan"]["layers"][0]["ffn"]["grouping"]["group_size"]
        assert config["provenance"]["prune"]["objective"]["target"] == targets[name]
    assert sizes == {"wide": 16, "wide-g8": 8, "wide-even": 16, "wide-flops": 16}
    table = (tmp_path / "run" / "table.md").read_text()
    assert "wide-g8: settings: ffn_group_size 8" in table
    assert "wide-flops: the target counts linear FLOPs of the decoder layers, in the other rows as the method" in table
    assert main([*given, "--resume"]) == 0


def test_an_interrupted_comparison_goes_on_where_it_stopped(everyday, tmp_path, monkeypatch, capsys):
    output = ["--output", str(tmp_path / "run"), "--recover.steps=1"]
    real = cell_runner.recover

    def interrupt(model, *args, **kwargs):
        if (tmp_path / "run/cells/slicegpt-0.5-seed17").exists():
            raise KeyboardInterrupt
        return real(model, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cell_runner, "recover", interrupt)
        assert main([*everyday, *output]) == 130
    said = capsys.readouterr().err
    assert "slicegpt 0.5 seed 17 + LoRA stopped; what it decided is kept; 1 of 3 cells is finished and kept in" in said
    assert "--resume" in said
    decided = []
    real_apply = cell_runner.apply

    def note(model, method, *args, **kwargs):
        decided.append(method.name)
        return real_apply(model, method, *args, **kwargs)

    monkeypatch.setattr(cell_runner, "apply", note)
    assert main([*everyday, *output, "--resume"]) == 0
    # What slicegpt had decided came back from its adapter.
    assert decided == ["wide"]
    assert rows(tmp_path / "run")["slicegpt", True]["seeds"] == "1"


def test_lora_leaves_a_threshold_alone_that_the_row_does_not_calibrate(everyday, tmp_path):
    output = tmp_path / "run"
    rows_of = ["--methods=wide", "--wide.calibrate_threshold=false"]
    assert main([*everyday, *rows_of, "--recover.steps=1", "--output", str(output)]) == 0
    adapter = output / "cells/wide-0.5-seed17/recovered/adapter/wide_config.json"
    provenance = json.loads(adapter.read_text())["provenance"]
    for stage in ("prune", "recover"):
        assert set(provenance[stage]["inference"]["threshold"].values()) == {0.0}
        assert provenance[stage]["inference"]["adjusted"] is False


def test_a_grid_that_was_cut_while_it_was_written_is_whole_again(everyday, tmp_path, capsys):
    """A full disk or a kill leaves the first of its lines, and without the last ones no table can be drawn."""
    given = [*everyday, "--methods=slicegpt", "--output", str(tmp_path / "run")]
    assert main(given) == 0
    grid = tmp_path / "run/grid.jsonl"
    lines = grid.read_text().splitlines(keepends=True)
    cut = next(number for number, line in enumerate(lines) if '"grid.methods"' in line)
    grid.write_text("".join(lines[:cut]) + lines[cut][:20])
    assert main([*given, "--resume"]) == 0, capsys.readouterr().err
    assert ("slicegpt", False) in rows(tmp_path / "run")


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("held_out_documents", "stopped; nothing was written\n"),
        ("dense", "[1/3] dense seed 17 stopped; nothing of it is kept; none of 3 cells is finished, and the same"),
        ("slicegpt", "[2/3] slicegpt 0.5 seed 17 stopped; nothing of it is kept; 1 of 3 cells is finished and kept in"),
    ],
)
def test_an_interrupted_comparison_says_what_is_kept(where, words, everyday, tmp_path, monkeypatch, capsys):
    real_apply = cell_runner.apply

    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    def of_method(model, method, *args, **options):
        is_due = method.name == where and options["output"] is not None
        return interrupt() if is_due else real_apply(model, method, *args, **options)

    if where == "held_out_documents":
        monkeypatch.setattr("wide.runs.materials.held_out_documents", interrupt)
    monkeypatch.setattr(cell_runner, "apply", of_method)
    assert main([*everyday, "--output", str(tmp_path / "run")]) == 130
    assert words in capsys.readouterr().err
    assert (tmp_path / "run").exists() == (where != "held_out_documents")


def test_processes_share_a_folder(everyday, tmp_path, monkeypatch, capsys):
    given, claim, cells = [*everyday, "--output", str(tmp_path / "run")], RunFolder.claim, tmp_path / "run/cells"
    given += ["--shard=next", "--keep_adapters=false"]
    others = [cells / name for name in ("dense-0-seed17", "wide-0.5-seed17")]
    with ExitStack() as other, monkeypatch.context() as patch:
        patch.setattr(RunFolder, "claim", lambda self: (claim(self), *(other.enter_context(held(o)) for o in others)))
        assert main(given) == 0
    assert [path.parent.name for path in cells.glob("*/records.jsonl")] == ["slicegpt-0.5-seed17"]
    assert not (cells / "slicegpt-0.5-seed17/adapter").exists()
    # Nothing is known about the dense model yet, so nothing is relative to it.
    assert rows(tmp_path / "run")["slicegpt", False]["token_perplexity.ratio"] == ""
    assert main(given) == 0
    assert {line["seeds"] for line in rows(tmp_path / "run").values()} == {"1"}
    assert main([*given, "--train.steps=3"]) == 1
    assert "train.steps 2 -> 3" in capsys.readouterr().err


def test_overwriting_starts_anew_but_leaves_other_files(everyday, tmp_path):
    output = ["--output", str(tmp_path / "run"), "--methods=slicegpt"]
    assert main([*everyday, *output]) == 0
    (tmp_path / "run" / "mine.txt").write_text("mine")
    before = (tmp_path / "run/cells/slicegpt-0.5-seed17/records.jsonl").stat().st_mtime_ns
    assert main([*everyday, *output]) == 1
    assert main([*everyday, *output, "--overwrite"]) == 0
    assert (tmp_path / "run/cells/slicegpt-0.5-seed17/records.jsonl").stat().st_mtime_ns != before
    assert (tmp_path / "run" / "mine.txt").is_file()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--data=nowhere.jsonl"], "nowhere.jsonl"),
        (["--model=./nowhere"], "./nowhere"),
        (["--eval.tasks=chess"], "no task 'chess'"),
        (["--train.batch_size=4", "--train.micro_batch_size=3"], "does not divide"),
        (["--slicegpt.window_length=33"], "slicegpt.window_length 33 is longer than the sequences of 32 tokens"),
        (["--methods=ddp", "--ddp.sequence_length=64"], "ddp.sequence_length 64 is longer than the sequences of 32"),
        (["--slicegpt.round_to=24", "--sparsities=0.4"], "slicegpt 0.4 seed 17: a sparsity of 0.4 leaves 19 of 32"),
        (["--methods=wide", "--ffn_group_size=7"], "ffn_group_size 7 does not divide the FFN width 64"),
        (["--recover.steps=1", "--recover.sequence_length=100000"], "100000"),
        (["--eval.window=129"], "eval.window 129 exceeds the 128 positions of the model"),
    ],
)
def test_bad_input_writes_nothing(changes, words, everyday, tmp_path, capsys):
    output = tmp_path / "run"
    code = main([*everyday, "--output", str(output), "--methods=slicegpt", *changes])
    assert code == 1
    assert words in capsys.readouterr().err
    assert not output.exists()


def test_tasks_alone_have_no_longer_window_than_the_model_has_positions(everyday, tmp_path, capsys):
    output, asked = tmp_path / "run", ["--eval.tokens=0", "--eval.tasks=piqa", "--eval.window=129"]
    (tmp_path / "piqa.validation.jsonl").write_text('{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}\n')
    assert main([*everyday, "--output", str(output), "--eval.local_data", str(tmp_path), *asked]) == 1
    assert "eval.window 129 exceeds the 128 positions of the model" in capsys.readouterr().err
    assert not output.exists()


def test_folders_that_hold_no_comparison_are_refused(tmp_path, capsys):
    with pytest.raises(DataError, match=r"holds neither records\.jsonl of a run"):
        draw(tmp_path)


@pytest.mark.parametrize("method", ["slicegpt", "skipgpt"])
def test_prune_takes_any_method_and_adds_lora(method, tiny_model_folder, prose_folder, tmp_path, capsys):
    given = ["prune", "--method", method, "--model", str(tiny_model_folder), "--data", str(prose_folder)]
    given += ["--output", str(tmp_path / "run"), "--dtype=float32", "--device=cpu", "--report=false"]
    given += ["--train.sequence_length=32", "--eval.tokens=128", "--eval.window=32"]
    given += ["--recover.steps=1", "--recover.batch_size=2", "--recover.sequence_length=32"]
    own = ["--slicegpt.num_windows=2", "--slicegpt.window_length=32"]
    given += own if method == "slicegpt" else ["--train.steps=2", "--train.batch_size=2"]
    assert main(given) == 0
    run = Selection(*read_records(tmp_path / "run" / "records.jsonl"))
    assert run.subjects() == ["dense", "pruned", "pruned + LoRA"]
    assert run.text("run", "target").startswith(f"{method}, 50%")
    provenance = json.loads((tmp_path / "run/adapter/wide_config.json").read_text())["provenance"]
    assert provenance["method"]["method"] == method
    assert provenance["recover"]["steps"] == 1
    assert main(["inspect", "--adapter", str(tmp_path / "run")]) == 0
    assert f"method: {method}" in capsys.readouterr().out
    assert main([*given, "--resume"]) == 0


def test_prune_at_linear_flops_with_the_papers_method(tiny_model_folder, prose_folder, tmp_path):
    given = ["prune", "--match=linear_flops", "--model", str(tiny_model_folder), "--data", str(prose_folder)]
    given += ["--output", str(tmp_path / "run"), "--dtype=float32", "--device=cpu", "--report=false"]
    given += ["--train.sequence_length=32", "--train.steps=2", "--train.batch_size=2", "--ffn_group_size=16"]
    assert main([*given, "--router_rank=4", "--eval.tokens=128", "--eval.window=32"]) == 0
    found = json.loads((tmp_path / "run/adapter/wide_config.json").read_text())["provenance"]
    assert (found["method"]["method"], found["method"]["match"]) == ("wide", "linear_flops")
    assert found["prune"]["objective"]["target"] == "linear_flops"
