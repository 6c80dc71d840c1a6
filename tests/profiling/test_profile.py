"""Profiles of whole models: gates at the sizes that are claimed, random routers' shares, and calls on the host."""

import contextlib
import gzip
import itertools
import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wide.config import WideConfig
from wide.data.tokenizer import load_tokenizer
from wide.errors import ConfigError, DataError, EvaluationError
from wide.grouping import Grouping
from wide.inference.engine.decoder import Decoder
from wide.inference.operators.table import OperatorTable
from wide.models.adapter import save
from wide.models.attach import attach, attachment
from wide.models.discovery import discover
from wide.models.lora import add_lora
from wide.models.pretrained import load_pretrained
from wide.models.router import Router
from wide.plan import Dense, Kept, LayerPlan, Plan, Skipped, scale_name
from wide.profiling import calls, correctness, profile
from wide.profiling.calls import AS_LOADED, DENSE, Candidate, generate_us, race_calls
from wide.profiling.correctness import LIMIT, check_batch, check_decoder, places, reference
from wide.profiling.options import ProfileOptions
from wide.profiling.profile import run_profile
from wide.profiling.synthetic import SHAPES, random_model, set_shares, skipped_shares
from wide.report.reading import read_profile

CPU = torch.device("cpu")
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setitem(SHAPES, "small", SMALL | HEADS)
    made = random_model("small", num_layers=None, device=CPU, dtype=torch.float32)
    made.generation_config.eos_token_id = None
    return attach(made, WideConfig(ffn_group_size=16, router_rank=4))


@pytest.mark.parametrize(("length", "trained"), [(1, False), (3, True), (40, True), (400, False)])
def test_the_gate_is_green_for_the_decoder_and_red_for_another_model(model, length, trained):
    decoder = Decoder(model, max_length=length + 8, tables=[OperatorTable.fixed("torch")] * 2)
    wanted = reference(model, torch.randint(0, 64, (1, length)), trained=trained)
    masks = [mask[0] for layer in wanted.masks for mask in layer]
    decided = [mask for layer in wanted.decisions for mask in layer]
    assert all(map(torch.equal, masks, decided)) == trained
    # Nothing else tells the two outputs of the masked model apart.
    assert torch.equal(wanted.masked, wanted.own) == trained
    found = check_decoder(decoder, wanted)
    assert found["green"]
    assert found["tokens"] == length
    assert max(found["routed_error"], found["decode_error"]) < 1e-4
    assert found["flip_rate"] < 0.01
    # What ran where, in words, and on a GPU by its kernels.
    assert found["operators"]["prefill"]["down"] == ("dense" if length > 4 else "torch default tile")
    assert found["operators"]["decode"]["down"] == "torch default tile"
    assert found["operators"]["decode"]["attention"] == "torch over the cache, pairs skip"
    assert set(found["kernels"]) == {"prefill", "decode"}
    decoder.head = decoder.head._replace(weight=decoder.head.weight.roll(1, 0))
    assert not check_decoder(decoder, wanted)["green"]


@pytest.mark.parametrize("wrong", ["", "weights", "masks"])
def test_layers_that_round_rows_are_compared_one_by_one(model, wrong):
    table = OperatorTable.fixed("torch").for_int8_rows()
    decoder = Decoder(model, max_length=400, tables=[table] * 2, weights="w8a8")
    wanted = reference(model, torch.randint(0, 64, (1, 300)), by_layer=True)
    first, last = decoder.layers
    if wrong == "weights":
        down = first.ffn.down._replace(scale=1.2 * first.ffn.down.scale)
        decoder.layers = (replace(first, ffn=replace(first.ffn, down=down)), last)
    elif wrong == "masks":
        wanted = replace(wanted, states=(wanted.states[0], wanted.states[0]))
    found = check_decoder(decoder, wanted)
    assert (found["layer_error"] > LIMIT) == bool(wrong)
    assert found["green"] != bool(wrong)


def test_masks_of_the_gate_skip_half_of_every_sublayer(model):
    wanted = reference(model, torch.randint(0, 64, (1, 400)))
    masks = [mask for layer in wanted.masks for mask in layer]
    assert len(masks) == 4
    assert [float(mask.float().mean()) for mask in masks] == pytest.approx([0.5] * 4, abs=0.05)
    assert (wanted.dense - wanted.masked).abs().max() > 0.01


