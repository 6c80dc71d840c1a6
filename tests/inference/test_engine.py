"""`generate` and direct calls of an optimised model: the tokens and logits of the masked one, through the engine."""

import copy
import gc
import inspect
import math
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from families import DISTINCT, FAMILIES, STRAIGHT, distinct, make, stirred, tokens
from tables import fixed
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from wide.config import WideConfig
from wide.errors import NotAttachedError, ShapeError, UnsupportedModelError
from wide.inference.engine import memory as memory_module
from wide.inference.engine.cache import EngineCache
from wide.inference.engine.decoder import Decoder
from wide.inference.engine.graphs import CapturedStep, NextStep
from wide.inference.engine.layer import ForwardOptions
from wide.inference.engine.memory import Memory, Slot
from wide.inference.optimize import deoptimize, optimize
from wide.models.attach import attach, attachment
from wide.models.gates import cache_name
from wide.models.observe import bypass, capture_routing

CONFIG = WideConfig(ffn_group_size=16, router_rank=4)
CLOSE = {"atol": 2e-5, "rtol": 1e-4}
# Twelve tokens take the gathered operators, six the dense products, and one to four those for few rows.
SMALL = fixed("torch", query=16, attention=4, output=16, gate_up=16, down=16)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def routed(family="llama", **changes):
    return attach(stirred(make(family, **(STRAIGHT.get(family, {}) | changes))), CONFIG)


def engine_of(model):
    return attachment(model).engine


def padded(ids):
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"attention_mask": mask}


def asked(model, ids, *, in_every_way=True):
    """Return what `generate` gives for many ways to ask."""
    torch.manual_seed(0)
    greedy = GREEDY | {"max_new_tokens": 4}
    found = [model.generate(ids, **greedy), model.generate(ids, **padded(ids), **greedy)]
    found.append(model.generate(ids, **(greedy | {"cache_implementation": "static"})))
    if in_every_way:
        found.append(model.generate(ids[:1, :1], **greedy))
        found.append(model.generate(ids, **(greedy | {"use_cache": False})))
        found.append(model.generate(ids, **(greedy | {"do_sample": True, "top_k": 5, "temperature": 0.7})))
        found.append(model.generate(ids, **(greedy | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2})))
        found.append(model.generate(ids, **(greedy | {"num_return_sequences": 2, "do_sample": True})))
        found.append(model.generate(ids, **padded(ids), **(greedy | {"eos_token_id": int(found[1][0, -3])})))
        found.append(model.generate(inputs_embeds=model.get_input_embeddings()(ids), **greedy))
        found.append(model.generate(ids, **(greedy | {"num_beams": 3})))
        found.append(model.generate(ids, **(greedy | {"prompt_lookup_num_tokens": 2}))) if len(ids) == 1 else None
    scored = model.generate(ids, **greedy, return_dict_in_generate=True, output_scores=True, output_logits=True)
    engine = engine_of(model)
    assert (getattr(scored.past_key_values, "slot", None) is not None) == (engine is not None)
    more = torch.cat([scored.sequences, ids[:, :3]], 1)
    again = model.generate(more, past_key_values=scored.past_key_values, **greedy)
    return [*found, scored.sequences, again], torch.stack([*scored.scores, *scored.logits])


# What differs between families is in the layers; how they are asked is the same code.
ASKED_IN_EVERY_WAY = ("llama", "mistral", "gemma3_text")


