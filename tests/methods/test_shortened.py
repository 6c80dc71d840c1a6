import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from depth_toys import assert_as_found, blocks_of, mean_nll, own_text, silence, snapshot, toy_model, without_layers

from wide.data.batches import blocks_of_texts
from wide.data.tokenizer import load_tokenizer
from wide.errors import ConfigError, EvaluationError
from wide.methods.block_gates import BlockGates, whole_layers
from wide.methods.calibration import windows
from wide.methods.catalogue import ShortenedConfig
from wide.methods.method import Effort, Target
from wide.methods.shortened import (
    _deviations,
    decide_by_perplexity,
    decide_by_taylor,
    perplexity_scores,
    protected_layers,
    removal_order,
    removed_layers,
    taylor_scores,
)
from wide.models.attach import attach, detach
from wide.plan import Dense, Skipped

ROOT = Path(__file__).parents[2]
NANO = ROOT / "models/nano"
SMALL = ShortenedConfig(num_windows=4, window_length=10, batch_size=4)
BOTH = [decide_by_perplexity, decide_by_taylor]


def by_perplexity(model, ids, batch_size=3):
    return perplexity_scores(BlockGates(model, ids, batch_size))


def by_taylor(model, ids, batch_size=100):
    return taylor_scores(BlockGates(model, ids, batch_size))


def reference_products(model, ids):
    """Return W * dL/dW of every layer parameter in float64, and the loss as a function of how much W grows."""
    exact = copy.deepcopy(model).double()

    def loss(growth=0.0):
        grown = {n: p * (1 + growth) if "layers." in n else p for n, p in exact.named_parameters()}
        logits = torch.func.functional_call(exact, grown, kwargs={"input_ids": ids, "use_cache": False}).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    loss().backward()
    return {n: (p * p.grad).detach() for n, p in exact.named_parameters() if "layers." in n}, loss


def skipped(plan):
    assert all(type(layer.attention) is type(layer.ffn) for layer in plan.layers)
    assert all(isinstance(layer.ffn, Dense | Skipped) for layer in plan.layers)
    return [index for index, layer in enumerate(plan.layers) if isinstance(layer.ffn, Skipped)]


def test_one_layer_left_out_is_the_model_without_it():
    model = toy_model(4)
    ids = own_text(model, 2, 9)
    for layer in range(4):
        keep = np.arange(4) != layer
        with torch.no_grad(), BlockGates(model, ids, 2).keeping(whole_layers(keep)):
            logits = model(input_ids=ids, use_cache=False).logits
        with torch.no_grad():
            wanted = without_layers(model, {layer})(input_ids=ids, use_cache=False).logits
        assert torch.allclose(logits, wanted, atol=1e-5, rtol=0)


def test_perplexity_scores_are_the_losses_of_shorter_models():
    model = toy_model(5)
    ids = own_text(model, 4, 9)
    wanted = [mean_nll(without_layers(model, {layer}), ids, 3) for layer in range(5)]
    assert by_perplexity(model, ids) == pytest.approx(wanted, rel=1e-6)


def test_a_layer_that_does_nothing_has_the_dense_loss_and_comes_first():
    model = toy_model(4)
    silence(model, 4)
    silence(model, 5)
    ids = own_text(model, 4, 12)
    scores = by_perplexity(model, ids)
    assert scores[2] == mean_nll(model, ids, 3)
    assert removal_order(scores)[0] == 2


def test_a_layer_without_which_the_forward_breaks_down_comes_last():
    scores = np.array([3.0, math.inf, 1.0, 3.0])
    assert removal_order(scores) == [2, 0, 3, 1]


def test_a_layer_that_does_nothing_has_a_taylor_score_of_zero():
    model = toy_model(4)
    silence(model, 2)
    silence(model, 3)
    scores = by_taylor(model, own_text(model, 3, 9))
    assert scores[1] == 0.0
    assert (np.delete(scores, 1) > 0).all()


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 1}])
def test_taylor_scores_are_the_sums_of_weights_times_gradients(changes):
    model = toy_model(3, **changes)
    ids = own_text(model, 4, 9)
    products, loss = reference_products(model, ids)
    # Norms compute in float32 whatever the model's dtype, hence no smaller step.
    step = 1e-3
    with torch.no_grad():
        slope = (loss(step) - loss(-step)) / (2 * step)
    assert float(sum(p.sum() for p in products.values())) == pytest.approx(float(slope), rel=2e-3)
    wanted = [sum(float(p.abs().sum()) for n, p in products.items() if f"layers.{i}." in n) for i in range(3)]
    assert by_taylor(model, ids) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_taylor_scores_do_not_depend_on_the_micro_batch(batch_size):
    model = toy_model(3)
    ids = own_text(model, 5, 9)
    assert by_taylor(model, ids, batch_size) == pytest.approx(by_taylor(model, ids), rel=1e-4)


def test_taylor_scores_do_not_see_a_scale_moved_from_down_to_up():
    model = toy_model(3)
    ids = own_text(model, 3, 9)
    before = by_taylor(model, ids)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 8.0
        model.model.layers[1].mlp.down_proj.weight /= 8.0
    assert by_taylor(model, ids) == pytest.approx(before, rel=1e-5)


