"""What is tuned for a model's own shapes is what `wide.optimize` looks up and runs; a budget of time is kept."""

import dataclasses
import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wide.cli import tune as command
from wide.config import WideConfig
from wide.errors import ConfigError
from wide.inference.choice import measured
from wide.inference.choice.measured import is_measured, measured_table
from wide.inference.choice.tuning import race, tune
from wide.inference.choice.tuning.timing import Timing
from wide.inference.choice.tuning.tune import TunedLayer, tune_layers
from wide.inference.operators.table import OPERATORS
from wide.inference.optimize import optimize
from wide.kernels.tuning import TuningTable
from wide.models.attach import attach, attachment
from wide.plan import Dense, LayerPlan, Plan

CPU = torch.device("cpu")
ROWS = (16, 32)


def tiny(folder, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes | heads | changes, attn_implementation="sdpa"))
    model.save_pretrained(folder / "tiny")
    return str(folder / "tiny"), model.bfloat16().eval()


def clock(dense_us):
    """Return a clock by which every sparse candidate takes 10 us."""

    def time(calls, **_):
        for call in calls.values():
            call[0]()
        return {
            name: Timing(
                median_us=dense_us if name.startswith("dense") else 10.0, low_us=9.0, high_us=99.0, num_samples=1
            )
            for name in calls
        }

    return time


