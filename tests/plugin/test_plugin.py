"""The plug-in for vLLM as far as it runs without vLLM: registration, what a configuration asks for, refusals."""

import pickle
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import make
from transformers import CONFIG_MAPPING

import wide
from wide.errors import AdapterError, ConfigError, UnsupportedModelError
from wide.materialisation.checkpoint import generated_classes
from wide.models.adapter import config_of
from wide.models.attach import attachment
from wide.vllm.limits import FAMILIES, Limits, check_ranks, read_pruning
from wide.vllm.plugin import register, version_obstacle

ROOT = Path(__file__).parents[2]


def configuration(points=((0.25, -1.0), (0.75, 1.0)), **changes):
    """Return the configuration of a tiny Llama with two groups a half, as a checkpoint's config.json holds it."""
    model = wide.attach(make("llama"), wide.WideConfig(ffn_group_size=32, attention_group_size=16))
    attachment(model).thresholds_by_sparsity = list(points)
    attachment(model).routers()[1].threshold = 0.25
    facts = config_of(model)
    facts["plan"]["layers"][0]["ffn"] |= changes
    return SimpleNamespace(wide=facts, model_type="wide_llama")


def engine(config, *, ranks=1, **changes):
    """Return what of vLLM's configuration is read."""
    parallel = {"enable_dbo": False, "pipeline_parallel_size": 1, "tensor_parallel_size": ranks}
    parallel |= {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    found = {"quantization": None, "cache_dtype": "auto", "speculative_config": None, "lora_config": None}
    found |= {"is_moe": False, "device_type": "cpu", "dtype": torch.float32}
    found |= parallel | changes
    parts = ("model_config", "cache_config", "parallel_config", "device_config")
    return SimpleNamespace(**found, **{part: SimpleNamespace(hf_config=config, **found) for part in parts})


def test_the_entry_point_is_found_and_never_raises(caplog, monkeypatch):
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, _, name = points["wide"].partition(":")
    assert getattr(import_module(module), name) is register
    monkeypatch.setitem(sys.modules, "vllm", None)
    register()
    assert "cannot be served" in caplog.text


@pytest.mark.parametrize(
    ("version", "is_tested", "fits"),
    [
        ("0.26.1+cu130", True, True),
        ("0.32.0", True, True),
        ("dev", True, True),
        ("0.1.dev1+g2f4a1b", True, True),
        ("0.29.0", False, True),
        ("0.25.2", False, False),
        ("0.33.0", False, False),
    ],
)
def test_versions_are_checked_in_one_sentence(version, is_tested, fits):
    wrong, found = version_obstacle(version)
    assert found is fits
    assert bool(wrong) is not is_tested
    assert is_tested or version in wrong


def test_thresholds_are_those_in_force_or_of_the_sparsity_at_start():
    config = configuration()
    halves = [(layer, half) for layer in (0, 1) for half in ("attention", "ffn")]
    assert read_pruning(config).thresholds == dict.fromkeys(halves, 0.0) | {(0, "ffn"): 0.25}
    config.wide_sparsity = 0.5
    assert read_pruning(config).thresholds == dict.fromkeys(halves, 0.0)
    config.wide_sparsity = 0
    assert set(read_pruning(config).thresholds.values()) == {float("-inf")}
    config.wide_sparsity = 0.9
    with pytest.raises(ConfigError, match="outside"):
        read_pruning(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"form": "mlp"}, "form 'mlp'"), ({"router_input": "residual"}, "'residual'"), ({"first_tokens": 2}, "first")],
)
def test_plans_that_vllm_cannot_run_are_refused(changes, words):
    with pytest.raises(UnsupportedModelError, match=words):
        read_pruning(configuration(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization": "fp8"}, "--quantization"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype"),
        ({"lora_config": 1, "enable_dbo": True}, "--enable-lora and --enable-dbo"),
        ({"wide_weights": "int4"}, r"unknown wide_weights 'int4'; choose one of .'model', 'int8', 'w8a8'"),
        ({"wide_weights": "w8a8", "device_type": "cuda"}, r"'w8a8' needs bfloat16 or float16 on a GPU.*--dtype"),
        ({"wide_weights": "int8", "quantization": "fp8"}, "--quantization.*wide_weights"),
        ({"ranks": 4}, r"does not divide the 2 groups .* sizes that do: \[1, 2\]"),
    ],
)
def test_options_that_do_not_go_with_routers_are_refused_by_name(changes, words):
    config = configuration()
    Limits.verify_and_update_config(engine(config, ranks=2))
    if "wide_weights" in changes:
        config.wide_weights = changes.pop("wide_weights")
    with pytest.raises(ConfigError, match=words):
        Limits.verify_and_update_config(engine(config, **changes))


