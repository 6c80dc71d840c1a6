"""Commands that are refused before any work: nothing is computed, nothing written, and the folder stays free."""

import io
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import wide
import wide.runs.run
from wide.cli.main import main
from wide.config import WideConfig
from wide.data.progress import progress
from wide.errors import ConfigError
from wide.models.attach import attachment
from wide.training.modes import rehearsal
from wide.training.parallel import DataParallel
from wide.training.progress_log import ProgressLog, StageOptions

SMALL = ["--dtype=float32", "--device=cpu", "--train.sequence_length=32", "--eval.tokens=64", "--eval.window=32"]
WINDOWS = ["--{0}.num_windows=2", "--{0}.window_length=32"]
TRAINED = ["--train.steps=1", "--train.batch_size=2"]


def command(model, data, output, *given):
    return ["prune", "--model", str(model), "--data", str(data), "--output", str(output), *SMALL, *given]


def of(method, *given):
    return [f"--method={method}", *(flag.format(method) for flag in given)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (of("shortened-ppl", *WINDOWS, "--sparsity=0.95"), "are not protected"),
        (of("shortened-taylor", "--{0}.window_length=64", "--{0}.protect_first=0"), "window_length 64 is longer"),
        (of("tyr", "--{0}.window_length=64"), "window_length 64 is longer"),
        (of("slicegpt", *WINDOWS, "--sparsity=0.99", "--{0}.round_to=8"), "lower the sparsity or round_to"),
        (of("ddp", "--{0}.sequence_length=64"), "sequence_length 64 is longer"),
        (of("skipgpt", *TRAINED, "--match=linear_flops", "--sparsity=0.99"), "stay below"),
        (of("dllm-original", *TRAINED, "--sparsity=0.9", "--{0}.dense_layers=1"), "stay below 0.5"),
        (["--ffn_group_size=7", *TRAINED], "does not divide"),
        (
            ["--ffn_group_size=16", *TRAINED, "--sample.prompt=a", "--sample.tokens=200"],
            "sample: 2 tokens of prompt and",
        ),
    ],
)
def test_what_is_refused_leaves_nothing(given, words, tiny_model_folder, prose_folder, tmp_path, capsys):
    output = tmp_path / "run"
    assert main(command(tiny_model_folder, prose_folder, output, *given)) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert "perplexity" not in said.out
    assert not output.exists()


def test_a_run_that_was_to_be_replaced_survives_a_refusal(tiny_model_folder, prose_folder, tmp_path, capsys):
    output = tmp_path / "run"
    given = of("shortened-ppl", *WINDOWS, "--{0}.protect_first=0", "--{0}.protect_last=1")
    right = command(tiny_model_folder, prose_folder, output, *given, "--sparsity=0.5")
    wrong = command(tiny_model_folder, prose_folder, output, *given, "--sparsity=0.95", "--overwrite")
    assert main([*right]) == 0
    said = capsys.readouterr().out
    assert "pruned: deciding" in said
    assert "training" not in said
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert main(wrong) == 1
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_a_rehearsal_ends_where_text_is_read(tiny_model_folder):
    model, reached = AutoModelForCausalLM.from_pretrained(tiny_model_folder), []
    ids = torch.arange(4).unsqueeze(0)
    with rehearsal(model):
        model.lm_head(torch.zeros(1, model.config.hidden_size))
        reached.append("a part of the model")
        model(ids)
        reached.append("the model")
    assert reached == ["a part of the model"]
    with pytest.raises(ConfigError, match="no"), rehearsal(model):
        raise ConfigError("no")
    assert model(ids).logits.shape[:2] == (1, 4)


def test_a_rehearsal_compiles_nothing(tiny_model_folder):
    model, reached = AutoModelForCausalLM.from_pretrained(tiny_model_folder), []
    with rehearsal(model):
        torch.compile(model.forward, fullgraph=True)(torch.arange(4).unsqueeze(0))
        reached.append("the model")
    assert reached == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_rehearsal_shows_no_bars(tiny_model_folder, monkeypatch):
    model, ids = AutoModelForCausalLM.from_pretrained(tiny_model_folder), torch.arange(4).unsqueeze(0)
    monkeypatch.setattr(sys, "stderr", Terminal())

    def work():
        log = ProgressLog(StageOptions(title="stage 1"), steps=3, first_step=0)
        try:
            for _ in progress(range(3), title="layers", total=3):
                model(ids)
        finally:
            log.close()

    with rehearsal(model):
        work()
    assert sys.stderr.getvalue() == ""
    work()
    assert "layers" in sys.stderr.getvalue()
    assert "stage 1" in sys.stderr.getvalue()