def test_flips_are_the_share_of_decisions_that_differ(model):
    decisions = reference(model, torch.randint(0, 64, (1, 40))).decisions
    (attention, ffn), *rest = decisions
    total = sum(mask.numel() for layer in decisions for mask in layer)
    assert correctness._flips([(~attention, ffn), *rest], decisions) == pytest.approx(attention.numel() / total)


WRONG = {
    "dense_error": lambda run, _: not run.routed,
    "routed_error": lambda run, rows: run.forced is not None and rows is not None and len(rows) > 1,
    "decode_error": lambda _, rows: rows is None,
}


@pytest.mark.parametrize("error", WRONG)
def test_each_wrong_path_alone_turns_the_gate_red(model, monkeypatch, error):
    decoder = Decoder(model, max_length=48, tables=[OperatorTable.fixed("torch")] * 2)
    wanted, logits = reference(model, torch.randint(0, 64, (1, 40))), decoder.logits

    def wrong(stream, run, rows=None):
        found = logits(stream, run, rows)
        return found.roll(1, -1) if WRONG[error](run, rows) else found

    monkeypatch.setattr(decoder, "logits", wrong)
    found = check_decoder(decoder, wanted)
    assert [name for name in WRONG if found[name] > LIMIT] == [error]
    assert not found["green"]


