"""vLLM's engine gives the masked model's greedy tokens; `make test-vllm`, in an environment that has vLLM."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import make
from materialise_plans import width_plan
from transformers import AutoModelForCausalLM

import wide
from wide.materialisation.materialise import materialise
from wide.models.attach import attachment
from wide.plan import Dense, LayerPlan, Plan, Skipped

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
ROOT = Path(__file__).parents[2]
FAMILY = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a maker of checkpoints with routers that skip about half, and three calibrated thresholds."""

    def write(name):
        torch.manual_seed(0)
        if name == "nano":
            model = AutoModelForCausalLM.from_pretrained(ROOT / "models/nano", dtype=torch.float32)
            settings = wide.WideConfig(router_bias=True)
        else:
            biases = {"attention_bias": True, "mlp_bias": True} if name == "llama" else {}
            # vLLM's attention on a CPU fails with the pages that it chooses for sliding windows.
            plain = {"sliding_window": None} if name == "mistral" else {}
            model, settings = make(name, **FAMILY, **biases, **plain), wide.WideConfig(ffn_group_size=16)
            for parameter in model.parameters():
                parameter.data += torch.randn_like(parameter) * 0.1
        state = attachment(wide.attach(model.eval(), settings))
        state.dial = [(0.3, -0.2), (0.5, 0.0), (0.7, 0.2)]
        for router in state.routers():
            if router.bias is not None:
                torch.nn.init.normal_(router.bias, std=0.1)
        return wide.save_checkpoint(model, tmp_path_factory.mktemp(name))

    return write


def tokens(folder, **options):
    """Return how many prompts gave the same tokens, of how many, and the shares that executed; counts if wanted."""
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if "tensor_parallel_size" in options else os.environ
    command = [sys.executable, str(Path(__file__).with_name("tokens.py")), str(folder), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    found = re.search(r"(\d+) of (\d+) alike; executed (\[.*\])", done.stdout)
    assert found, done.stdout[-2000:] + done.stderr[-9000:]
    counted = re.search(r"counted (.*)", done.stdout)
    return int(found[1]), int(found[2]), json.loads(counted[1] if counted else found[3])


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {},
        {"enforce_eager": True, "hf_overrides": {"wide_sparsity": 0.3}, "enable_prefix_caching": False},
        {"enforce_eager": True, "tensor_parallel_size": 2},
    ],
    ids=["eager", "compiled", "sparsity", "two-ranks"],
)
def test_nano_gives_the_tokens_of_the_masked_model(checkpoint, options):
    same, total, executed = tokens(checkpoint("nano"), **options)
    assert same == total
    assert 0.1 < sum(executed) / len(executed) < 0.9


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=["one-rank", "two-ranks"])
def test_static_checkpoints_give_their_own_tokens(tmp_path, options):
    torch.manual_seed(0)
    model = make("llama", **FAMILY, num_hidden_layers=4, num_key_value_heads=4)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    plan, scales = width_plan(model, [[0, 3], None, None, [0, 1]], [96, 160, None, None])
    layers = [*plan.layers[:2], LayerPlan(attention=Skipped(), ffn=Dense()), plan.layers[3]]
    scales.pop("layers.2.attention.scale", None)
    model = materialise(wide.attach(model.eval(), Plan(tuple(layers)), tensors=scales))
    model.save_pretrained(tmp_path)
    same, total, _ = tokens(tmp_path, **options)
    assert same == total


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "phi3"])
def test_families_give_the_tokens_of_the_masked_model(checkpoint, family):
    same, total, _ = tokens(checkpoint(family), enforce_eager=True)
    assert same == total


def test_what_routers_skip_is_counted(checkpoint):
    same, total, (counted, known, rows) = tokens(checkpoint("nano"), enforce_eager=True, counts=True)
    assert same == total
    assert rows == 100
    assert counted == pytest.approx(known, abs=1e-3)


def test_dropped_requests_leave_nothing_behind(checkpoint):
    command = [sys.executable, str(Path(__file__).with_name("aborts.py")), str(checkpoint("nano")), "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    found = re.search(r"aborts (\{.*\})", done.stdout)
    assert found, done.stdout[-2000:] + done.stderr[-9000:]
    counted = json.loads(found[1])
    assert counted["lost"] == counted["other"] == counted["left"] == 0
    assert counted["finished"] > 60
    assert counted["dropped"] > 60
    assert counted["grown_mib"] < 30