def test_experts_are_refused_other_families_run_eagerly_and_foreign_models_are_left_alone():
    config = configuration()
    for kind, eager in (("wide_llama", False), ("wide_granite", True)):
        config.model_type = kind
        found = engine(config)
        Limits.verify_and_update_config(found)
        assert getattr(found.model_config, "enforce_eager", False) == eager
        with pytest.raises(UnsupportedModelError, match="experts"):
            Limits.verify_and_update_config(engine(config, is_moe=True))
    Limits.verify_and_update_config(engine(SimpleNamespace(model_type="gpt2"), quantization="fp8"))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, [*range(416, 513, 16), 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144]),
        ({"most": 1000, "max_num_seqs": 8}, [8, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224,
                                             256, 320, 384, 448, 512, 640, 768, 896, 1000]),
        ({"cudagraph_capture_sizes": [1, 8]}, [1, 8]),
        ({"max_cudagraph_capture_size": 16}, [1, 2, 4, 8, 16]),
        ({"cudagraph_mode": "NONE"}, []),
        ({"wide_sparsity": 0}, list(range(416, 513, 16))),
    ],
)  # fmt: skip
def test_steps_with_prompts_are_recorded_unless_the_user_chose(changes, wanted):
    known = pytest.importorskip("vllm.config", reason="needs vLLM: make test-vllm")
    config, plain = configuration(), {"tensor_parallel_size": 1, "max_num_seqs": 256, "most": 8192}
    if "wide_sparsity" in changes:
        config.wide_sparsity = changes.pop("wide_sparsity")
    found = object.__new__(known.VllmConfig)
    vars(found).update(vars(engine(config, device_type="cuda", enforce_eager=False)), performance_mode="balanced")
    settings = {name: changes.get(name, value) for name, value in plain.items()}
    settings["max_num_batched_tokens"] = settings.pop("most")
    found.scheduler_config = SimpleNamespace(**settings)
    found.compilation_config = known.CompilationConfig(**{k: v for k, v in changes.items() if "cudagraph" in k})
    Limits.verify_and_update_config(found)
    # What vLLM does later, with what it found.
    found._set_cudagraph_sizes()
    sizes = found.compilation_config.cudagraph_capture_sizes
    assert sizes[len(sizes) - len(wanted) :] == wanted
    assert found.compilation_config.max_cudagraph_capture_size == max(wanted, default=0)


@pytest.mark.parametrize(
    ("layers", "changes", "words"),
    [
        ([{"channels": 96}, {"channels": 160}], {"ranks": 2}, None),
        ([{"query_heads": [0, 1]}, {"query_heads": None}], {}, None),
        ([{"query_heads": [0, 1]}, {}], {"device_type": "cuda", "ranks": 2}, None),
        ([{}, {}], {"ranks": 4}, r"does not divide the 2 KV heads; sizes that do: \[1, 2\]"),
        ([{"channels": 95}, {}], {"ranks": 2}, None),
        (
            [{"channels": 191}, {}],
            {"ranks": 2},
            r"does not divide the 191 channels of layer 0; sizes that do: \[1, 191\]",
        ),
        ([{"query_heads": None}, {"query_heads": []}], {}, "no attention is left"),
        ([{"channels": 96}, {}], {"is_heterogeneous": True}, "heads of different sizes"),
    ],
)
def test_static_checkpoints_are_served_as_far_as_vllm_computes_them_rightly(layers, changes, words):
    config = SimpleNamespace(model_type="wide_sliced_llama", num_attention_heads=4, num_key_value_heads=2)
    config.intermediate_size, config.is_heterogeneous = 191, "is_heterogeneous" in changes
    whole = {"query_heads": "dense", "channels": "dense"}
    config.wide_shape = {"layers": [whole | layer for layer in layers], "stream": None}
    known = engine(config, **changes)
    if words is None:
        Limits.verify_and_update_config(known)
        return
    with pytest.raises((ConfigError, UnsupportedModelError), match=words):
        Limits.verify_and_update_config(known)