@pytest.fixture
def on_the_host(host, monkeypatch, tmp_path):
    monkeypatch.setenv("WIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measured, "triton_obstacle", lambda device: None)
    return tmp_path


def tuned(layers, monkeypatch, dense_us=30.0, **options):
    monkeypatch.setattr(race, "time_interleaved", clock(dense_us))
    told = []
    table = TuningTable()
    options = {"executed": (0.5, 0.5), "quick": True} | options
    tune_layers(layers, table=table, device=CPU, rows=ROWS, progress=told.append, **options)
    return table, told


def layers_of(model, **flags):
    return command.layers(command.TuneOptions(model=model, **flags))


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(("ffn_groups", "attention_groups"), [(64, None), (32, 32)])
def test_every_operator_of_a_models_own_shape_is_found(quick, ffn_groups, attention_groups, on_the_host, monkeypatch):
    name, _ = tiny(on_the_host)
    layers = layers_of(name, ffn_group_size=ffn_groups, attention_group_size=attention_groups)
    assert len(set(layers)) == 1
    _, told = tuned(layers, monkeypatch, quick=quick)
    assert not [each for each in told if "stays dense" in each.verdict]
    table = measured_table(layers[0].sizes, device=CPU, dtype=torch.bfloat16)
    few = [name for name in OPERATORS if name != "attention"]
    assert {name: table.how(name, 1) for name in few} == dict.fromkeys(few, "few")
    if not quick:
        assert {table.how(name, rows) for name in few for rows in (2, 4)} == {"few"}
    for rows in (*ROWS, 1000):
        assert {name: table.how(name, rows) for name in OPERATORS} == dict.fromkeys(OPERATORS, "many")
    assert {table.how(name, 8) for name in OPERATORS} == {"dense"}


def test_dense_stays_where_it_is_faster_and_counts_as_measured(on_the_host, monkeypatch):
    layers = layers_of(tiny(on_the_host)[0], ffn_group_size=64)
    _, told = tuned(layers, monkeypatch, dense_us=5.0)
    assert all("dense, 5.0 us" in each.verdict for each in told)
    found = measured_table(layers[0].sizes, device=CPU, dtype=torch.bfloat16)
    assert {found.how(name, rows) for name in OPERATORS for rows in (1, 32)} == {"dense"}
    sizes = [layer.sizes for layer in layers]
    assert is_measured(CPU, sizes)
    assert not is_measured(CPU, [dataclasses.replace(sizes[0], hidden_size=1024)])


def test_an_optimised_model_follows_what_was_tuned(on_the_host, monkeypatch):
    name, model = tiny(on_the_host)
    attach(model, WideConfig(ffn_group_size=64))
    tuned(layers_of(name, ffn_group_size=64), monkeypatch)
    optimize(model)
    table = attachment(model).engine.decoder.tables[0]
    assert [table.how(name, 32) for name in ("query", "attention", "output")] == ["many"] * 3


def test_only_routed_halves_are_measured_and_other_rates_have_entries_of_their_own(on_the_host, monkeypatch):
    layer = layers_of(tiny(on_the_host)[0], ffn_group_size=64)[0]
    alone = TunedLayer(sizes=layer.sizes, attention=False, ffn=True)
    _, told = tuned([alone, alone], monkeypatch, executed=(0.5, 0.7))
    assert len(told) == told[0].total == 2 * (1 + len(ROWS))
    assert {each.name.split(",")[0] for each in told} == {"gate_up", "down"}
    table = measured_table(layer.sizes, device=CPU, dtype=torch.bfloat16, executed=(0.5, 0.7))
    assert (table.how("gate_up", 32), table.how("query", 32)) == ("many", "dense")


def test_a_shape_that_cannot_be_measured_is_named_and_costs_no_other(on_the_host, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("2 GiB wanted")

    monkeypatch.setattr(tune, "prompt_race", full)
    layers = layers_of(tiny(on_the_host)[0], ffn_group_size=64)
    _, told = tuned(layers, monkeypatch)
    assert sum("not measured, stays dense (OutOfMemoryError: 2 GiB wanted)" in e.verdict for e in told) == len(ROWS)
    table = measured_table(layers[0].sizes, device=CPU, dtype=torch.bfloat16)
    assert (table.how("attention", 32), table.how("query", 32)) == ("dense", "many")


def test_models_without_a_gate_and_adapters_are_measured_as_they_are(on_the_host, monkeypatch):
    import wide

    name, model = tiny(on_the_host)
    attach(model.float(), WideConfig(ffn_group_size=32))
    wide.save(model, on_the_host / "adapter")
    layers = layers_of(name, adapter=str(on_the_host / "adapter"))
    assert layers[0].sizes.ffn_groups == 6
    plain = TunedLayer(sizes=dataclasses.replace(layers[0].sizes, is_gated=False), attention=False, ffn=True)
    tuned([plain], monkeypatch)
    table = measured_table(plain.sizes, device=CPU, dtype=torch.bfloat16)
    assert [table.how("gate_up", rows) for rows in (1, 32)] == ["few", "many"]


def test_an_attached_model_is_tuned_for_itself_and_stays_as_it_is(on_the_host, monkeypatch):
    _, model = tiny(on_the_host)
    attach(model, WideConfig(ffn_group_size=64))
    monkeypatch.setattr(race, "time_interleaved", clock(30.0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = attachment(model)
    found = tune_layers(tune.tuned_layers(state.specs, state.plan), device=CPU, rows=ROWS, quick=True)
    assert found.left_out == ()
    assert found.num_sparse == len(found.choices)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimize(model)
    table = attachment(model).engine.decoder.tables[0]
    assert [table.how(name, 32) for name in ("query", "attention", "output")] == ["many"] * 3


def test_steps_come_first_and_what_no_time_is_left_for_is_named_and_stays_dense(on_the_host, monkeypatch):
    layers = layers_of(tiny(on_the_host)[0], ffn_group_size=64)
    seconds = itertools.count()
    monkeypatch.setattr(tune.time, "monotonic", lambda: float(next(seconds)) / 1000)
    monkeypatch.setattr(race, "time_interleaved", clock(30.0))
    told = []
    table = TuningTable()
    found = tune_layers(layers, table=table, device=CPU, rows=ROWS, quick=True, seconds=0.07, progress=told.append)
    names = [each.name for each in told]
    assert names[:4] == ["gate_up, 1 rows", "down, 1 rows", "query, 1 rows", "output, 1 rows"]
    assert found.left_out
    assert len(names) + len(found.left_out) == told[0].total
    assert not set(names) & set(found.left_out)
    known = measured_table(layers[0].sizes, device=CPU, dtype=torch.bfloat16)
    assert known.how("query", 1) == "few"
    assert known.how("attention", 32) == "dense"


def test_a_plan_of_another_model_or_without_routers_is_refused(on_the_host):
    _, model = tiny(on_the_host)
    attach(model, WideConfig(ffn_group_size=64))
    state = attachment(model)
    with pytest.raises(ConfigError, match="has 1 layers and the plan 2"):
        tune.tuned_layers(state.specs[:1], state.plan)
    dense = Plan(tuple(LayerPlan(attention=Dense(), ffn=Dense()) for _ in state.specs))
    with pytest.raises(ConfigError, match="nothing to measure"):
        tune_layers(tune.tuned_layers(state.specs, dense), device=CPU)