@pytest.mark.parametrize("before", ["nothing", "a run"])
def test_ctrl_c_before_anything_was_written_says_so(
    before, tiny_model_folder, prose_folder, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "run"
    given = [*of("shortened-ppl", *WINDOWS, "--{0}.protect_first=0", "--{0}.protect_last=1"), "--sparsity=0.5"]
    command_line = command(tiny_model_folder, prose_folder, output, *given)
    if before == "a run":
        assert main(command_line) == 0
        command_line += ["--overwrite"]
    found = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("wide.runs.run.apply", interrupt)
    capsys.readouterr()
    assert main(command_line) == 130
    as_it_was = f", and {output} is as it was" if before == "a run" else ""
    # A busy machine is told how far the tokenising is, too.
    assert capsys.readouterr().err.endswith(f"wide: interrupted: stopped; nothing was written{as_it_was}\n")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == found


def test_ctrl_c_in_deciding_keeps_nothing_of_it(tiny_model_folder, prose_folder, tmp_path, monkeypatch, capsys):
    output = tmp_path / "run"
    given = [*of("shortened-ppl", *WINDOWS, "--{0}.protect_first=0", "--{0}.protect_last=1"), "--sparsity=0.5"]

    def interrupt(*_args, output=None, **_options):
        if output is not None:
            # Other processes, which may wait elsewhere, are asked nothing any more.
            patch.setattr(DataParallel, "agree", None)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("wide.runs.run.apply", interrupt)
        assert main(command(tiny_model_folder, prose_folder, output, *given)) == 130
    said = capsys.readouterr().err
    assert f"pruned stopped; nothing of it is kept; what this run finished is kept in {output}, and the same" in said
    assert not (output / "stage1").exists()
    assert main([*command(tiny_model_folder, prose_folder, output, *given), "--resume"]) == 0
    assert (output / "adapter").is_dir()


@pytest.fixture
def adapter_of_another(tiny_model_folder, tmp_path):
    """Return the folder of an adapter of a model with one layer more."""
    config = AutoConfig.from_pretrained(tiny_model_folder)
    config.num_hidden_layers += 1
    model = wide.attach(AutoModelForCausalLM.from_config(config), WideConfig(ffn_group_size=16, router_rank=4))
    attachment(model).provenance["prune"] = {"objective": {"sparsity": 0.5}}
    return wide.save(model, tmp_path / "adapter of another")


@pytest.mark.parametrize("what", ["recover", "eval"])
def test_a_wrong_adapter_is_refused_before_text_is_tokenised(
    what, adapter_of_another, tiny_model_folder, prose_folder, tmp_path, monkeypatch, capsys
):
    def tokenise(*_args, **_settings):
        raise AssertionError("text was read")

    monkeypatch.setattr("wide.data.batches.stream_in_memory", tokenise)
    monkeypatch.setattr("wide.evaluation.evaluate.evaluate", tokenise)
    given = ["--model", str(tiny_model_folder), "--data", str(prose_folder), "--adapter", str(adapter_of_another)]
    output = tmp_path / "run"
    assert main([what, *given, "--output", str(output), "--device=cpu"]) == 1
    assert "num_layers is 2, expected 3" in capsys.readouterr().err
    assert not output.exists()


def test_flags_of_recover_are_named_with_their_group(adapter_of_another, tiny_model_folder, tmp_path, capsys):
    given = [
        f"--model={tiny_model_folder}",
        "--data=python-docs",
        "--adapter",
        str(adapter_of_another),
        "--output",
        str(tmp_path / "run"),
    ]
    assert main(["recover", *given, "--recover.lora_rank=0"]) == 1
    assert "error: recover.lora_rank must be at least 1" in capsys.readouterr().err
    assert main(["recover", *given, "--sparsity=1.5"]) == 1
    assert "error: sparsity must lie in" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["window_length", "search_window_length"])
def test_settings_of_a_method_that_do_not_fit_the_text_are_named_as_their_flags_are(
    name, tiny_model_folder, prose_folder, tmp_path, capsys
):
    given = [*of("tyr", "--{0}.num_windows=4", "--{0}.window_length=16", "--{0}.search_window_length=16")]
    given += [f"--tyr.{name}=300", "--train.sequence_length=32", "--report=false"]
    assert main(command(tiny_model_folder, prose_folder, tmp_path / "run", *given)) == 1
    said = capsys.readouterr().err
    assert f"error: tyr.{name} 300 is longer than the 32 tokens of a block of calibration text" in said
    assert "pack the text with --train.sequence_length 300 or more" in said


def test_one_text_file_holds_out_its_tail_by_itself(tiny_model_folder, tmp_path, capsys):
    text, output = tmp_path / "good.txt", tmp_path / "run"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
    given = of("shortened-ppl", *WINDOWS, "--{0}.protect_first=0", "--{0}.protect_last=1")
    assert main(command(tiny_model_folder, text, output, *given, "--report=false")) == 0
    assert f"held out {text} (heldout): 1 documents" in capsys.readouterr().out


@pytest.mark.parametrize("what", [["prune"], ["compare", "--methods=slicegpt"]])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_loaded(what, tmp_path, tmp_path_factory, capsys):
    empty = tmp_path_factory.mktemp("empty")
    (empty / "config.json").write_text("{}")
    given = [*what, f"--model={empty}", "--data=python-docs", "--output"]
    # Nobody, root included, can make a name of more than 255 bytes.
    for long in (tmp_path / ("x" * 300), tmp_path / "deeper" / ("x" * 300)):
        assert main([*given, str(long)]) == 1
        assert f"cannot be made in {tmp_path}: File name too long; choose another folder" in capsys.readouterr().err
    if Path("/proc/self").exists():
        assert main([*given, "/proc/wideout"]) == 1
        assert "--output /proc/wideout cannot be " in capsys.readouterr().err
    assert main([*given, str(tmp_path / "deeper" / "run")]) == 1
    assert str(empty) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