def test_tensors_of_a_static_checkpoint_have_the_shapes_that_its_configuration_says():
    # vLLM would take the first rows of those that have more.
    static = pytest.importorskip("wide.vllm.backend", reason="needs vLLM: make test-vllm").SlicedTransformersForCausalLM
    known = SimpleNamespace(model=SimpleNamespace(base_model_prefix="model"), sizes={"up": [4, 1], "down": [1, 4]})
    known.padded = {"up": (0, torch.tensor([1, 2]), 4)}
    name, found = static._whole(known, "model.up", torch.ones(2, 1))
    assert (name, found.flatten().tolist()) == ("model.up", [0, 1, 1, 0])
    assert static._whole(known, "lm_head", torch.ones(3))[1].shape == (3,)
    for name, rows, wanted in (("up", 3, "[2, 1]"), ("down", 5, "[1, 4]")):
        with pytest.raises(
            AdapterError, match=re.escape(f"shape [{rows}, 1], but config.json: wide_shape says {wanted}")
        ):
            static._whole(known, f"model.{name}", torch.ones(rows, 1))


def test_ranks_are_checked_against_every_half():
    check_ranks(wide.Plan.from_json(configuration().wide["plan"]), 2)


@pytest.mark.skipif(find_spec("vllm") is None, reason="without vLLM, tests/test_stock_tools.py has a process for it")
def test_a_configuration_is_unpickled_where_its_class_has_not_been_made(tmp_path):
    from wide.materialisation.checkpoint import WideMixin

    for family in FAMILIES:
        config = generated_classes(family, WideMixin)[0](hidden_size=48, wide={"a": 1})
        (tmp_path / family).write_bytes(pickle.dumps(config))
    code = (
        f"import pathlib, pickle\nfor family in {FAMILIES!r}:\n"
        f"    c = pickle.loads((pathlib.Path({str(tmp_path)!r}) / family).read_bytes())\n"
        "    print(type(c).__name__, c.hidden_size, c.wide)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wanted = [f"Wide{CONFIG_MAPPING[family].__name__} 48 {{'a': 1}}" for family in FAMILIES]
    assert done.stdout.splitlines() == wanted


def test_figures_of_a_measurement_need_a_green_gate():
    from benchmarks.vllm_plugin import fill

    name = "vLLM: first token, 4096"
    row = {"what": name, "ratio": 1.4, "mode": "routed", "unit": "ms", "value": 75.0, "dense": 105.0}
    content = {"gate": {"green": False}, "rows": [row], "skipped": {"prompt": [0.5, 0.5], "new": [0.5, 0.5]}}
    rows = [{"what": name, "floor": 1.3, "goal": 1.5, "value": None}, {"what": "another", "value": None}]
    known = {"commit": "abc", "device": "a GPU", "date": "2026-11-26"}
    with pytest.raises(SystemExit, match="not green"):
        fill(content, rows, **known)
    fill(content | {"gate": {"green": True}}, rows, **known)
    assert (rows[0]["value"], rows[0]["reached"], rows[1]["value"]) == (1.4, "floor", None)
    # Eight bits have a gate of their own.
    content["gate"], what = {"green": True}, "vLLM: in eight bits over dense vLLM FP8, first token, 4096"
    content["rows"] = [row | {"mode": "fp8"}, row | {"mode": "w8a8", "value": 50.0}]
    rows = [{"what": what, "floor": 1.15, "goal": 1.4, "value": None}]
    fill(content, rows, **known)
    assert rows[0]["value"] is None
    fill(content | {"gate-w8a8": {"green": True}}, rows, **known)
    assert rows[0]["value"] == 1.5
