"""The end-to-end bench: its arithmetic, its gate, and one race on the host with a clock that counts calls."""

import pytest
import torch

from wide.config import WideConfig
from wide.errors import ConfigError
from wide.inference.decoder import Decoder
from wide.inference.tuning.timing import Timing
from wide.models.attach import attach
from wide.profiling import endtoend, endtoend_races, table_choice
from wide.profiling.agreement_endtoend import check
from wide.profiling.breakdown import sum_parts
from wide.profiling.ceilings import decode_ceiling, prefill_ceiling
from wide.profiling.endtoend_races import Bench, decode_race, prefill_race
from wide.profiling.synthetic import SHAPES, random_masks, random_model
from wide.profiling.table_choice import all_sparse, choose_table

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}


@pytest.fixture
def decoder(monkeypatch):
    monkeypatch.setitem(SHAPES, "small", SMALL | HEADS)
    model = random_model("small", num_layers=None, device=torch.device("cpu"), dtype=torch.float32)
    attach(model, WideConfig(ffn_group_size=16, router_rank=4))
    made = Decoder(model, max_length=96)
    made.model_for_tests = model
    return made


def _eight_billion():
    from types import SimpleNamespace as Part

    meta = {"device": "meta"}
    attention = Part(
        qkv=torch.empty(6144, 4096, **meta), output=torch.empty(4096, 4096, **meta), num_kv_heads=8, head_dim=128
    )
    wide = torch.empty(14336, 4096, **meta)
    return [Part(attention=attention, ffn=Part(gate=wide, up=wide, down=wide))] * 32


def test_ceilings_of_an_8b_model():
    layers, head = _eight_billion(), 128256 * 4096
    assert prefill_ceiling(layers, 4096, (0.5, 0.5)) == pytest.approx(1.93, abs=0.01)
    assert prefill_ceiling(layers, 16384, (0.662, 0.285)) == pytest.approx(1.69, abs=0.01)
    assert prefill_ceiling(layers, 4096, (0.0, 0.0)) == 1.0
    decode = {"length": 0, "skipped": (0.5, 0.5)}
    assert decode_ceiling(layers, head, batch=1, **decode) == pytest.approx(1.81, abs=0.01)
    assert decode_ceiling(layers, head, batch=4, **decode) == pytest.approx(1.06, abs=0.01)


def test_random_masks_reach_their_rates(decoder):
    for attention, ffn in random_masks(decoder.layers, 4096, (0.66, 0.25)):
        router = decoder.layers[0].attention.router
        assert attention[:, : router.num_groups].float().mean().item() == pytest.approx(0.34, abs=0.03)
        assert attention[:, router.num_groups :].all()
        assert ffn.float().mean().item() == pytest.approx(0.75, abs=0.03)
    assert all(not ffn[:, :].all() for _, ffn in random_masks(decoder.layers, 1, (0.5, 0.5)))
    assert all(a.all() and f.all() for a, f in random_masks(decoder.layers, 3, (0.0, 0.0)))


def test_kernels_are_summed_by_the_part_that_launched_them():
    def event(cat, name, ts, dur, correlation=None):
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}

    events = [
        event("user_annotation", "wide.query", 10, 10),
        event("user_annotation", "wide.norm", 30, 5),
        event("cuda_driver", "launch", 11, 1, 1),
        event("cuda_runtime", "launch", 15, 1, 2),
        event("cuda_runtime", "launch", 31, 1, 3),
        event("cuda_runtime", "launch", 50, 1, 4),
        event("kernel", "_gemm_mn_kernel", 100, 7.0, 1),
        event("kernel", "_sort_kernel", 110, 2.0, 2),
        event("kernel", "_rms_norm", 120, 3.0, 3),
        event("gpu_memset", "Memset", 130, 1.0, 4),
    ]
    assert sum_parts(events) == {"query": 7.0, "reorder": 2.0, "elementwise": 3.0, "embedding and head": 1.0}


