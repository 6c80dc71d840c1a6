import math

import families
import numpy as np
import pytest
import torch
from depth_toys import assert_as_found, mean_nll, own_text, snapshot, toy_model, without_layers

from wide.config import WideConfig
from wide.errors import NotAttachedError
from wide.methods.block_gates import BlockGates, both_halves, plan_without, undefined_as_worst, whole_layers
from wide.methods.method import Effort
from wide.models.attach import attach
from wide.models.discovery import discover
from wide.plan import Dense, Skipped


@pytest.fixture
def zeroed_by_hooks():
    """Leave half-layers out in the plainest way: their modules run, and their outputs are multiplied by zero."""
    handles = []

    def zero(model, keep):
        for half in np.flatnonzero(~keep):
            spec = discover(model)[half // 2]
            module = spec.ffn.module if half % 2 else spec.attention.module
            handles.append(
                module.register_forward_hook(
                    lambda _m, _a, out: out * 0 if torch.is_tensor(out) else (out[0] * 0, None)
                )
            )

    yield zero
    for handle in handles:
        handle.remove()


def gates_of(model):
    return BlockGates(model, own_text(toy_model(1), 1, 4), 1)


def random_sets(count, num_halves, seed=0):
    return np.random.default_rng(seed).random((count, num_halves)) < 0.6


@pytest.mark.parametrize("family", families.distinct(families.FAMILIES))
def test_a_half_layer_left_out_gives_zero_in_every_family(family, zeroed_by_hooks):
    model, ids = families.make(family), families.tokens()
    keep = np.array([False, True, True, False])
    with torch.no_grad():
        dense = model(input_ids=ids, use_cache=False).logits
        with gates_of(model).keeping(keep):
            skipped = model(input_ids=ids, use_cache=False).logits
        zeroed_by_hooks(model, keep)
        assert torch.equal(skipped, model(input_ids=ids, use_cache=False).logits)
    assert not torch.allclose(skipped, dense)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "cohere2", "gemma3_text"])
@pytest.mark.parametrize("batch_size", [2, 3, 5])
def test_shared_prefixes_give_exactly_what_plain_forwards_give(family, batch_size):
    model, ids = families.make(family, num_hidden_layers=3), families.tokens(5, 9)
    gates = BlockGates(model, ids, batch_size)
    keeps = np.concatenate([random_sets(12, 6), np.ones((1, 6), bool), np.zeros((1, 6), bool)])
    keeps = np.concatenate([keeps, keeps[:3]])
    plain = []
    for keep in keeps:
        with gates.keeping(keep):
            plain.append(mean_nll(model, ids, batch_size))
    assert gates.mean_nll(keeps, "sets").tolist() == plain


def test_shared_prefixes_spare_layers():
    model = toy_model(4)
    ids = own_text(model, 2, 6)
    runs = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *_: runs.append(1))
    keeps = ~np.eye(8, dtype=bool)
    BlockGates(model, ids, 2).mean_nll(keeps, "sets")
    naive = sum(int(keep[::2].sum()) for keep in keeps)
    assert len(runs) < 0.7 * naive


def test_all_halves_of_layers_left_out_is_the_model_without_these_layers():
    model = toy_model(5)
    ids = own_text(model, 2, 8)
    keep = whole_layers(np.array([True, False, True, False, False]))
    with torch.no_grad(), gates_of(model).keeping(keep):
        skipped = model(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        deleted = without_layers(model, {1, 3, 4})(input_ids=ids, use_cache=False).logits
    assert torch.allclose(skipped, deleted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", families.distinct(families.FAMILIES))
def test_the_plan_of_a_kept_set_runs_what_was_scored(family):
    model, ids = families.make(family), families.tokens()
    keep = np.array([True, False, False, True])
    with torch.no_grad(), gates_of(model).keeping(keep):
        scored = model(input_ids=ids, use_cache=False).logits
    attach(model, plan_without(np.flatnonzero(~keep), 2))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, scored)


def test_the_model_is_left_as_found_even_after_an_error():
    model = toy_model(3).train()
    model.model.layers[1].requires_grad_(False)
    marked = model.model.layers[2].mlp
    own = marked.forward
    marked.__dict__["forward"] = own
    ids = own_text(model, 3, 6)
    before = snapshot(model)
    gates = BlockGates(model, ids, 2)
    gates.mean_nll(random_sets(9, 6), "sets")
    assert_as_found(model, before)
    with pytest.raises(RuntimeError, match="stop"), gates.keeping(np.zeros(6, bool)):
        raise RuntimeError("stop")
    assert_as_found(model, before)
    assert marked.__dict__["forward"] is own


def test_effort_counts_each_different_set_once():
    model = toy_model(2)
    keeps = np.array([[True] * 4, [True] * 4, [False, True, True, True]])
    gates = BlockGates(model, own_text(model, 3, 6), 2)
    gates.mean_nll(keeps, "sets")
    assert gates.effort == Effort(tokens_forward=2 * 18, tokens_backward=0)


def test_what_does_not_fit_is_refused():
    model = toy_model(2)
    attach(model, WideConfig(ffn_group_size=8, attention_group_size=6, router_rank=2))
    with pytest.raises(NotAttachedError, match="detach"):
        gates_of(model)


def test_plans_and_undefined_losses():
    plan = plan_without([1, *both_halves([1])], 2)
    assert [(type(p.attention), type(p.ffn)) for p in plan.layers] == [(Dense, Skipped), (Skipped, Skipped)]
    assert undefined_as_worst(np.array([1.0, math.nan, math.inf])).tolist() == [1.0, math.inf, math.inf]
