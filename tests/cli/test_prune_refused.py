"""`wide prune` that is refused before any work: nothing is computed, nothing written, and the folder stays free."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from wide.cli.main import main
from wide.errors import ConfigError
from wide.training.rehearsal import rehearsal

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
        (of("wanda", *WINDOWS, "--{0}.pattern=2:4", "--sparsity=0.4"), "pattern '2:4' prunes 0.5"),
        (of("ddp", "--{0}.sequence_length=64"), "sequence_length 64 is longer"),
        (of("skipgpt", *TRAINED, "--match=linear_flops", "--sparsity=0.99"), "stay below"),
        (of("dllm-original", *TRAINED, "--sparsity=0.9", "--{0}.dense_layers=1"), "stay below 0.5"),
        (["--ffn_group_size=7", *TRAINED], "does not divide"),
        (["--ffn_group_size=16", *TRAINED, "--router_start=fitted", "--objective.ramp=0.5"], "router_start"),
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
