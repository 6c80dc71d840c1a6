"""`wide bench` and `wide profile`: what they hand to the benches, and what they refuse."""

from types import SimpleNamespace

import pytest
import torch

from wide.cli import profile, tune
from wide.cli.main import main
from wide.errors import EvaluationError

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")


@NO_GPU
@pytest.mark.parametrize(
    "command", [["bench", "--output", "o"], ["profile", "--output", "o"], ["tune", "--model", "m"]]
)
def test_without_a_gpu_the_message_says_so(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 1
    assert "CUDA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["bench"], 2, "out"),
        (["bench", "--output", "o", "--operators", "gemm_mn,gem"], 2, "unknown operators ['gem']"),
        (["bench", "--output", "o", "--rows", "a"], 1, "positive numbers"),
        (["bench", "--output", "o", "--group_size", "100"], 1, "divide 14336"),
        (["bench", "--output", "o", "--sparsity", "50"], 1, "0.5 skips half"),
        (["profile", "--output", "o", "--adapter", "a"], 2, "give --model"),
        (["profile"], 2, "--output is missing"),
        (["profile", "--comparison", "c"], 2, "give --model"),
        (
            ["profile", "--model", "m", "--comparison", "c", "--output", "o"],
            2,
            "--output does not go with --comparison",
        ),
        (["profile", "--model", "m", "--comparison", "c", "--adapter", "a"], 2, "--adapter does not go with"),
        (["profile", "--model", "m", "--comparison", "c", "--batched", "8"], 2, "leave it out with"),
        (["profile", "--output", "o", "--sparsities", "0.5,1"], 1, "shares in [0, 1)"),
        (["profile", "--output", "o", "--sparsities", "half"], 1, "shares in [0, 1)"),
        (["profile", "--output", "o", "--calls", "window"], 1, "forward and generate"),
        (["profile", "--output", "o", "--batched", "0"], 1, "positive numbers"),
        (["profile", "--model", "m", "--comparison", "nowhere"], 1, "no cells with adapters"),
        (["profile", "--model", "m", "--output", "o", "--text", "nowhere.txt"], 1, "nowhere.txt"),
        (["profile", "--output", "o", "--sparsities", "0.5/1"], 1, "0.66/0.285"),
        (["profile", "--output", "o", "--prompt", "0"], 1, "positive numbers"),
        (["profile", "--output", "o", "--generate", "1"], 1, "at least 2"),
        (["profile", "--output", "o", "--layers", "0"], 1, "layers must be at least 1"),
        (["tune"], 2, "model"),
        (["tune", "--model", "m", "--rows", "0"], 1, "positive numbers"),
        (["tune", "--model", "m", "--executed", "0.5"], 1, "two shares"),
        (["tune", "--model", "m", "--seconds", "0"], 1, "seconds must be positive"),
        (["tune", "--model", "m", "--adapter", "a", "--ffn_group_size", "64"], 2, "the adapter says"),
    ],
)
def test_bad_values_are_refused_before_the_device_is_looked_at(command, code, words, capsys):
    assert main(command) == code
    assert words in capsys.readouterr().err


@pytest.fixture
def profiled(monkeypatch):
    """What is handed to the profile; nothing is timed."""
    seen = []

    def run_profile(options, out, **_):
        seen.append((options, out))
        if "ddp" in str(options.adapter):
            raise MemoryError("no kernel fits")
        return "red" not in str(out)

    monkeypatch.setattr(profile, "require_gpu", lambda command: None)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("wide.profiling.profile.run_profile", run_profile)
    return seen


def test_profile_reads_its_flags(profiled):
    profile.run(["--output", "o", "--sparsities", "0.5,0.66/0.285", "--prompt", "64,128", "--layers", "2"])
    profile.run(["--output", "o", "--model", "M", "--generate", "8"])
    profile.run(["--output", "o", "--shape", "tiny", "--ffn_group_size", "64"])
    options = [each for each, _ in profiled]
    assert options[0].skipped == [(0.5, 0.5), (0.66, 0.285)]
    assert (options[0].prompts, options[0].layers, options[0].generate) == ([64, 128], 2, 128)
    assert (options[1].model, options[1].adapter, options[1].generate) == ("M", None, 8)
    assert [(each.shape, each.ffn_group_size) for each in options[1:]] == [(None, None), ("tiny", 64)]
    assert options[1].skipped == [(0.5, 0.5)]


def test_a_red_gate_is_an_error(profiled):
    with pytest.raises(EvaluationError, match="does not compute what the model computes"):
        profile.run(["--output", "red"])


def test_profile_times_what_each_cell_of_a_comparison_keeps(profiled, tmp_path, capsys):
    cells = {name: tmp_path / "cells" / name for name in ("dense-0-seed17", "ddp-0.5-seed17", "tyr-0.5-seed17", "wide")}
    for cell in cells.values():
        (cell / "adapter").mkdir(parents=True)
    done = cells["tyr-0.5-seed17"] / "profile"
    done.mkdir()
    (done / "endtoend.json").write_text('{"finished": true}')
    cut = cells["wide"] / "profile"
    cut.mkdir()
    (cut / "endtoend.json").write_text('{"finished": ')
    with pytest.raises(EvaluationError, match=r"1 of 3 cells could not be timed: ddp-0.5-seed17: MemoryError"):
        profile.run(["--model", "M", "--comparison", str(tmp_path), "--text", "python-docs", "--batch", "1,64"])
    assert [out for _, out in profiled] == [cells["ddp-0.5-seed17"] / "profile", cells["wide"] / "profile"]
    options, _ = profiled[1]
    assert options.adapter == str(cells["wide"] / "adapter")
    assert (options.text, options.batches) == ("python-docs", [1, 64])
    told = capsys.readouterr().out
    assert "[2/3] tyr-0.5-seed17: timed before" in told
    assert "no kernel fits" in told


def test_tune_measures_a_model_and_names_what_it_left_out(monkeypatch, tiny_model_folder, tmp_path, capsys):
    given = {}

    def tune_layers(layers, **options):
        options["progress"](SimpleNamespace(done=1, total=2, name="down", verdict="dense"))
        given.update(options, layers=layers)
        return SimpleNamespace(left_out=["up at 4096 rows"], choices=[1, 2], num_sparse=1)

    monkeypatch.setattr(tune, "require_gpu", lambda command: None)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("wide.inference.choice.tuning.tune.tune_layers", tune_layers)
    own = ["--ffn_group_size=16", "--rows=1,64", "--executed=0.3,0.7", "--seconds=5"]
    tune.run([f"--model={tiny_model_folder}", f"--output={tmp_path / 'own.json'}", *own])
    assert (given["rows"], given["executed"], given["seconds"]) == ([1, 64], (0.3, 0.7), 5.0)
    assert given["layers"][0].sizes.ffn_groups == 4
    told = capsys.readouterr().out
    assert "[1/2] down: dense" in told
    assert "5 s have passed; not measured, so dense: up at 4096 rows" in told
    assert f"{tmp_path / 'own.json'}: 2 choices of which 1 skip" in told