@pytest.mark.parametrize("part", ["none", "prompt", "step"])
def test_captured_parts_are_compared_with_direct_calls_of_the_same_tokens(model, monkeypatch, part):
    """Stand-ins for CUDA graphs."""
    seen = {}

    def returns(name, call, ids):
        seen[name] = ids.tolist()
        return call().roll(int(name == part), -1)

    stand_ins = {
        "GraphPool": lambda _: None,
        "capture_prompt": lambda own, cache, length, run, _: (
            lambda ids, lengths: returns("prompt", lambda: own.prefill(ids[:, :length], lengths, cache, run), ids)
        ),
        "capture_step": lambda own, cache, run, _: lambda ids: returns("step", lambda: own.step(ids, cache, run), ids),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(correctness, name, stand_in)
    decoder = Decoder(model, max_length=1056, tables=[OperatorTable.fixed("torch")] * 2)
    wanted = reference(model, torch.randint(0, 64, (1, 1040)))
    errors = correctness._check_captured(decoder, wanted)
    assert [error > LIMIT for error in errors] == [part == "prompt", part == "step"]
    assert seen == {"prompt": wanted.ids[:, :1024].tolist(), "step": wanted.ids[:, 1023].tolist()}


def test_sequences_at_once_are_compared_with_each_alone(model, monkeypatch):
    decoder, ids = (
        Decoder(model, max_length=48, tables=[OperatorTable.fixed("torch")] * 2),
        torch.randint(0, 64, (6, 40)),
    )
    found = check_batch(model, decoder, ids)
    assert found["green"]
    assert (found["sequences"], found["operators"]["down"]) == (6, "dense")
    assert found["batch_error"] < 1e-4
    step = decoder.step
    monkeypatch.setattr(decoder, "step", lambda ids, *given: step(ids, *given).roll(len(ids) - 1, 0))
    assert not check_batch(model, decoder, ids)["green"]


def test_steps_run_the_last_four_tokens_and_the_last_of_them_again(model, monkeypatch):
    decoder, ids = (
        Decoder(model, max_length=48, tables=[OperatorTable.fixed("torch")] * 2),
        torch.randint(0, 64, (1, 40)),
    )
    forced, new_cache, spans, caches = correctness._forced, decoder.new_cache, [], []
    monkeypatch.setattr(correctness, "_forced", lambda *given: (spans.append(given[2:]), forced(*given))[1])
    monkeypatch.setattr(decoder, "new_cache", lambda *given: (caches.append(given), new_cache(*given))[1])
    check_decoder(decoder, reference(model, ids))
    assert spans == [(0, 40), (0, 36), (36, 37), (37, 38), (38, 39), (39, 40), (39, 40)]
    # Of the prompt, and of the steps: the last token's kernels are counted in one more.
    assert caches == [(1, 40), (1, 41)]


def test_of_a_batch_256_tokens_run_at_once_and_of_four_sequences_alone(model, monkeypatch):
    decoder, ids = (
        Decoder(model, max_length=8, tables=[OperatorTable.fixed("torch")] * 2),
        torch.randint(0, 64, (7, 300)),
    )
    runs = []

    def stepped(_, ids, masks):
        runs.append((ids.tolist(), masks[0][0].shape[:2]))
        return torch.ones(len(ids), 5, 64), {}

    monkeypatch.setattr(correctness, "_stepped", stepped)
    assert check_batch(model, decoder, ids)["green"]
    short = ids[:, :256].tolist()
    assert runs == [(short, (7, 256))] + [([short[row]], (1, 256)) for row in (0, 2, 4, 6)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures need CUDA")
def test_what_is_captured_is_compared_with_direct_calls():
    made = random_model("tiny", num_layers=None, device=torch.device("cuda"), dtype=torch.bfloat16)
    attach(made, WideConfig())
    decoder = Decoder(made, max_length=1032)
    found = check_decoder(decoder, reference(made, torch.randint(0, 512, (1, 1024), device="cuda")))
    assert max(found["captured_prompt_error"], found["captured_step_error"]) < 1e-2


def test_logits_are_compared_all_over_a_prompt_and_at_its_end():
    assert places(3, CPU).tolist() == [0, 1, 2]
    found = places(4096, CPU).tolist()
    assert found == sorted(set(found))
    # Those spread out, the last one among them, and the four before it.
    assert len(found) == 128 + 4
    assert found[-5:] == [4091, 4092, 4093, 4094, 4095]
    assert max(later - earlier for earlier, later in itertools.pairwise(found)) < 40


@pytest.mark.parametrize("wanted", [(0.5, 0.5), (0.25, 0.75), (0.0, 0.0)])
def test_random_routers_skip_the_share_that_is_wanted(model, wanted):
    ids = torch.randint(0, 64, (1, 200))
    set_shares(model, ids, wanted)
    assert skipped_shares(model, ids) == pytest.approx(wanted, abs=0.01)
    other = torch.randint(0, 64, (1, 200))
    assert skipped_shares(model, other, last=100) == pytest.approx(wanted, abs=0.15)
    if wanted == (0.0, 0.0):
        assert skipped_shares(model, other) == wanted


def test_a_call_of_generate_gives_all_that_is_asked_for(model):
    first, step, out = generate_us(model, torch.randint(0, 64, (2, 7)), 5)
    assert min(first, step) > 0
    assert out.shape == (2, 12)
    model.generation_config.eos_token_id = list(range(64))
    with pytest.raises(EvaluationError, match="made 1 tokens instead of 5"):
        generate_us(model, torch.randint(0, 64, (2, 7)), 5)


def test_the_slow_candidate_is_timed_less(model):
    candidates = [Candidate(name=AS_LOADED, model=model), Candidate(name=DENSE, model=model, is_dense=True)]
    times, peaks = race_calls(candidates, torch.randint(0, 64, (1, 8)), 3, calls=["forward"], quick=True)
    assert set(times) == set(peaks) == {AS_LOADED, DENSE}
    assert times[AS_LOADED]["forward"].num_samples == 2
    assert times[DENSE]["forward"].num_samples > 2
    assert set(times[DENSE]) == {"forward"}


@pytest.mark.usefixtures("model")
def test_sequences_of_a_batch_differ(monkeypatch, tmp_path):
    seen = []

    def race(candidates, ids, *_, **__):
        seen.append(ids)
        return {each.name: {} for each in candidates}, {each.name: 0 for each in candidates}

    monkeypatch.setattr(calls, "race_calls", race)
    assert _profiled(tmp_path, generate=2, batch="1,3")[0]
    assert [ids.shape for ids in seen] == [(1, 24), (3, 24)]
    assert len(seen[1].unique(dim=0)) == 3


def test_unknown_shapes_are_named():
    with pytest.raises(ConfigError, match="unknown shape 'x'"):
        random_model("x", num_layers=1, device=CPU, dtype=torch.float32)


def test_a_shape_cut_to_fewer_layers_has_a_name_of_its_own():
    assert ProfileOptions().name == ProfileOptions(shape="llama-3.1-8b").name == "llama-3.1-8b"
    assert ProfileOptions(shape="llama-3.1-8b", layers=8).name == "llama-3.1-8b, 8 layers"
    assert ProfileOptions(model="M").name == "M"


def test_shares_are_named_alike_or_in_pairs():
    assert ProfileOptions(sparsities="0,0.3,0.3/0.3").skipped == [(0.0, 0.0), (0.3, 0.3)]
    assert ProfileOptions(sparsities="0.66/0.285,0.5").skipped == [(0.66, 0.285), (0.5, 0.5)]


def _profiled(out, **options):
    said = []
    given = ProfileOptions(**{"shape": "small", "ffn_group_size": 16, "quick": True, "prompt": "24"} | options)
    green = run_profile(given, out, device=CPU, say=said.append, backend="torch")
    return green, json.loads((out / "endtoend.json").read_text()), said


@pytest.mark.usefixtures("model")
def test_the_public_doors_are_raced_as_loaded_dense_and_optimised(tmp_path):
    with warnings.catch_warnings():
        # The optimised model's own forward runs: no call goes the way of its layers' modules for want of another.
        warnings.filterwarnings("error", message="wide:")
        green, found, said = _profiled(tmp_path, generate=4, batch="1,2", sparsities="0.5,0")
    assert green
    assert found["gate"]["tokens"] == 24
    assert (found["model"], found["layers"], found["ffn_group_size"], found["method"]) == ("small", 2, 16, "wide")
    seen = [(r["what"], r["tokens"], r["batch"], r["candidate"], r["runtime"]) for r in found["records"]]
    # The model as loaded is timed once; the dense one in the same engine beside each sparsity.
    assert len(seen) == 2 * 2 * 3 + 2 * 2 * 2
    assert {name for *_, name, _ in seen} == {"as loaded", "dense", "routed 0.5/0.5", "routed 0/0"}
    assert {(what, tokens, call) for what, tokens, _, _, call in seen} == {
        ("prefill", 24, "model(...)"),
        ("decode", 26, "generate()"),
    }
    assert {record["what"] for record in found["first_tokens"]} == {"first token"}
    assert all(record["speedup"] == 1.0 for record in found["records"] if record["candidate"] == "dense")
    assert all(record["speedup_as_loaded"] > 0 for record in found["records"])
    starts = {start["candidate"]: start for start in found["starts"]}
    assert starts["routed 0.5/0.5"]["skipped_prompt"] == pytest.approx([0.5, 0.5], abs=0.03)
    assert starts["routed 0/0"]["skipped_steps"] == [0.0, 0.0]
    assert found["finished"]
    assert any("x1.000 dense" in line for line in said)
    assert {forward["candidate"] for forward in read_profile(tmp_path).forwards()} == {name for *_, name, _ in seen}


@pytest.mark.usefixtures("model")
def test_one_door_may_be_timed_alone(tmp_path):
    found = _profiled(tmp_path, generate=3, calls="generate")[1]
    assert {record["what"] for record in found["records"]} == {"decode"}
    assert len(found["first_tokens"]) == 3


@pytest.mark.usefixtures("model")
def test_requests_at_once_are_timed_where_their_tokens_agree(monkeypatch, tmp_path):
    options = {"generate": 2, "calls": "forward", "batched": "1", "batched_generate": 4}
    found = _profiled(tmp_path, **options)[1]
    assert found["batched_gate"]["green"]
    assert found["batched_gate"]["preferred"].keys() == {"dense", "routed"}
    names = ["as loaded", "dense", "routed 0.5/0.5"]
    assert [(r["what"], r["requests"], r["candidate"]) for r in found["batched"]] == [
        ("generate_batch", 1, name) for name in names
    ]
    assert all(record["tokens_per_s"] > 0 for record in found["batched"])
    for batched, alone in ((0.1, 1.0), (0.0, 0.0)):
        agreement = {"generate_batch": batched, "generate": alone}
        monkeypatch.setattr(calls, "batch_agreement", lambda *_, found=agreement, **__: found)
        green, found, _ = _profiled(tmp_path, **options)
        assert not green
        assert "batched" not in found


@pytest.mark.parametrize("wrong", [False, True])
def test_a_static_adapter_runs_in_the_same_engine(wrong, monkeypatch, tiny_model_folder, tmp_path):
    model = load_pretrained(str(tiny_model_folder))
    spec, dense = discover(model)[1], LayerPlan(attention=Dense(), ffn=Dense())
    scale = torch.ones(spec.ffn.width).index_fill(0, torch.arange(10, spec.ffn.width), 0.0)
    kept = LayerPlan(attention=Skipped(), ffn=Kept(grouping=Grouping(spec.ffn.width, 1), kept=10))
    layers = (dense, kept, *[dense] * (len(discover(model)) - 2))
    attach(model, Plan(layers), tensors={scale_name(1, "ffn"): scale})
    save(model, tmp_path / "run" / "adapter")
    if wrong:

        def other(*given, **options):
            known = reference(*given, **options)
            return replace(known, masked=known.masked.roll(1, -1))

        monkeypatch.setattr(profile, "reference", other)
    named = {"shape": None, "model": str(tiny_model_folder), "adapter": str(tmp_path / "run" / "adapter")}
    options = {"ffn_group_size": None, "generate": 3, "batched": "1", "batched_generate": 4, "batch": "1,2"}
    options["weights"] = "w8a8"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="wide:")
        green, found, said = _profiled(tmp_path / "run" / "profile", **named, **options)
    assert "a static plan runs in the model's dtype, not in w8a8" in said
    assert (green, found["gate"]["green"], found["weights"]) == (not wrong, not wrong, "model")
    if wrong:
        assert found["records"] == []
        return
    names = {"as loaded", "dense", "pruned"}
    assert {r["candidate"] for r in found["records"]} == {r["candidate"] for r in found["batched"]} == names
    assert found["batched_gate"]["preferred"].keys() == {"dense", "pruned"}
    assert {f["candidate"] for f in read_profile(tmp_path / "run").forwards()} == names
    skipped = next(r["skipped"] for r in found["records"] if r["candidate"] == "pruned")
    assert 0 < skipped["attention"] < skipped["ffn"] + skipped["attention"] < 1


def test_prompts_of_a_text_differ_and_an_adapter_runs_merged(tiny_model_folder, tmp_path):
    model = attach(load_pretrained(str(tiny_model_folder)), WideConfig(ffn_group_size=16, router_rank=2))
    add_lora(model, rank=2)
    save(model, tmp_path / "adapter")
    file, words = tmp_path / "text.txt", "One text that is longer than a prompt and shorter than two of them."
    named = {"model": str(tiny_model_folder), "adapter": str(tmp_path / "adapter")}
    options = ProfileOptions(**named, text=str(file), prompt="24", batch="1,2")
    found = profile._pruned_model(options, profile._dense_model(options, CPU))
    assert attachment(found).lora.merged
    file.write_text(words)
    first, second = profile._prompts(options, found).tolist()
    assert first == load_tokenizer(tiny_model_folder)(words)["input_ids"][:24]
    assert first[0] == second[0]
    assert first[1:] != second[1:]
    # What a file of data holds is read as everywhere, not its braces.
    rows = ProfileOptions(**named, text=str(tmp_path / "rows.jsonl.gz"), prompt="24", batch="1,2")
    Path(rows.text).write_bytes(
        gzip.compress(b"".join(json.dumps({"text": t}).encode() + b"\n" for t in (words, "No.")))
    )
    assert profile._prompts(rows, found).tolist()[0] == first
    file.write_text(" \n")
    with pytest.raises(DataError, match="holds no text"):
        profile._prompts(options, found)


def test_a_session_counts_whole_batches_and_takes_their_median(monkeypatch):
    spent = iter([9.0, 9.0, 1.0, 4.0, 2.0])
    monkeypatch.setattr(calls, "_batching", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(calls, "_batch", lambda manager, prompts, new: (next(spent), prompts))
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=16))
    assert calls.batch_rate(Candidate(name="routed", model=model), 3, 8, 40) == 3 * 40 / 2.0


