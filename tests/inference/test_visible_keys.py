"""Fused execution obeys every mask: what wide's attention does not know runs in the family's own."""

import warnings

import pytest
import torch
from families import make, tokens
from tables import fixed
from transformers import DynamicCache, StaticCache

from wide.config import WideConfig
from wide.inference.engine import visible_keys
from wide.inference.optimize import optimize
from wide.models.attach import attach, attachment
from wide.models.gates import gate_of
from wide.models.observe import capture_routing, force_routing

CONFIG = WideConfig(ffn_group_size=16)
SMALL = fixed("torch", query=16, attention=4, output=16, gate_up=16, down=16)
BATCH, LENGTH = 2, 12
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def keys_of(model):
    return gate_of(attachment(model).specs[0].attention.module).executor.keys


def routed(family="llama", **changes):
    return attach(make(family, **changes), CONFIG)


def masked_and_fused(model, run):
    """Return what `run(model)` gives masked, and fused with the same routing."""
    with torch.no_grad(), capture_routing(model, history=True) as routing:
        masked = run(model)
    optimize(model, table=SMALL)
    with torch.no_grad(), force_routing(model, routing):
        return masked, run(model)


def padding(kind, generator):
    """Return a mask [B, T] of a kind with random places."""
    valid = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for row in valid:
        first, second = sorted(torch.randperm(LENGTH - 2, generator=generator)[:2].tolist())
        if kind in ("left", "both"):
            row[: first + 1] = 0
        if kind in ("right", "both"):
            row[second + 1 :] = 0
        if kind == "hole":
            row[first + 1 : second + 1] = 0
    return valid


@pytest.mark.parametrize("kind", ["none", "left", "right", "both", "hole"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_prompts_and_steps_obey_any_padding(kind, implementation):
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        model, valid = routed(), padding(kind, generator)
        model.set_attn_implementation(implementation)

        def run(model, valid=valid):
            ids = tokens(BATCH, LENGTH + 2)
            prompt = model(ids[:, :LENGTH], attention_mask=valid, use_cache=True)
            parts, cache = [prompt.logits], prompt.past_key_values
            seen = valid
            for place in (LENGTH, LENGTH + 1):
                seen = torch.cat([seen, torch.ones(BATCH, 1, dtype=torch.long)], dim=1)
                parts.append(model(ids[:, place : place + 1], attention_mask=seen, past_key_values=cache).logits)
            return torch.cat(parts, dim=1)

        masked, fused = masked_and_fused(model, run)
        real = torch.cat([valid.bool(), torch.ones(BATCH, 2, dtype=torch.bool)], dim=1)
        torch.testing.assert_close(fused[real], masked[real], **CLOSE)


def test_left_padding_alone_and_none_are_fused_and_all_else_warns():
    generator = torch.Generator().manual_seed(0)
    for kind, is_fused in (("none", True), ("left", True), ("right", False), ("hole", False)):
        model = optimize(routed(), table=SMALL)
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(tokens(BATCH, LENGTH), attention_mask=padding(kind, generator), use_cache=False)
        assert len(caught) == (0 if is_fused else 1)
        assert is_fused or "right padding" in str(caught[0].message)


def test_packed_sequences_do_not_see_each_other():
    model, places = routed(), torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]])

    def run(model):
        ids = tokens(BATCH, LENGTH)
        packed = model(ids, position_ids=places.expand(BATCH, -1), use_cache=False).logits
        return torch.cat([packed, model(ids, None, places.expand(BATCH, -1), use_cache=False).logits])

    with pytest.warns(UserWarning, match="packed sequences"):
        masked, fused = masked_and_fused(model, run)
    torch.testing.assert_close(fused, masked, **CLOSE)