@pytest.mark.parametrize(
    ("family", "batch"),
    [
        *(
            pytest.param(
                family, 2, marks=() if family in DISTINCT or family in ASKED_IN_EVERY_WAY else pytest.mark.slow
            )
            for family in FAMILIES
            if family != "apertus"
        ),
        ("llama", 1),
        ("mistral", 1),
    ],
)
def test_generate_gives_the_masked_models_tokens(family, batch):
    model, ids = routed(family), tokens(batch, 12)
    ways = {"in_every_way": family in ASKED_IN_EVERY_WAY}
    wanted, scores = asked(model, ids, **ways)
    optimize(model, table=SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, found_scores = asked(model, ids, **ways)
    assert [each.tolist() for each in found] == [each.tolist() for each in wanted]
    torch.testing.assert_close(found_scores, scores, **CLOSE)
    deoptimize(model)
    assert model.generate(ids, **GREEDY)[:, : wanted[0].shape[1]].tolist() == wanted[0].tolist()


@pytest.mark.parametrize("family", distinct(STRAIGHT))
def test_direct_calls_give_the_masked_models_logits(family):
    model, ids = routed(family), tokens(2, 12)
    left = padded(ids)
    real = left["attention_mask"].bool()
    calls = [
        {},
        left,
        {"use_cache": False},
        {"logits_to_keep": 1},
        {"logits_to_keep": torch.tensor([0, 5])},
        {"position_ids": torch.arange(12)[None]},
        {"position_ids": torch.arange(12)[None] % 6},
        {"attention_mask": torch.ones(2, 12, dtype=torch.long).index_fill(1, torch.tensor([3]), 0)},
    ]
    with torch.no_grad():
        wanted = [model(ids, **call).logits for call in calls]
        optimize(model, backend="torch")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call, logits in zip(calls, wanted, strict=True):
                found = model(ids, **call).logits
                seen = real if call is left else torch.ones(found.shape[:2], dtype=torch.bool)
                torch.testing.assert_close(found[seen], logits[seen], **CLOSE)
        assert isinstance(model(ids, return_dict=False), tuple)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_loop_of_the_callers_own_and_a_cache_that_leaves_the_engine(family, is_padded):
    model, ids = routed(family), tokens(2, 20)
    mask = torch.ones_like(ids)
    if is_padded:
        mask[1, :5] = 0

    places = (mask.cumsum(-1) - 1).clamp(min=0)

    def loop(leaves_at=None):
        out = model(ids[:, :9], attention_mask=mask[:, :9], position_ids=places[:, :9])
        found = [out.logits[:, -1:]]
        for place in range(9, 20):
            cache = out.past_key_values
            if place == leaves_at:
                assert isinstance(cache, EngineCache)
                assert len(cache.layers) == 2
                assert cache.slot is None
                # A window's layer keeps what later queries see.
                held = 14 if family == "llama" else 4
                assert cache.layers[0].keys.shape[2] == held
            one = {"input_ids": ids[:, place : place + 1], "position_ids": places[:, place : place + 1]}
            # The places of the logits, in a step too.
            one["logits_to_keep"] = torch.zeros(place % 3, dtype=torch.int64)
            out = model(**one, attention_mask=mask[:, : place + 1], past_key_values=cache)
            assert cache.get_seq_length() == place + 1
            found.append(out.logits)
        return torch.cat(found, 1)

    with torch.no_grad():
        wanted = loop()
        optimize(model, backend="torch")
        torch.testing.assert_close(loop(), wanted, **CLOSE)
        torch.testing.assert_close(loop(leaves_at=14), wanted, **CLOSE)


def test_a_step_whose_mask_hides_other_keys_than_before_gives_no_number():
    model, ids = optimize(routed(), backend="torch"), tokens(2, 12)
    with torch.no_grad():
        out = model(ids)
        mask = torch.ones(2, 13, dtype=torch.long)
        mask[0, 3] = 0
        logits = model(ids[:, :1], attention_mask=mask, past_key_values=out.past_key_values).logits
    assert logits[0].isnan().all()
    assert logits[1].isfinite().all()


def test_memory_is_used_again_and_grows_with_the_text(monkeypatch):
    # The first memory is full after few steps.
    monkeypatch.setattr(memory_module, "_SPARE_ROOM", 0)
    model, ids = optimize(routed(max_position_embeddings=2048), backend="torch"), tokens(1, 12)
    engine = engine_of(model)
    for _ in range(3):
        model.generate(ids, **GREEDY)
        gc.collect()
    assert len(engine._memory.slots) == 1
    with torch.no_grad():
        out = model(tokens(1, 250))
        assert out.past_key_values.slot.cache.room == 256
        for _ in range(20):
            out = model(ids[:, :1], past_key_values=out.past_key_values)
        assert out.past_key_values.slot.cache.room >= 270
        whole = torch.cat([tokens(1, 250), ids[:, :1].expand(1, 20)], 1)
        torch.testing.assert_close(out.logits[:, -1], model(whole).logits[:, -1], **CLOSE)
    held = [model.generate(ids, **GREEDY, return_dict_in_generate=True) for _ in range(4)]
    assert len({id(each.past_key_values.slot) for each in held}) == 4


def test_changed_routers_and_thresholds_count_from_the_next_prompt_on():
    model, ids = routed(), tokens(1, 12)
    optimize(model, backend="torch")
    with torch.no_grad():
        before = model(ids).logits
        for router in attachment(model).routers():
            router.threshold = 1e9
        nothing = model(ids).logits
        for router in attachment(model).routers():
            router.threshold = 0.0
            router.up.mul_(-1)
        inverse = model(ids).logits
        deoptimize(model)
        torch.testing.assert_close(model(ids).logits, inverse, **CLOSE)
        for router in attachment(model).routers():
            router.threshold = 1e9
        torch.testing.assert_close(model(ids).logits, nothing, **CLOSE)
    assert not torch.allclose(before, inverse)


def test_what_the_engine_does_not_run_is_said_once_and_right():
    model, ids = routed(), tokens(1, 12)
    calls = {
        "beam search": lambda: model.generate(ids, **(GREEDY | {"num_beams": 2})),
        "caller's own": lambda: model.generate(ids, past_key_values=DynamicCache(config=model.config), **GREEDY),
        "output_attentions": lambda: (
            model.generate(ids, **GREEDY, output_attentions=True, return_dict_in_generate=True).sequences
        ),
        "output_hidden_states": lambda: (
            model.generate(ids, **GREEDY, output_hidden_states=True, return_dict_in_generate=True).sequences
        ),
    }
    wanted = {name: call().tolist() for name, call in calls.items()}
    optimize(model, backend="torch")
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert call().tolist() == wanted[name]
            assert call().tolist() == wanted[name]
        said = [str(each.message) for each in caught if name in str(each.message)]
        assert len(said) == 1, (name, [str(each.message) for each in caught])


def test_a_cache_counts_under_every_name_that_transformers_takes():
    model, ids = routed(), tokens(2, 12)
    names = {"past_key_values", cache_name(inspect.signature(type(model).forward).parameters)}
    with torch.no_grad():
        wanted = model(torch.cat([ids, ids[:, :4]], 1)).logits[:, 12:]
        for way in ("masked", "optimised"):
            if way == "optimised":
                optimize(model, backend="torch")
            for name in names:
                cache = model(ids).past_key_values
                found = [model(ids[:, at : at + 1], **{name: cache}).logits for at in range(2)]
                found.append(model(ids[:, 2:4], **{name: cache}).logits)
                torch.testing.assert_close(torch.cat(found, 1), wanted, **CLOSE)
                assert (getattr(cache, "slot", None) is not None) == (way == "optimised")
                if "cache" in names:
                    # The new name wins.
                    both = {"cache": model(ids).past_key_values, "past_key_values": None}
                    torch.testing.assert_close(model(ids[:, :1], **both).logits, wanted[:, :1], **CLOSE)
                first = model.generate(ids, **GREEDY, return_dict_in_generate=True)
                more = torch.cat([first.sequences, ids[:, :3]], 1)
                again = model.generate(more, **{name: first.past_key_values}, **GREEDY)
                assert again.tolist() == model.generate(more, **GREEDY).tolist()
                assert (getattr(first.past_key_values, "slot", None) is not None) == (way == "optimised")


def test_graphs_are_for_short_prompts_and_longer_ones_of_narrow_layers():
    def has_graph(batch, length, widest):
        return memory_module.has_graph(SimpleNamespace(is_cuda=True, shape=(batch, length)), widest)

    assert has_graph(1, 4096, 57344)
    assert not has_graph(1, 4097, 28672)
    assert has_graph(8, 1024, 4096)
    assert has_graph(1, 16384, 4096)
    assert not has_graph(1, 16385, 4096)
    # What keeps nothing would borrow memory.
    assert not has_graph(8, 1024, None)


def test_a_prompt_whose_graph_does_not_fit_runs_without(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(memory_module, "capture_prompt", full)
    slot = Memory(Decoder(routed(), max_length=64), threading.RLock()).free(1, 64)
    ids, lengths = tokens(1, 12), torch.tensor([12], dtype=torch.int32)
    assert [slot.prompt(ids, lengths, routed=True, pool=object()) for _ in range(4)] == [None] * 4


def test_what_generate_hands_on_for_itself_runs_in_the_engine():
    model, ids = optimize(routed(), backend="torch"), tokens(1, 12)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)
        model(ids, tokenizer=object(), output_attentions=False)


def test_an_interrupted_generation_leaves_the_model_usable():
    class Stop(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            raise KeyboardInterrupt

    model, ids = optimize(routed(), backend="torch"), tokens(2, 12)
    wanted = model.generate(ids, **GREEDY)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **GREEDY, stopping_criteria=StoppingCriteriaList([Stop()]))
    assert model.generate(ids, **GREEDY).tolist() == wanted.tolist()


def test_dense_runs_through_the_same_engine():
    model, ids = routed(), tokens(2, 12)
    with bypass(model):
        wanted = model.generate(ids, **GREEDY)
    optimize(model, backend="torch")
    with bypass(model):
        assert model.generate(ids, **GREEDY).tolist() == wanted.tolist()


def test_a_hook_of_the_users_own_still_runs():
    model, ids = optimize(routed(), backend="torch"), tokens(1, 12)
    seen = []
    handle = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad(), pytest.warns(UserWarning, match="a hook on one of its modules"):
        model(ids)
    handle.remove()
    assert seen == [1]


def test_hooks_and_modules_that_came_before_or_after_count():
    model, ids = routed(), tokens(1, 12)
    seen = []
    handle = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    optimize(model, backend="torch")
    seen.clear()
    with torch.no_grad(), pytest.warns(UserWarning, match="a hook on one of its modules"):
        model(ids)
    assert seen == [1]
    handle.remove()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # transformers leaves hooks behind that do nothing.
        before = model(ids, output_hidden_states=True).logits
        warnings.simplefilter("error", UserWarning)
        torch.testing.assert_close(model(ids).logits, before, **CLOSE)
        model.lm_head = copy.deepcopy(model.lm_head)
        model.lm_head.weight.mul_(2)
        torch.testing.assert_close(model(ids).logits, 2 * before, **CLOSE)


def test_more_tokens_than_before_are_no_training():
    model, ids = routed(), tokens(1, 12)
    model.resize_token_embeddings(105, mean_resizing=False)
    with torch.no_grad():
        wanted = model(ids + 8).logits
        torch.testing.assert_close(optimize(model, backend="torch")(ids + 8).logits, wanted, **CLOSE)


def test_tokens_and_embeddings_together_are_refused_as_without_the_engine():
    model, ids = optimize(routed(), backend="torch"), tokens(1, 12)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))


