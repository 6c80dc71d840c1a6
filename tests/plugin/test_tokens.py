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
from wide.kernels.int8 import hadamard, quantise_int8, rotated
from wide.kernels.linear_int8.op import MAX_WHOLE_ROWS
from wide.materialisation.materialise import materialise
from wide.models.attach import attachment
from wide.plan import Dense, LayerPlan, Plan, Skipped
from wide.profiling.synthetic import skipped_shares

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
ROOT = Path(__file__).parents[2]
FAMILY = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "max_position_embeddings": 256}
EAGER, INT8 = {"enforce_eager": True}, {"hf_overrides": {"wide_weights": "int8"}}
FEW = {"max_num_batched_tokens": MAX_WHOLE_ROWS, "max_num_seqs": MAX_WHOLE_ROWS}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "phi3")
# Biases, norms of heads, norms of all heads together, fused projections.
STATIC = ("llama", "qwen3", "olmo2", "phi3")
IN_ONE_PROCESS = {
    "nano": ("nano", {**EAGER, "counts": True}),
    "nano-int8": ("nano", {**EAGER, **INT8}),
    # More rows would be rounded, which moves random routers.
    "nano-w8a8": ("nano", {**EAGER, **FEW, "hf_overrides": {"wide_weights": "w8a8"}}),
    "sparsity": ("nano", {**EAGER, "hf_overrides": {"wide_sparsity": 0.3}, "enable_prefix_caching": False}),
    "static": ("static-llama", {}),
    **{f"static-{family}": (f"static-{family}", EAGER) for family in STATIC[1:]},
    **{family: (family, EAGER) for family in FAMILIES},
    "phi3": ("phi3", {**EAGER, **INT8}),
}


def checkpoint(name, folder):
    """Write a checkpoint with routers that skip about half, and three calibrated thresholds."""
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
    state.thresholds_by_sparsity = [(0.3, -0.2), (0.5, 0.0), (0.7, 0.2)]
    for router in state.routers():
        if router.bias is not None:
            torch.nn.init.normal_(router.bias, std=0.1)
    wide.save_checkpoint(model, folder)