def test_sessions_of_batches_take_turns(monkeypatch):
    order = []

    def figures(candidate, requests, prompt, new):
        order.append(candidate.name)
        return float(len(order))

    monkeypatch.setattr(calls, "batch_rate", figures)
    candidates = [Candidate(name=name, model=None) for name in (AS_LOADED, DENSE, "routed")]
    found = calls.race_batches(candidates, 1, 8, 4, quick=True)
    assert order == [AS_LOADED, DENSE, "routed", DENSE, "routed"]
    assert found["routed"] == {"tokens_per_s": 4.0, "num_samples": 2}
    order.clear()
    found = calls.race_batches(candidates[1:], 1, 8, 4, quick=False)
    assert order == [DENSE, "routed", "routed", DENSE] * 2 + [DENSE, "routed"]
    assert found[DENSE]["tokens_per_s"] == 5.0


@pytest.mark.usefixtures("model")
def test_a_wrong_model_is_not_timed(monkeypatch, tmp_path):
    made = profile.optimize

    def wrong(model, **options):
        found = made(model, **options)
        decoder = attachment(found).engine.decoder
        decoder.head = decoder.head._replace(weight=decoder.head.weight.roll(1, 0))
        return found

    monkeypatch.setattr(profile, "optimize", wrong)
    green, found, said = _profiled(tmp_path)
    assert not green
    assert found["records"] == []
    assert any(line.startswith("RED") for line in said)