def test_a_refused_or_restored_model_shares_no_memory():
    model = routed()
    model.model.norm = torch.nn.BatchNorm1d(32)
    with pytest.raises(UnsupportedModelError):
        optimize(model, backend="torch")
    kept = optimize(routed(), backend="torch")
    call = kept.forward
    deoptimize(kept)
    with torch.no_grad():
        call(tokens(1, 12))
    for each in (model, kept):
        weights = [part.weight for part in (each.model.layers[0].mlp.gate_proj, each.model.layers[0].self_attn.q_proj)]
        assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)


def test_an_empty_caches_reason_is_the_true_one():
    model, ids = optimize(routed(max_position_embeddings=16), backend="torch"), tokens(1, 12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate(ids, **(GREEDY | {"max_new_tokens": 8}))
    said = [str(each.message) for each in caught if "masked model" in str(each.message)]
    assert len(said) == 1
    assert "more than 16 tokens" in said[0]


def test_inference_mode_before_and_after():
    model, ids = optimize(routed(), backend="torch"), tokens(2, 12)
    with torch.no_grad():
        wanted = model(ids).logits
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            out = model(ids)
            model(ids[:, :1], past_key_values=out.past_key_values)
            assert torch.equal(out.logits, wanted)
            assert model.generate(ids, **GREEDY).shape == (2, 18)


def turns(model, ids, second, **more):
    """Return the logits of a first turn by `generate` and of a second one over its cache, and the tokens after it."""
    first = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    cache, sequence = first.past_key_values, torch.cat([first.sequences, ids[:, :3]], 1)
    return model.generate(sequence, attention_mask=second(sequence), past_key_values=cache, **GREEDY, **more)


def holes(sequence):
    mask = torch.ones_like(sequence)
    mask[1, 14:17] = 0
    return mask


def hidden_left(sequence):
    mask = torch.ones_like(sequence)
    mask[0, :5] = 0
    return mask


@pytest.mark.parametrize("second", [torch.ones_like, holes, hidden_left])
def test_a_second_turn_under_another_mask(second):
    model, ids = routed(), tokens(2, 12)
    wanted = turns(model, ids, second).tolist()
    optimize(model, backend="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert turns(model, ids, second).tolist() == wanted


@pytest.mark.parametrize("length", [1, 3])
def test_behind_left_padding_positions_count_and_what_was_hidden_is_not_shown(length):
    model, ids = routed("gemma2"), tokens(2, 12)
    places = (padded(ids)["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    mask = padded(torch.cat([ids, ids[:, :length]], 1))["attention_mask"]

    def after(**given):
        with torch.no_grad():
            cache = model(ids, position_ids=places, **padded(ids)).past_key_values
            return model(ids[:, :length], past_key_values=cache, **given).logits

    wanted = after(attention_mask=mask)
    optimize(model, backend="torch")
    with pytest.warns(UserWarning, match="left padding without position_ids"):
        torch.testing.assert_close(after(attention_mask=mask), wanted, **CLOSE)
    counted = {"position_ids": (mask.cumsum(-1) - 1)[:, -length:]}
    for given in ({}, counted, *([{"attention_mask": torch.ones_like(mask)}] if length > 1 else [])):
        with pytest.raises(ShapeError, match=r"hides \[0, 0\] tokens on the left, and before it hid \[4, 0\]"):
            after(**given)


@pytest.mark.parametrize("leaves", ["asked", "read", "copied"])
def test_a_cache_that_left_the_engine_shows_nothing_that_was_hidden(leaves):
    model, ids = routed(), tokens(2, 12)
    hidden = padded(torch.cat([ids, ids[:, :2]], 1))["attention_mask"]
    shown, swapped = torch.ones_like(hidden), hidden.flip(0)

    def after(mask, order=None):
        places = (padded(ids)["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            cache = model(ids, position_ids=places, **padded(ids)).past_key_values
            if order is not None:
                cache.reorder_cache(torch.tensor(order))
            elif leaves == "read":
                assert cache.layers
            cache = copy.deepcopy(cache) if leaves == "copied" else cache
            places = (hidden if mask is None else mask).cumsum(-1)[:, -2:] - 1
            given = {"position_ids": places, "attention_mask": mask, "output_hidden_states": leaves == "asked"}
            return model(ids[:, :2], past_key_values=cache, **given).logits

    wanted = [after(hidden), after(swapped, [1, 0])]
    optimize(model, backend="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close([after(hidden), after(swapped, [1, 0])], wanted, **CLOSE)
        for mask in (shown, None):
            with pytest.raises(ShapeError, match=r"hides \[0, 0\] tokens on the left, and before it hid \[4, 0\]"):
                after(mask)
        # An empty cache that has seen padding begins anew.
        cache = model(ids, position_ids=torch.arange(12)[None], **padded(ids), use_cache=True).past_key_values
        cache.reset()
        more = torch.ones(2, 15, dtype=torch.long).index_fill(1, torch.tensor([3]), 0)
        again = model(torch.cat([ids, ids[:, :2]], 1), attention_mask=more[:, :14], past_key_values=cache)
        assert model(ids[:, :1], attention_mask=more, past_key_values=again.past_key_values).logits.isfinite().all()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_turns_behind_left_padding_stay_in_the_engine(family):
    model, ids = routed(family), tokens(3, 12)
    mask = torch.ones(3, 60, dtype=torch.long)
    mask[0, :4], mask[2, :7] = 0, 0

    def talk():
        cache, found, text = None, [], ids
        for more in (3, 1, 5):
            out = model.generate(
                text,
                attention_mask=mask[:, : text.shape[1]],
                past_key_values=cache,
                output_logits=True,
                return_dict_in_generate=True,
                **GREEDY,
            )
            cache = out.past_key_values
            found += out.logits
            text = torch.cat([out.sequences, tokens(3, more, seed=more)], 1)
        length = text.shape[1]
        with torch.no_grad():
            given = {"attention_mask": mask[:, :length], "past_key_values": cache}
            places = (mask[:, :length].cumsum(-1) - 1).clamp(min=0)[:, -6:]
            # The last token of the text and those behind it.
            out = model(text[:, -6:], position_ids=places, **given)
        return cache, torch.stack([*found, *out.logits.unbind(1)])

    wanted = talk()[1]
    optimize(model, backend="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cache, found = talk()
    assert cache.slot is not None
    torch.testing.assert_close(found, wanted, **CLOSE)


class Met(StoppingCriteria):
    """Says that a text has begun, and waits once for another moment."""

    def __init__(self, here, there):
        self.here, self.there = here, there

    def __call__(self, ids, scores, **kwargs):
        self.here.set()
        assert self.there.wait(120)
        return torch.zeros(len(ids), dtype=torch.bool)


def test_trust_ends_with_generate_in_each_thread():
    model, ids = optimize(routed(), backend="torch"), tokens(1, 12)
    wanted = model.generate(ids, **GREEDY).tolist()
    first, second, ended = (threading.Event() for _ in range(3))

    def ask(here, there):
        kinds = {"return_dict_in_generate": True, "stopping_criteria": [Met(here, there)]}
        return model.generate(ids, **GREEDY, **kinds)

    # The second begins within the first and ends after it.
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(ask, first, second)
        assert first.wait(120)
        late = pool.submit(ask, second, ended)
        out = early.result()
        ended.set()
        assert out.sequences.tolist() == late.result().sequences.tolist() == wanted
    mask = torch.ones(1, 18, dtype=torch.long)
    mask[0, 3] = 0
    with torch.no_grad():
        cache = out.past_key_values
        assert model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits.isnan().all()


def test_threads_get_what_they_would_get_alone():
    model, options = routed(), GREEDY | {"max_new_tokens": 4}
    asked = [tokens(1, length, seed=length) for length in (5, 9, 12, 20)]
    # Beam search and holes run masked, beside what the engine runs.
    ways = [{}, {"num_beams": 2}, {"attention_mask": None}, {}]

    def call(number):
        ids, way = asked[number % 4], dict(ways[number // 4 % 4])
        if "attention_mask" in way:
            way["attention_mask"] = torch.ones_like(ids).index_fill(1, torch.tensor([2]), 0)
        if number % 8 == 5:
            with torch.no_grad():
                return model(ids).logits.argmax(-1).tolist()
        return model.generate(ids, **(options | way)).tolist()

    wanted = [call(number) for number in range(16)]
    optimize(model, table=SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(call, range(96)))
    assert found == [wanted[number % 16] for number in range(96)]


def test_kept_memory_is_given_up_before_a_call_fails(monkeypatch):
    model, ids = optimize(routed(), backend="torch"), tokens(1, 12)
    wanted = model.generate(ids, **GREEDY).tolist()
    gc.collect()
    kept = weakref.ref(engine_of(model)._memory.slots[0])
    make, calls = Decoder.new_cache, []

    def failing(self, *given):
        calls.append(kept() is None)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return make(self, *given)

    monkeypatch.setattr(Decoder, "new_cache", failing)
    assert model.generate(ids.expand(2, -1), **GREEDY).tolist() == wanted * 2
    assert calls == [False, True]


def test_trust_ends_with_generate():
    model, ids = routed(), tokens(2, 12)
    places = torch.arange(12)[None].expand(2, 12) * 2

    def call():
        found = [model.generate(ids, position_ids=places, **GREEDY)]
        cache = model.generate(ids, **GREEDY, return_dict_in_generate=True).past_key_values
        with torch.no_grad():
            first = model(ids[:, :1], past_key_values=cache).logits
            kept = first.clone()
            model(ids[:, 1:2], past_key_values=cache)
        assert torch.equal(first, kept)
        return [*found, first.argmax(-1)]

    wanted = call()
    optimize(model, backend="torch")
    assert [each.tolist() for each in call()] == [each.tolist() for each in wanted]


def test_caches_are_copied_emptied_and_kept_on_disk(tmp_path):
    model, ids = routed(), tokens(1, 12)
    optimize(model, backend="torch")
    with torch.no_grad():
        cache = model(ids).past_key_values
        twin, shallow = copy.deepcopy(cache), copy.copy(copy.copy(cache))
        torch.save(cache, tmp_path / "cache")
        read = torch.load(tmp_path / "cache", weights_only=False)
        wanted = model(ids[:, :2], past_key_values=cache).logits
        for other in (twin, shallow, read):
            assert repr(other) == "EngineCache(tokens=12, layers=2)"
            torch.testing.assert_close(model(ids[:, :2], past_key_values=other).logits, wanted, **CLOSE)
        cache.crop(-14)
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits, **CLOSE)
    with pytest.raises(NotAttachedError, match="deoptimize first"):
        copy.deepcopy(model)
    deoptimize(model)
    copy.deepcopy(model)


def test_a_prompt_that_fails_leaves_an_empty_cache(monkeypatch):
    model, ids = routed(), tokens(1, 12)
    optimize(model, backend="torch")
    cache = EngineCache(model.config)
    with torch.no_grad():
        wanted = model(ids[:, :1]).logits
        monkeypatch.setattr(Decoder, "logits", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids, past_key_values=cache)
        monkeypatch.undo()
        torch.testing.assert_close(model(ids[:, :1], past_key_values=cache).logits, wanted, **CLOSE)


@pytest.mark.parametrize("places", [0, 3])
def test_a_second_turn_that_fails_leaves_the_tokens_before(monkeypatch, places):
    model, ids, given = routed(), tokens(2, 13), torch.ones(2, 13, dtype=torch.long)
    given[0, :places] = 0
    where = (given.cumsum(1) - 1).clamp(min=0)
    optimize(model, table=SMALL)

    def logits(first, last, **more):
        part = {"attention_mask": given[:, :last], "position_ids": where[:, first:last]}
        return model(ids[:, first:last], **part, **more)

    with torch.no_grad():
        wanted = logits(0, 13).logits[:, -1]
        cache = logits(0, 10).past_key_values
        monkeypatch.setattr(Decoder, "logits", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(10, 13, past_key_values=cache)
        monkeypatch.undo()
        for place in (10, 11, 12):
            found = logits(place, place + 1, past_key_values=cache).logits[:, 0]
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_thresholds_between_turns_autocast_and_numpy():
    model, ids = routed(), tokens(1, 12)
    more = tokens(1, 4, seed=3)

    def talk():
        with torch.no_grad():
            cache = model(ids).past_key_values
            for router in attachment(model).routers():
                router.threshold = 0.3
            found = model(more, past_key_values=cache).logits
        for router in attachment(model).routers():
            router.threshold = 0.0
        return found

    wanted = talk()
    optimize(model, backend="torch")
    torch.testing.assert_close(talk(), wanted, **CLOSE)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), pytest.warns(UserWarning, match="autocast"):
        model(ids)
    model.requires_grad_(False)
    model(ids).logits.numpy()


def test_much_room_is_asked_for_and_little_is_taken():
    model = optimize(routed(max_position_embeddings=65536), backend="torch")
    model.generate(tokens(1, 12), **(GREEDY | {"max_new_tokens": 30000, "eos_token_id": list(range(97))}))
    assert engine_of(model)._memory.slots[0].cache.room <= 3072


def test_much_memory_is_not_kept(monkeypatch):
    model, ids = optimize(routed(), backend="torch"), tokens(1, 12)
    monkeypatch.setattr(engine_of(model)._memory, "_most_kept", 1)
    wanted = model.generate(ids, **GREEDY).tolist()
    gc.collect()
    assert engine_of(model)._memory.slots == []
    assert model.generate(ids, **GREEDY).tolist() == wanted


def test_nothing_to_skip_runs_no_router(monkeypatch):
    model, ids = optimize(routed(), backend="torch"), tokens(1, 12)
    with bypass(model):
        wanted = model.generate(ids, **GREEDY).tolist()
    for router in attachment(model).routers():
        router.threshold = -math.inf

    def refuse(*args, **kwargs):
        raise AssertionError("a router ran")

    for name in ("route", "norm_route"):
        monkeypatch.setattr(f"wide.inference.engine.layer.{name}", refuse)
    assert model.generate(ids, **GREEDY).tolist() == wanted
    with capture_routing(model) as routing:
        model(ids)
    for router in attachment(model).routers():
        mask = getattr(routing[router.layer_index], router.half_layer)
        assert torch.equal(mask, torch.ones(1, 12, router.num_groups, dtype=torch.bool))


def test_first_layers_alone_and_then_all_again():
    model, ids = optimize(routed(), backend="torch"), tokens(1, 12)
    wanted = model(ids).logits
    with engine_of(model).shortened(1):
        assert not torch.allclose(model(ids).logits, wanted)
        model.generate(ids, **GREEDY)
    assert torch.equal(model(ids).logits, wanted)


def thresholds(model, value):
    for router in attachment(model).routers():
        router.threshold = value


class Change(StoppingCriteria):
    """Moves thresholds after some tokens."""

    def __init__(self, model, values):
        self.model, self.values = model, list(values)

    def __call__(self, ids, scores, **kwargs):
        thresholds(self.model, self.values.pop(0))
        return torch.zeros(len(ids), dtype=torch.bool)


def test_thresholds_count_from_the_next_step_on():
    model, ids = routed(), tokens(2, 12)
    values = [0.2, -math.inf, -math.inf, 0.4, math.inf, 0.0]

    def asked():
        thresholds(model, 0.0)
        kinds = {"output_logits": True, "return_dict_in_generate": True}
        out = model.generate(ids, **GREEDY, **kinds, stopping_criteria=[Change(model, values)])
        thresholds(model, 0.3)
        # All but one token are cached: this turn begins with a step.
        again = model.generate(out.sequences, past_key_values=out.past_key_values, **GREEDY, **kinds)
        found = [*out.logits, *again.logits]
        cache = again.past_key_values
        with torch.no_grad():
            for value in (1e9, -0.2, -math.inf):
                thresholds(model, value)
                found.append(model(ids[:, :1], past_key_values=cache).logits[:, -1])
        return torch.stack(found)

    wanted = asked()
    assert len({tuple(each.flatten().tolist()) for each in wanted}) == len(wanted)
    optimize(model, backend="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.testing.assert_close(asked(), wanted, **CLOSE)


def test_a_threshold_moves_in_the_memory_that_graphs_read():
    model, ids = optimize(routed(), backend="torch"), tokens(1, 12)
    engine = engine_of(model)
    out = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    decoder, slot, step = engine.decoder, out.past_key_values.slot, dict(out.past_key_values.slot._steps)
    memory = [part.router.weights.offset for layer in decoder.layers for part in (layer.attention, layer.ffn)]
    before = [part.clone() for part in memory]
    thresholds(model, 0.5)
    model(ids[:, :1], past_key_values=out.past_key_values)
    assert engine.decoder is decoder
    assert slot._steps == step
    for now, old, layer in zip(memory[1::2], before[1::2], decoder.layers, strict=True):
        torch.testing.assert_close(now, old - 0.5)
        assert layer.ffn.router.weights.offset is now
    # Another set of kernels runs where nothing is skipped.
    thresholds(model, -math.inf)
    model(ids[:, :1], past_key_values=out.past_key_values)
    assert slot._steps[True] is not step[True]


class _Recorded:
    """Stands for the graph of a step on a machine without a GPU."""

    def __init__(self, slot, routed):
        self._run, self._slot = ForwardOptions(routed=routed), slot
        self.ids = torch.zeros(slot.cache.batch, dtype=torch.long)
        self.logits, self.replays = None, 0

    def replay(self):
        self.replays += 1
        found = self._slot.decoder.step(self.ids, self._slot.cache, self._run)
        # Every replay fills the same memory.
        self.logits = found if self.logits is None else self.logits.copy_(found)


@pytest.fixture
def recorded(monkeypatch):
    """Let steps be graphs that run on the CPU, at once; yield all of them."""
    made = []

    def step(slot, ids, *, routed, pool):
        known = slot._steps.get(routed)
        if known is None:
            graph = _Recorded(slot, routed)
            graph.ids.copy_(ids)
            graph.replay()
            made.append(graph)
            slot._steps[routed] = CapturedStep(graph, graph.ids, graph.logits)
            return graph.logits
        return known(ids)

    monkeypatch.setattr(Slot, "step", step)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: Mock())
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    return made


def _asked_ahead(model, ids, thresholds):
    """Return what `generate` gives where guesses are right, where they fail, and where others want the memory."""

    class Nested(LogitsProcessor):
        def __init__(self, act):
            self.act = act

        def __call__(self, seen, scores):
            if seen.shape[1] == ids.shape[1] + 3:
                self.act()
            return scores

    def move():
        for router, threshold in zip(attachment(model).routers(), thresholds, strict=True):
            router.threshold = threshold

    def fail():
        raise KeyboardInterrupt

    def forward():
        model(ids)
        # Its prompt may overwrite what graphs share.
        assert not is_running()

    def is_running():
        memory = getattr(engine_of(model), "_memory", None)
        return getattr(memory, "_next", None) is not None and memory._next._running is not None

    def generate(*processors, **more):
        options = GREEDY | {"max_new_tokens": 9, "output_logits": True, "return_dict_in_generate": True} | more
        try:
            out = model.generate(ids, logits_processor=LogitsProcessorList(processors), **options)
        finally:
            assert not is_running()
        return out.sequences, torch.stack(out.logits)

    found = [generate(), generate(repetition_penalty=1.7), generate(**padded(ids))]
    found.append(generate(eos_token_id=int(found[0][0][0, -4])))
    found.append(generate(Nested(lambda: model.generate(ids[:1, :5], **GREEDY))))
    found.append(generate(Nested(forward)))
    with pytest.raises(KeyboardInterrupt):
        generate(Nested(fail))
    found.append(generate())
    before = [router.threshold for router in attachment(model).routers()]
    found.append(generate(Nested(move)))
    thresholds[:] = before
    move()
    return found


@pytest.mark.parametrize("batch", [1, 3])
def test_steps_that_are_begun_ahead_change_nothing(batch, recorded):
    model, ids = routed(), tokens(batch, 12)
    thresholds = [0.4] * len(attachment(model).routers())
    wanted = _asked_ahead(model, ids, list(thresholds))
    optimize(model, backend="torch")
    found = _asked_ahead(model, ids, list(thresholds))
    for (sequences, logits), (wanted_sequences, wanted_logits) in zip(found, wanted, strict=True):
        assert sequences.tolist() == wanted_sequences.tolist()
        torch.testing.assert_close(logits, wanted_logits, **CLOSE)
    assert all(slot.holder is None for slot in engine_of(model)._memory.slots)


def test_no_step_is_begun_that_nobody_asks_for(recorded, monkeypatch):
    model, ids = optimize(routed(), backend="torch"), tokens(1, 12)
    begun = []
    begin = NextStep.begin
    monkeypatch.setattr(NextStep, "begin", lambda *each: (begun.append(each), begin(*each)))
    model.generate(ids, **(GREEDY | {"max_new_tokens": 9}))
    # The prompt gives the first of nine tokens, and the first step none to guess by.
    assert (sum(graph.replays for graph in recorded), len(begun)) == (8, 7)
    model.generate(ids, **(GREEDY | {"max_new_tokens": 9, "do_sample": True, "top_k": 3}))
    assert len(begun) == 7
    out = model(ids)
    for _ in range(3):
        out = model(ids[:, :1], past_key_values=out.past_key_values)
    assert len(begun) == 7
    model.generate(ids, **(GREEDY | {"max_new_tokens": 9, "repetition_penalty": 5.0}))
    assert 7 < len(begun) < 14
    # A processor that calls the model in every step takes back what was begun: once is enough.
    before = len(begun)
    model.generate(ids, **(GREEDY | {"max_new_tokens": 9, "guidance_scale": 1.5}))
    assert len(begun) == before + 1


def test_memory_is_not_lent_while_a_step_still_writes_it(recorded):
    model, ids = optimize(routed(max_position_embeddings=1024), backend="torch"), tokens(1, 12)
    engine = engine_of(model)
    out = model(ids)
    slot = out.past_key_values.slot
    slot.step(ids[:, 0], routed=True, pool=None)
    length = int(slot.cache.lengths)
    assert engine._memory.begin(slot, routed=True)
    out.past_key_values.tokens = slot.cache.room
    model(ids[:, :1], past_key_values=out.past_key_values)
    assert engine._memory._next._running is None
    assert int(slot.cache.lengths) == length == int(out.past_key_values.slot.cache.lengths) - 1