def static_checkpoint(family, folder):
    """Write a checkpoint whose layers have their own numbers of heads and channels, one of them no attention.

    In one layer KV heads are left with different numbers of query heads.
    """
    torch.manual_seed(0)
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    model = make(family, **FAMILY, **biases, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    plan, scales = width_plan(model, [[0, 1, 2, 4, 6, 7], None, None, [1, 6]], [95, 161, None, None])
    layers = [*plan.layers[:2], LayerPlan(attention=Skipped(), ffn=Dense()), plan.layers[3]]
    scales.pop("layers.2.attention.scale", None)
    model = materialise(wide.attach(model.eval(), Plan(tuple(layers)), tensors=scales))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of all checkpoints, by name."""
    place = tmp_path_factory.mktemp("checkpoints")
    for name in ("nano", *FAMILIES):
        checkpoint(name, place / name)
    for name in STATIC:
        static_checkpoint(name, place / f"static-{name}")
    return place


def run(folders, runs, *words, **environment):
    """Return what `tokens.py` prints of runs, {name: (checkpoint, options)}, by their names."""
    given = json.dumps({name: (str(folders / which), options) for name, (which, options) in runs.items()})
    command = [sys.executable, str(Path(__file__).with_name("tokens.py")), given, *words]
    known = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=known, check=False)
    found = {}
    for line in re.findall(r"^found (\{.*\})", done.stdout, flags=re.MULTILINE):
        found |= json.loads(line)
    assert set(found) == set(runs), done.stdout[-2000:] + done.stderr[-9000:]
    return found


def check(folder, found, *, tensor_parallel_size=1, hf_overrides=None, **_):
    """Compare greedy tokens with those that the masked model would choose, each behind the ones before it."""
    masked, overrides = wide.load_checkpoint(folder, dtype=torch.float32), hf_overrides or {}
    if "wide_sparsity" in overrides:
        wide.set_sparsity(masked, overrides["wide_sparsity"])
    if "wide_weights" in overrides:
        round_weights(masked, tensor_parallel_size, overrides["wide_weights"])
    is_routed, near = hasattr(masked.config, "wide"), 0
    with torch.no_grad():
        for prompt, new in zip(found["prompts"], found["tokens"], strict=True):
            ids = torch.tensor([prompt + new[:-1]])
            wanted = masked(ids, logits_to_keep=16, use_cache=False).logits[0].argmax(1).tolist()
            if is_routed and wanted != new:
                # Rounding moves a pair over the threshold.
                assert nearest_margin(masked, ids) < 5e-6
                near += 1
            else:
                assert wanted == new
    assert near <= 2
    if is_routed:
        with wide.capture_routing(masked) as routing:
            masked(torch.tensor(found["prompts"][-1:]))
        executed = [float(layer.ffn.float().mean()) for layer in routing]
        assert 0.1 < sum(executed) / len(executed) < 0.9
    return masked


def nearest_margin(masked, ids):
    """Return how near to its threshold a router decided on tokens, at its nearest."""
    with wide.capture_routing(masked) as routing:
        masked(ids, use_cache=False)
    return min(
        float((getattr(routing[each.layer_index], f"{each.half_layer}_margin") - each.threshold).abs().min())
        for each in attachment(masked).routers()
    )


def round_weights(model, ranks, form):
    """Give projections the values that int8 weights stand for, with scales of each rank's part of the inputs."""
    for name, linear in model.base_model.named_modules():
        if isinstance(linear, torch.nn.Linear):
            parts = linear.weight.data.chunk(ranks if name.endswith(("o_proj", "down_proj")) else 1, dim=1)
            turn = None
            if form == "w8a8" and ".mlp." in name:
                routed = model.base_model.get_submodule(name.rpartition(".")[0]).wide_router
                size = linear.in_features // (routed.num_groups if name.endswith("down_proj") else 1)
                turn = hadamard(size, linear.weight)
            made = [quantise_int8(part, rotation=turn) for part in parts]
            linear.weight.data = torch.cat([rotated(values * scale[:, None], turn) for values, scale in made], dim=1)
    values, scale = quantise_int8(model.lm_head.weight)
    # An embedding of the same weight stays.
    model.lm_head.weight = torch.nn.Parameter(values * scale[:, None])


@pytest.fixture(scope="module")
def reports(folders):
    """Return what engines of one process answer."""
    return run(folders, IN_ONE_PROCESS)


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_greedy_tokens_are_those_of_the_masked_model(folders, reports, name):
    which, options = IN_ONE_PROCESS[name]
    masked = check(folders / which, reports[name], **options)
    if "counts" in options:
        prompt, counted, rows = reports[name]["counted"]
        known = dict(zip(("attention", "the FFN"), skipped_shares(masked, torch.tensor([prompt])), strict=True))
        assert rows == 100
        assert counted == pytest.approx(known, abs=1e-3)


@pytest.mark.parametrize(
    ("which", "options"),
    [
        ("nano", {}),
        ("nano", {**EAGER, "tensor_parallel_size": 2}),
        ("static-llama", {"tensor_parallel_size": 2, **INT8}),
    ],
    ids=["compiled", "two-ranks", "static-two-ranks-int8"],
)
def test_spawned_engines_and_ranks_give_the_same_tokens(folders, which, options):
    ranks = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if "tensor_parallel_size" in options else {}
    check(folders / which, run(folders, {"one": (which, options)}, "spawned", **ranks)["one"], **options)


def test_dropped_requests_leave_nothing_behind(folders):
    command = [sys.executable, str(Path(__file__).with_name("aborts.py")), str(folders / "nano"), "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    found = re.search(r"aborts (\{.*\})", done.stdout)
    assert found, done.stdout[-2000:] + done.stderr[-9000:]
    counted = json.loads(found[1])
    assert counted["lost"] == counted["other"] == counted["left"] == 0
    assert counted["finished"] > 60
    assert counted["dropped"] > 60
    assert counted["grown_mib"] < 30
