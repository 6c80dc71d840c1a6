"""Profiles of whole models: arithmetic, gates at the sizes that are claimed, and races on the host by a fake clock."""

import itertools
import json
import warnings

import pytest
import torch

from wide.config import WideConfig
from wide.errors import ConfigError
from wide.inference.decoder import Decoder
from wide.inference.operator_table import OperatorTable
from wide.inference.tuning.timing import Timing
from wide.models.attach import attach
from wide.profiling import decoder_races, profile
from wide.profiling.breakdown import sum_parts
from wide.profiling.ceilings import decode_ceiling, prefill_ceiling
from wide.profiling.decoder_races import Bench, decode_race, prefill_race
from wide.profiling.gates import check_decoder, places
from wide.profiling.options import ProfileOptions
from wide.profiling.profile import run_profile
from wide.profiling.synthetic import SHAPES, random_masks, random_model

CPU = torch.device("cpu")
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


@pytest.mark.parametrize("length", [1, 3, 40, 400])
def test_the_gate_is_green_for_the_decoder_and_red_for_another_model(decoder, length):
    model = decoder.model_for_tests
    decoder = Decoder(model, max_length=length + 8)
    ids = torch.randint(0, 64, (1, length))
    found = check_decoder(model, decoder, ids, OperatorTable(backend="torch"))
    assert found["green"]
    assert found["tokens"] == length
    assert max(found["routed_error"], found["decode_error"]) < 1e-4
    assert found["flip_rate"] < 0.01
    # What ran where, in words, and on a GPU by its kernels.
    assert found["operators"]["prefill"]["down"] == ("dense" if length > 4 else "torch default tile")
    assert found["operators"]["decode"]["down"] == "torch default tile"
    assert found["operators"]["decode"]["attention"] == "torch over the cache, pairs skip"
    assert set(found["kernels"]) == {"prefill", "decode"}
    model.lm_head.weight.data = model.lm_head.weight.data.roll(1, 0)
    assert not check_decoder(model, decoder, ids, OperatorTable(backend="torch"))["green"]


def test_logits_are_compared_all_over_a_prompt_and_at_its_end():
    assert places(3, CPU).tolist() == [0, 1, 2]
    found = places(4096, CPU).tolist()
    assert found == sorted(set(found))
    assert found[-5:] == [4091, 4092, 4093, 4094, 4095]
    assert max(later - earlier for earlier, later in itertools.pairwise(found)) < 40


def _fake_clock(calls, **_):
    for call in calls.values():
        call()
    return {
        name: Timing(median_us=10.0 + place, low_us=9.0, high_us=99.0, num_samples=1)
        for place, name in enumerate(calls)
    }


@pytest.fixture
def fake_clock(monkeypatch):
    monkeypatch.setattr(decoder_races, "time_interleaved", _fake_clock)
    monkeypatch.setattr(decoder_races, "breakdown", lambda call: {"query": 4.0} if call() is not None else {})


@pytest.mark.parametrize("race", [prefill_race, decode_race])
def test_a_race_on_the_host(decoder, fake_clock, race):
    ids = torch.randint(0, 64, (1, 96))
    bench = Bench(decoder=decoder, ids=ids, rates=((0.5, 0.5),), quick=False, trained=True, backend="torch")
    records = race(bench, 24, 1)
    assert [record["candidate"] for record in records] == ["dense", "routed 0.5/0.5", "all execute", "own routing"]
    assert records[0]["speedup"] == 1.0
    assert all(record["breakdown_us"]["gaps"] == record["median_us"] - 4.0 for record in records)
    assert records[1]["ceiling"] > 1.0
    assert records[1]["table"]["backend"] == "torch"


def test_trained_routers_decide_after_a_prompt_not_after_noise(decoder, fake_clock, monkeypatch):
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


def test_masks_of_many_rows_tell_the_table_how_alike_rows_are(decoder, monkeypatch):
    asked = []
    monkeypatch.setattr(decoder_races, "measured_table", lambda sizes, **facts: asked.append(facts["left"]))
    few, many = torch.rand(64, 4) < 0.5, torch.rand(4096, 4) < 0.5
    for masks in (None, [(None, few)], [(None, many), (None, None)]):
        decoder_races.operator_table(decoder, (0.5, 0.5), masks)
    assert asked[:2] == [None, None]
    assert 0.5 < asked[2] <= 1.0