def test_masks_given_by_place_are_seen():
    model, valid = routed(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    valid[0, :5] = valid[1, 3:6] = 0

    masked, fused = masked_and_fused(model, lambda model: model(tokens(BATCH, LENGTH), valid).logits)
    torch.testing.assert_close(fused[valid.bool()], masked[valid.bool()], **CLOSE)


@pytest.mark.parametrize("step", [1, 5])
def test_a_mask_of_the_callers_own_is_obeyed(step):
    """Of four dimensions: causal with a hole, per head, or a bias on the scores."""
    free = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    with_hole, per_head = free.clone(), free.expand(1, 4, -1, -1).clone()
    with_hole[..., 2:4] = False
    per_head[:, 1, :, 0] = False
    bias = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~free, -torch.inf)
    bias[..., 3] += 0.5
    for mask in (with_hole, per_head, bias):
        model, cut = routed(), LENGTH - step

        def run(model, mask=mask, cut=cut):
            ids = tokens(BATCH, LENGTH)
            first = model(ids[:, :cut], attention_mask=mask[..., :cut, :cut], use_cache=True)
            second = model(ids[:, cut:], attention_mask=mask[..., cut:, :], past_key_values=first.past_key_values)
            return torch.cat([first.logits, second.logits], dim=1)[:, 4:]

        masked, fused = masked_and_fused(model, run)
        torch.testing.assert_close(fused, masked, **CLOSE)


@pytest.mark.parametrize(
    "family", ["mistral", "gemma2", "gemma3_text", "cohere2", "exaone4", "olmo3", "ministral3", "qwen2"]
)
@pytest.mark.parametrize("make_cache", [DynamicCache, StaticCache])
def test_windows_shorter_than_the_text(family, make_cache):
    more = {"use_sliding_window": True, "max_window_layers": 0} if family == "qwen2" else {}
    model, valid = routed(family, sliding_window=5, **more), torch.ones(BATCH, LENGTH + 1, dtype=torch.long)
    valid[0, :3] = 0

    def run(model):
        ids = tokens(BATCH, LENGTH + 1)
        options = {"max_cache_len": 24} if make_cache is StaticCache else {}
        cache, parts = make_cache(config=model.config, **options), []
        for start, stop in ((0, 7), (7, LENGTH), (LENGTH, LENGTH + 1)):
            parts.append(model(ids[:, start:stop], attention_mask=valid[:, :stop], past_key_values=cache).logits)
        return torch.cat(parts, dim=1)

    masked, fused = masked_and_fused(model, run)
    torch.testing.assert_close(fused[valid.bool()], masked[valid.bool()], **CLOSE)


def test_a_compiled_forward_does_not_go_by_an_earlier_one():
    model, ids = routed(), tokens(BATCH, LENGTH)
    valid = torch.ones(BATCH, LENGTH, dtype=torch.long)
    valid[1, :6] = 0
    with torch.no_grad(), capture_routing(model) as routing:
        masked = model(ids).logits
    optimize(model, table=SMALL)
    torch._dynamo.reset()
    with torch.no_grad():
        model(ids, attention_mask=valid)
        with force_routing(model, routing):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(ids).logits, masked, **CLOSE)


def test_a_captured_forward_goes_by_shapes_alone_and_never_by_an_earlier_one(monkeypatch):
    model, ids = optimize(routed(), table=SMALL), tokens(BATCH, LENGTH)
    valid = torch.ones(BATCH, LENGTH, dtype=torch.long)
    valid[1, :6] = 0
    seen = []
    keys = keys_of(model)
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append((keys.prefill, keys.step)))

    def unread(*_):
        raise AssertionError("a value was read during the capture")

    with torch.no_grad():
        model(ids, attention_mask=valid)
        assert seen.pop()[0].starts.tolist() == [0, 6]
        monkeypatch.setattr(visible_keys, "is_being_recorded", lambda ids: True)
        for name in ("_padding", "_counts_up", "_is_one_run"):
            monkeypatch.setattr(visible_keys, name, unread)
        static = StaticCache(config=model.config, max_cache_len=LENGTH)
        for inputs in (
            {"attention_mask": valid},
            {"position_ids": torch.arange(LENGTH)[None]},
            {"past_key_values": static},
        ):
            model(ids, **inputs)
            assert seen.pop() == (None, False)
        monkeypatch.setattr(visible_keys, "_counts_up", lambda positions: positions is None or unread())
        for cache in (None, DynamicCache(config=model.config)):
            model(ids, past_key_values=cache)
            assert seen.pop() == ((0, None), False)


