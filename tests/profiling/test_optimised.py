"""The race of the Hugging Face model itself, on the host with a clock that counts calls."""

import json

import pytest
import torch

from wide.errors import ConfigError
from wide.inference.tuning.timing import Timing
from wide.profiling import captured, endtoend, optimised
from wide.profiling.synthetic import SHAPES

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024}


def _fake_clock(calls, **_):
    for call in calls.values():
        call()
    return {name: Timing(median_us=10.0, low_us=9.0, high_us=11.0, num_samples=3) for name in calls}


@pytest.fixture
def on_the_host(monkeypatch):
    monkeypatch.setitem(SHAPES, "small", SMALL | HEADS)
    monkeypatch.setattr(endtoend, "_DEVICE", "cpu")
    monkeypatch.setattr(captured, "time_interleaved", _fake_clock)
    monkeypatch.setattr(captured, "peak_memory", lambda call: {"peak_memory_bytes": 1})
    monkeypatch.setattr(
        endtoend,
        "random_model",
        lambda *args, dtype, **options: RANDOM_MODEL(*args, dtype=torch.float32, **options),
    )


RANDOM_MODEL = endtoend.random_model
ARGUMENTS = ["--shape", "small", "--ffn-group-size", "16", "--optimised", "--quick"]


def test_dense_masked_and_optimised_are_raced(on_the_host, tmp_path):
    shapes = ["--prompt", "24", "--generate", "16", "--batch", "1,2"]
    assert endtoend.main([*ARGUMENTS, *shapes, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "endtoend.json").read_text())
    assert found["gate"]["green"]
    assert found["gate"]["optimised_error"] < 1e-4
    seen = [(r["what"], r["batch"], r["candidate"]) for r in found["records"]]
    assert len(seen) == 12
    assert {name for *_, name in seen} == {"dense", "masked", "optimised"}
    assert all(record["speedup"] == 1.0 for record in found["records"])


def test_a_wrong_model_is_not_timed(on_the_host, monkeypatch, tmp_path):
    optimize = optimised.optimize

    def wrong(model, **options):
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        return optimize(model, **options)

    monkeypatch.setattr(optimised, "optimize", wrong)
    assert endtoend.main([*ARGUMENTS, "--prompt", "24", "--decode", "", "--out", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "endtoend.json").read_text())["records"] == []


def test_it_is_refused_beside_a_compiled_peer(tmp_path):
    with pytest.raises(ConfigError, match="leave out --compiled-peer"):
        endtoend.main([*ARGUMENTS, "--compiled-peer", "default", "--out", str(tmp_path)])
