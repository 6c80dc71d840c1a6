"""Rows of quality beside speed: static plans of the study's widths, and that every row is compared and timed."""

import json

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import beside
from wide.models.attach import attach
from wide.models.cost import static_sparsity


def tiny():
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "num_hidden_layers": 28}
    return Qwen2ForCausalLM(Qwen2Config(**beside._TINY, **heads)).eval()


@pytest.mark.parametrize("method", ["tyr", "ddp", "shortened-taylor"])
def test_static_plans_leave_out_what_the_records_say(method):
    model, wanted = tiny(), beside.shares(method)
    plan, tensors = beside.static_plan(model, wanted)
    found = static_sparsity(attach(model, plan, tensors=tensors))
    for half, value in zip(("attention", "ffn"), zip(*wanted, strict=True), strict=True):
        assert getattr(found, half) == pytest.approx(sum(value) / 28, abs=2e-3)
    for name, scale in tensors.items():
        if "attention" in name:
            first, second = scale.view(2, 6).sum(1).tolist()
            assert 0 <= first - second <= 1


@pytest.mark.slow
def test_every_row_is_gated_and_timed(tmp_path):
    assert beside.main(["--tiny", "--out", str(tmp_path / "speed.json"), "--seconds", "0"]) == 0
    content = json.loads((tmp_path / "speed.json").read_text())
    assert all(row["gate"]["green"] for row in content["rows"].values())
    assert content["records"] == []
