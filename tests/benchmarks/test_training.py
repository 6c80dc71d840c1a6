"""The bench of training steps measures each stage, and compiled ones where asked."""

import json
from functools import partial

import torch

from benchmarks.training import main


def test_every_stage_is_measured_in_every_way(monkeypatch, tmp_path, tiny_model_folder, capsys):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    sizes = ["--batch_sizes", "1", "--sequence_length", "8", "--ffn_group_size", "16", "--rounds", "1"]
    out = tmp_path / "training.json"
    assert main(["--model", str(tiny_model_folder), *sizes, "--ways", "eager,both", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert set(found) == {f"{s}, 1 x 8, {way}" for s in ("plain", "stage 1", "stage 2") for way in ("eager", "both")}
    assert all(values["seconds"] > 0 and values["first_step_seconds"] > 0 for values in found.values())
    assert "stage 2, 1 x 8, both" in capsys.readouterr().out