def test_unknown_shapes_are_named():
    with pytest.raises(ConfigError, match="unknown shape 'x'"):
        random_model("x", num_layers=1, device=CPU, dtype=torch.float32)


def test_a_shape_cut_to_fewer_layers_has_a_name_of_its_own():
    assert ProfileOptions().name == ProfileOptions(shape="llama-3.1-8b").name == "llama-3.1-8b"
    assert ProfileOptions(shape="llama-3.1-8b", layers=8).name == "llama-3.1-8b, 8 layers"
    assert ProfileOptions(model="M").name == "M"


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(SHAPES, "small", SMALL | HEADS)
    return {"shape": "small", "ffn_group_size": 16, "quick": True, "batch": "1,2", "prompt": "24"}


def _profiled(out, options, **facts):
    said = []
    green = run_profile(ProfileOptions(**options), out, device=CPU, say=said.append, backend="torch", **facts)
    return green, json.loads((out / "endtoend.json").read_text()), said


def test_a_routed_model_is_checked_and_raced(small, fake_clock, tmp_path):
    green, found, said = _profiled(tmp_path, small | {"generate": 16, "rates": "0.5,0.5 0.3,0.7"})
    assert green
    assert (found["model"], found["layers"], found["ffn_group_size"], found["method"]) == ("small", 2, 16, "wide")
    assert found["gate"]["tokens"] == 24
    seen = {(r["what"], r["tokens"], r["batch"], r["candidate"]) for r in found["records"]}
    assert seen == {
        (what, tokens, batch, name)
        for what, tokens in (("prefill", 24), ("decode", 32))
        for batch in (1, 2)
        for name in ("dense", "routed 0.5/0.5", "routed 0.3/0.7", "all execute")
    }
    assert len(found["summary"]) == 8
    assert any("energy is not measured" in line for line in said)


def test_the_public_doors_are_raced_dense_masked_and_optimised(small, tmp_path):
    with warnings.catch_warnings():
        # The optimised model's own forward runs: no call goes the way of its layers' modules for want of another.
        warnings.filterwarnings("error", message="wide:")
        green, found, _ = _profiled(tmp_path, small | {"generate": 4, "optimised": True})
    assert green
    assert (found["gate"]["tokens"], found["gate"]["optimised_error"] < 1e-4) == (24, True)
    assert found["gate"]["own_door_error"] < 1e-3
    seen = [(r["what"], r["tokens"], r["batch"], r["candidate"], r["runtime"]) for r in found["records"]]
    assert len(set(seen)) == len(seen) == 12
    assert {name for *_, name, _ in seen} == {"dense", "masked", "optimised"}
    assert {(what, tokens, door) for what, tokens, _, _, door in seen} == {
        ("prefill", 24, "model(...)"),
        ("decode", 26, "generate()"),
    }
    assert all(record["speedup"] == 1.0 for record in found["records"] if record["candidate"] == "dense")
    assert {entry["candidate"] for entry in found["summary"]} == {"dense", "masked", "optimised"}


@pytest.mark.parametrize("optimised", [True, False])
def test_a_wrong_model_is_not_timed(small, fake_clock, monkeypatch, tmp_path, optimised):
    made = profile.Decoder if not optimised else profile.optimize

    def wrong(model, **options):
        found = made(model, **options)
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
        if not optimised:
            found.head = found.head.roll(1, 0)
        return found

    monkeypatch.setattr(profile, "optimize" if optimised else "Decoder", wrong)
    green, found, said = _profiled(tmp_path, small | {"optimised": optimised})
    assert not green
    assert found["records"] == []
    assert any(line.startswith("RED") for line in said)


def test_one_token_is_no_step_of_generate(small, tmp_path):
    with pytest.raises(ConfigError, match="at least 2, got 1"):
        _profiled(tmp_path, small | {"generate": 1, "optimised": True})