@pytest.mark.usefixtures("model")
def test_every_batch_that_is_timed_has_a_gate_of_its_own(monkeypatch, tmp_path):
    batches, check = [], profile.check_batch

    def red_at_three(model, decoder, ids, **how):
        batches.append(len(ids))
        return check(model, decoder, ids, **how) | {"green": len(ids) != 3}

    monkeypatch.setattr(profile, "check_batch", red_at_three)
    green, found, _ = _profiled(tmp_path, generate=2, batch="1,2,3")
    assert not green
    assert (batches, found["records"]) == ([2, 3], [])


@pytest.mark.usefixtures("model")
def test_routers_of_an_adapter_stay_as_they_are(model, monkeypatch, tmp_path):
    import wide

    base = random_model("small", num_layers=None, device=CPU, dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    wide.save(attach(base, WideConfig(ffn_group_size=16, router_rank=4)), tmp_path / "run" / "adapter")
    thresholds = []
    optimize = profile.optimize

    def noting(model, **options):
        thresholds.extend(part.threshold for part in model.modules() if isinstance(part, Router))
        return optimize(model, **options)

    monkeypatch.setattr(profile, "optimize", noting)
    given = {"model": str(tmp_path / "base"), "adapter": str(tmp_path / "run/adapter"), "shape": None}
    found = _profiled(tmp_path, **given, ffn_group_size=None, generate=2, batch="1,2")[1]
    assert set(thresholds) == {0.0}
    own = [record for record in found["records"] if record["candidate"] == "own routing"]
    assert own
    assert all(0 < record["skipped"]["ffn"] < 1 for record in own)


def test_a_batch_agrees_up_to_ties(monkeypatch):
    class Model(torch.nn.Module):
        device, config = torch.device("cpu"), SimpleNamespace(vocab_size=40)

        def forward(self, ids, past_key_values, use_cache, logits_to_keep):
            ids = ids[:, -logits_to_keep:]
            best = torch.nn.functional.one_hot(ids + 1, 64) + 0.999 * torch.nn.functional.one_hot(ids + 2, 64)
            return SimpleNamespace(logits=best.float(), past_key_values=None)

    def answers(step):
        return lambda _model, ids, new: (0, 0, torch.cat([ids, ids[:, -1:] + step * torch.arange(1, new + 1)], 1))

    for step, share in ((1, 1.0), (2, 1.0), (3, 0.0)):
        monkeypatch.setattr(calls, "generate_us", answers(step))
        monkeypatch.setattr(calls, "_batching", lambda *_: contextlib.nullcontext())

        def batch(_, prompts, new):
            return (0, [[*range(ids[-1] + 1, ids[-1] + 1 + new)] for ids in prompts])

        monkeypatch.setattr(calls, "_batch", batch)
        assert calls.batch_agreement(Model(), 80, 6) == {"generate": share, "generate_batch": 1.0}
