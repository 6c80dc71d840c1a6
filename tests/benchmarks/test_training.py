"""The bench of training steps measures each stage, and compiled ones where asked."""

import json
from functools import partial

import torch

from benchmarks.training import main


def test_every_stage_is_measured_with_and_without_compilation(monkeypatch, tmp_path, tiny_model_folder, capsys):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    sizes = ["--batch_size", "1", "--sequence_length", "8", "--ffn_group_size", "16", "--rounds", "1"]
    out = tmp_path / "training.json"
    assert main(["--model", str(tiny_model_folder), *sizes, "--compile", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert set(found) == {"plain", "stage 1", "stage 1, compiled", "stage 1+2", "stage 1+2, compiled"}
    assert all(values["seconds"] > 0 and values["ratio_to_plain"] > 0 for values in found.values())
    assert found["stage 1, compiled"]["first_step_seconds"] > 0
    assert "stage 1+2, compiled" in capsys.readouterr().out