def test_layers_called_on_their_own_do_not_go_by_an_earlier_forward():
    model, ids = routed(), tokens(BATCH, LENGTH)
    valid = torch.ones(BATCH, LENGTH, dtype=torch.long)
    valid[1, :6] = 0
    with torch.no_grad(), capture_routing(model) as routing:
        masked = model(ids).logits
    optimize(model, table=SMALL)
    with torch.no_grad():
        model(ids, attention_mask=valid)
        with pytest.raises(RuntimeError):
            model(ids, attention_mask=valid, position_ids=torch.zeros(3, 5, dtype=torch.long))
        with force_routing(model, routing):
            torch.testing.assert_close(model.lm_head(model.model(ids).last_hidden_state), masked, **CLOSE)


@pytest.fixture
def unread(monkeypatch):
    """Masks cost a wait for the device, as on a GPU; yields the list of masks that were read."""
    read, original = [], visible_keys._is_one_run
    monkeypatch.setattr(visible_keys, "is_free_to_read", lambda tensor: False)
    monkeypatch.setattr(visible_keys, "_is_one_run", lambda mask: read.append(mask) or original(mask))
    return read


def steps(model, prompt_mask, step_masks):
    """Return the logits of steps after a prompt."""
    cache, ids = DynamicCache(config=model.config), tokens(BATCH, LENGTH)
    with torch.no_grad():
        model(ids, attention_mask=prompt_mask, past_key_values=cache)
        return [model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits for mask in step_masks]


def test_steps_on_a_gpu_read_no_mask_and_a_broken_promise_gives_nan(unread):
    ones = torch.ones(BATCH, LENGTH + 2, dtype=torch.long)
    left, hole = ones.clone(), ones.clone()
    left[0, :4] = 0
    hole[0, 4:7] = 0
    model = optimize(routed(), table=SMALL)
    fine = steps(model, left[:, :LENGTH], [left[:, : LENGTH + 1], left])
    assert all(logits.isfinite().all() for logits in fine)
    assert not unread
    first, second = steps(model, ones[:, :LENGTH], [ones[:, : LENGTH + 1], hole])
    assert first.isfinite().all()
    assert second[0].isnan().all()
    assert second[1].isfinite().all()
    assert not unread


def test_the_first_step_after_a_prompt_without_mask_reads_it_once(unread):
    ones = torch.ones(BATCH, LENGTH + 2, dtype=torch.long)
    hole = ones.clone()
    hole[0, 4:7] = 0
    model = routed()
    masked, fused = masked_and_fused(
        model, lambda model: torch.cat(steps(model, None, [hole[:, : LENGTH + 1], hole]), dim=1)
    )
    torch.testing.assert_close(fused, masked, **CLOSE)
    assert len(unread) == 1
    unread.clear()
    steps(model, None, [ones[:, : LENGTH + 1], ones])
    assert len(unread) == 1


def test_a_compiled_step_after_right_padding_is_dense():
    mask = torch.ones(BATCH, LENGTH + 1, dtype=torch.long)
    for places, is_fused in (((0, 4), True), ((8, LENGTH), False)):
        valid = mask.clone()
        valid[0, places[0] : places[1]] = 0
        model, ids = routed(), tokens(BATCH, LENGTH + 1)
        keys = None

        def run(model, valid=valid, ids=ids, compiled=False):
            cache = DynamicCache(config=model.config)
            model(ids[:, :LENGTH], attention_mask=valid[:, :LENGTH], past_key_values=cache)
            call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
            return call(ids[:, LENGTH:], attention_mask=valid, past_key_values=cache).logits

        with torch.no_grad(), capture_routing(model, history=True) as routing:
            masked = run(model)
        optimize(model, table=SMALL)
        keys, seen = keys_of(model), []
        before = keys.bounds
        keys.bounds = lambda *args, before=before, seen=seen: seen.append(1) or before(*args)
        torch._dynamo.reset()
        with torch.no_grad(), force_routing(model, routing):
            torch.testing.assert_close(run(model, compiled=True), masked, **CLOSE)
        assert bool(seen) == is_fused