def test_the_gate_is_green_for_the_runtime_and_red_for_another_model(decoder):
    ids = torch.randint(0, 64, (1, 40))
    found = check(decoder.model_for_tests, decoder, all_sparse("torch"), ids)
    assert found["green"]
    assert found["routed_error"] < 1e-4
    assert found["flip_rate"] < 0.01
    head = decoder.model_for_tests.lm_head
    head.weight.data = head.weight.data.roll(1, 0)
    assert not check(decoder.model_for_tests, decoder, all_sparse("torch"), ids)["green"]


def _fake_clock(calls, **_):
    for call in calls.values():
        call()
    return {
        name: Timing(median_us=10.0 + place, low_us=9.0, high_us=99.0, num_samples=1)
        for place, name in enumerate(calls)
    }


@pytest.mark.parametrize("race", [prefill_race, decode_race])
def test_a_race_on_the_host(decoder, monkeypatch, race):
    for module in (endtoend_races, table_choice):
        monkeypatch.setattr(module, "time_interleaved", _fake_clock)
    monkeypatch.setattr(endtoend_races, "breakdown", lambda call: {"query": 4.0} if call() is not None else {})
    monkeypatch.setattr(endtoend_races, "peak_memory", lambda call: {"peak_memory_bytes": 1})
    bench = Bench(
        decoder=decoder,
        ids=torch.randint(0, 64, (1, 96)),
        rates=((0.5, 0.5),),
        quick=False,
        trained=True,
        backend="torch",
    )
    records = race(bench, 24, 1)
    names = [record["candidate"] for record in records]
    assert names[0] == "dense"
    assert {"routed 0.5/0.5", "all execute", "own routing"} <= set(names)
    assert records[0]["speedup"] == 1.0
    assert all(record["breakdown_us"]["gaps"] == record["median_us"] - 4.0 for record in records)
    assert records[1]["ceiling"] > 1.0


def test_trained_routers_decide_after_a_prompt_not_after_noise(decoder, monkeypatch):
    monkeypatch.setattr(endtoend_races, "time_interleaved", _fake_clock)
    monkeypatch.setattr(endtoend_races, "peak_memory", lambda call: {"peak_memory_bytes": 1})
    prompts = []
    prefill = Decoder.prefill
    monkeypatch.setattr(Decoder, "prefill", lambda self, ids, *rest: prompts.append(ids) or prefill(self, ids, *rest))
    ids = torch.randint(0, 64, (1, 96))
    facts = {"decoder": decoder, "ids": ids, "rates": ((0.0, 0.0),), "quick": True, "backend": "torch", "parts": False}
    records = decode_race(Bench(trained=True, **facts), 24, 2)
    assert [prompt.tolist() for prompt in prompts] == [ids[:, :24].expand(2, -1).tolist()]
    assert all("breakdown_us" not in record for record in records)
    decode_race(Bench(trained=False, **facts), 24, 2)
    assert len(prompts) == 1


def test_tables_are_chosen_by_the_clock(monkeypatch):
    def clock(calls, **_):
        cost = {name: 10.0 + (3.0 if call().down is not None else 0.0) for name, call in calls.items()}
        cost = {name: 99.0 if name == "dense" else value for name, value in cost.items()}
        return {n: Timing(median_us=c, low_us=c, high_us=c, num_samples=1) for n, c in cost.items()}

    monkeypatch.setattr(table_choice, "time_interleaved", clock)
    table = choose_table(lambda table: lambda: table, backend="torch", is_step=False, rounds=1)
    assert table == all_sparse("torch").without("down", few=False)


def test_unknown_shapes_are_named():
    with pytest.raises(ConfigError, match="unknown shape 'x'"):
        random_model("x", num_layers=1, device=torch.device("cpu"), dtype=torch.float32)


def test_a_shape_cut_to_fewer_layers_has_a_name_of_its_own():
    words = ["--shape", "llama-3.1-8b", "--out", "OUT"]
    assert endtoend._name(endtoend._parser().parse_args(words)) == "llama-3.1-8b"
    assert endtoend._name(endtoend._parser().parse_args([*words, "--layers", "8"])) == "llama-3.1-8b, 8 layers"
    assert endtoend._name(endtoend._parser().parse_args([*words, "--model", "M", "--layers", "8"])) == "M"
