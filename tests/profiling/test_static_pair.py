"""Static plans in the end-to-end bench: what is raced, what is recorded, and that a wrong model is red."""

import json

import pytest
import torch

import wide
from wide.config import WideConfig
from wide.errors import ConfigError
from wide.grouping import Grouping
from wide.inference.choice.tuning.timing import Timing
from wide.models.attach import attach
from wide.plan import Dense, Kept, LayerPlan, Plan, Skipped, scale_name
from wide.profiling import calls, static_pair
from wide.profiling.calls import prefill_call, step_call
from wide.profiling.options import ProfileOptions
from wide.profiling.profile import run_profile
from wide.report.reading import read_profile

CPU = torch.device("cpu")


def tiny_model(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes | heads | changes, attn_implementation="sdpa")).eval()


@pytest.fixture
def static(tmp_path):
    """Return folders of a base model and of an adapter that skips, keeps some heads and keeps some channels."""
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    heads, channels = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.ones(48)
    channels[10:] = 0.0
    plan = Plan(
        (
            LayerPlan(attention=Skipped(), ffn=Dense()),
            LayerPlan(attention=Kept(grouping=Grouping(32, 8), kept=1), ffn=Kept(grouping=Grouping(48, 1), kept=10)),
            LayerPlan(attention=Dense(), ffn=Skipped()),
        )
    )
    attach(model, plan, tensors={scale_name(1, "attention"): heads, scale_name(1, "ffn"): channels})
    wide.save(model, tmp_path / "run" / "adapter")
    return tmp_path / "base", tmp_path / "run" / "adapter"


@pytest.fixture
def host(monkeypatch):
    """The bench on the host, with a clock that calls everything twice."""

    def clock(calls, **_):
        assert all(torch.equal(call(), call()) for call in calls.values())
        return {
            name: Timing(median_us=10.0 / (1 + place), low_us=1.0, high_us=99.0, num_samples=1)
            for place, name in enumerate(calls)
        }

    monkeypatch.setattr(calls, "time_interleaved", clock)


def profiled(out, **options):
    given = ProfileOptions(**{name: str(value) if name != "generate" else value for name, value in options.items()})
    return run_profile(given, out, device=CPU, say=lambda line: None)


def test_a_static_adapter_is_cut_and_raced(static, host, tmp_path):
    base, adapter = static
    out = tmp_path / "run" / "profile"
    assert profiled(out, model=base, adapter=adapter, prompt="12", generate=6, batch="1,2")
    content = json.loads((out / "endtoend.json").read_text())
    assert content["gate"]["green"]
    assert content["gate"]["materialised_error"] < 3e-2
    records = content["records"]
    assert {(r["what"], r["batch"], r["candidate"]) for r in records} == {
        (what, batch, name) for what in ("prefill", "decode") for batch in (1, 2) for name in ("dense", "pruned")
    }
    assert content["finished"]
    assert {forward["candidate"] for forward in read_profile(tmp_path / "run").forwards()} == {"dense", "pruned"}


def test_batches_of_requests_are_refused_beside_a_static_plan(static, tmp_path):
    base, adapter = static
    options = ProfileOptions(model=str(base), adapter=str(adapter), batched="8")
    with pytest.raises(ConfigError, match="this plan is static"):
        run_profile(options, tmp_path / "o", device=CPU, say=lambda line: None)
    assert not (tmp_path / "o").exists()


def test_a_model_that_is_not_what_its_plan_says_is_not_timed(static, host, monkeypatch, tmp_path):
    base, adapter = static

    def wrong(model):
        model.lm_head.weight.data = model.lm_head.weight.data.roll(1, 0)

    monkeypatch.setattr(static_pair, "materialise", wrong)
    assert not profiled(tmp_path / "o", model=base, adapter=adapter)
    assert json.loads((tmp_path / "o/endtoend.json").read_text())["records"] == []


def test_routed_adapters_are_not_static(tmp_path):
    model = tiny_model()
    attach(model, WideConfig(ffn_group_size=16, router_rank=4))
    wide.save(model, tmp_path)
    assert not static_pair.is_static(tmp_path)
    assert static_pair.method_of(tmp_path) == "wide"


def test_calls_compute_what_the_model_computes():
    model, ids = tiny_model(), torch.randint(0, 64, (2, 9))
    wanted = model(ids).logits[:, -1:]
    assert torch.allclose(prefill_call(model, ids)(), wanted, atol=1e-5)
    step = step_call(model, ids[:, :1], length=7)
    assert torch.equal(step(), step())