def test_taylor_scores_work_in_bfloat16_and_on_tied_frozen_models():
    model = toy_model(3, tie_word_embeddings=True).requires_grad_(False)
    ids = own_text(model, 3, 9)
    exact = by_taylor(model, ids)
    assert by_taylor(model.bfloat16(), ids) == pytest.approx(exact, rel=0.1)


def test_taylor_scores_that_overflow_are_refused():
    model = toy_model(3)
    ids = own_text(model, 2, 6)
    with torch.no_grad():
        model.lm_head.weight *= math.inf
    with pytest.raises(EvaluationError, match="not finite"):
        by_taylor(model, ids)


@pytest.mark.parametrize("decide", BOTH)
def test_the_model_is_left_as_found(decide):
    model = toy_model(4).train()
    blocks = blocks_of(own_text(model, 6, 12))
    model.model.layers[0].mlp.requires_grad_(False)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    model.model.layers[1].mlp.up_proj.weight.grad = torch.ones_like(model.model.layers[1].mlp.up_proj.weight)
    before = snapshot(model)
    decide(model, blocks, Target(sparsity=0.25), SMALL)
    assert_as_found(model, before)
    with pytest.raises(ConfigError):
        decide(model, blocks, Target(sparsity=0.9), SMALL)
    assert_as_found(model, before)


@pytest.mark.parametrize("decide", BOTH)
def test_the_plan_skips_the_first_layers_of_the_order_that_are_not_protected(decide):
    model = toy_model(8)
    blocks = blocks_of(own_text(model, 6, 12))
    sizes = []
    for sparsity in (0.0, 0.125, 0.375, 0.5):
        decisions = [
            decide(model, blocks, Target(sparsity=sparsity, match=m), SMALL) for m in ("nominal", "linear_flops")
        ]
        assert decisions[0] == decisions[1]
        removed = skipped(decisions[0].plan)
        sizes.append(len(removed))
        if removed:
            notes = decisions[0].notes
            assert sorted(notes["order"]) == list(range(8))
            assert sorted(notes["removed"]) == removed
            assert notes["removed"] == [layer for layer in notes["order"] if layer not in (0, 7)][: len(removed)]
            assert notes["protected"] == [0, 7]
    assert sizes == [0, 1, 3, 4]


def test_effort_is_the_text_of_every_forward():
    model = toy_model(4)
    blocks = blocks_of(own_text(model, 6, 12))
    taylor = decide_by_taylor(model, blocks, Target(sparsity=0.25), SMALL)
    assert taylor.effort == Effort(tokens_forward=0, tokens_backward=40)
    perplexity = decide_by_perplexity(model, blocks, Target(sparsity=0.25), SMALL)
    assert perplexity.effort == Effort(tokens_forward=40 * (1 + 4), tokens_backward=0)


@pytest.mark.parametrize(
    ("num_layers", "wanted"), [(32, {0, 1, 2, 3, 30, 31}), (28, {0, 1, 2, 3, 26, 27}), (6, {0, 5}), (2, {0, 1})]
)
def test_protection_follows_the_depth(num_layers, wanted):
    assert protected_layers(num_layers, ShortenedConfig()) == wanted


@pytest.mark.parametrize(("num_layers", "is_original"), [(32, True), (28, True), (12, False)])
def test_protection_that_is_not_the_originals_is_declared(num_layers, is_original):
    told = _deviations(protected_layers(num_layers, ShortenedConfig()), num_layers)
    assert (len(told) == 1) == is_original
    asked = _deviations(protected_layers(num_layers, ShortenedConfig(protect_first=4, protect_last=2)), num_layers)
    assert len(asked) == 1
    if not is_original:
        assert "layers 0, 1, 11 are protected" in told[1]
        assert "first 4 and the last 2" in told[1]


def test_protection_can_be_set():
    assert protected_layers(8, ShortenedConfig(protect_first=0, protect_last=0)) == set()
    assert protected_layers(8, ShortenedConfig(protect_first=3, protect_last=20)) == set(range(8))
    assert removed_layers([2, 0, 1], frozenset(), 3) == [2, 0, 1]
    with pytest.raises(ConfigError, match="only 1 are not protected"):
        removed_layers([2, 0, 1], frozenset({0, 1}), 2)
    with pytest.raises(ConfigError, match="protect_last"):
        ShortenedConfig(protect_last=-1)


def test_gradients_in_another_dtype_are_a_deviation():
    model = toy_model(4)
    blocks = blocks_of(own_text(model, 6, 12))
    models = (model, copy.deepcopy(model).bfloat16())
    decisions = [decide_by_taylor(m, blocks, Target(sparsity=0.25), SMALL) for m in models]
    assert [any("bfloat16" in text for text in d.deviations) for d in decisions] == [False, True]


def test_on_a_trained_model_the_ends_matter_most_and_more_removed_is_worse():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()
    text = blocks_of_texts([(ROOT / "LICENSE").read_text()], load_tokenizer(NANO), sequence_length=128)
    held_out = windows(text, count=4, length=128, seed=99)
    settings = ShortenedConfig(num_windows=4, window_length=96)
    losses = []
    for sparsity in (0.0, 0.2, 0.5):
        decision = decide_by_perplexity(model, text, Target(sparsity=sparsity), settings)
        attach(model, decision.plan)
        losses.append(mean_nll(model, held_out, 8))
        detach(model)
    assert losses == sorted(losses)
    assert set(decision.notes["order"][-2:]) == {0, 5}
