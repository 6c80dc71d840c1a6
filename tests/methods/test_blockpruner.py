import itertools
import math

import numpy as np
import pytest
import torch
from depth_toys import assert_as_found, blocks_of, mean_nll, own_text, silence, snapshot, toy_model, without_layers

from wide.errors import EvaluationError
from wide.methods.block_gates import BlockGates
from wide.methods.blockpruner import Step, decide, greedy_steps, shares_of_work
from wide.methods.catalogue import BlockPrunerConfig
from wide.methods.method import Effort, Target
from wide.models.discovery import discover
from wide.plan import Skipped

SMALL = BlockPrunerConfig(num_windows=4, window_length=10, batch_size=3)


def greedy(model, ids, count):
    return list(itertools.islice(greedy_steps(BlockGates(model, ids, 3)), count))


def loss_without(model, halves, ids):
    gates = BlockGates(model, ids, 3)
    keep = np.ones(2 * gates.num_layers, dtype=bool)
    keep[list(halves)] = False
    with gates.keeping(keep):
        return mean_nll(model, ids, 3)


def skipped(plan):
    halves = [half for layer in plan.layers for half in (layer.attention, layer.ffn)]
    return [index for index, half in enumerate(halves) if isinstance(half, Skipped)]


def test_both_halves_left_out_is_the_model_without_the_layer():
    model = toy_model(4)
    ids = own_text(model, 3, 9)
    assert loss_without(model, (4, 5), ids) == pytest.approx(mean_nll(without_layers(model, {2}), ids, 3), rel=1e-6)


def test_every_step_is_the_best_single_removal():
    model = toy_model(4)
    ids = own_text(model, 4, 9)
    removed = []
    for step in greedy(model, ids, 8):
        losses = {half: loss_without(model, [*removed, half], ids) for half in range(8) if half not in removed}
        assert step.sublayer == min(losses, key=losses.get)
        assert step.nll == losses[step.sublayer]
        removed.append(step.sublayer)
    assert sorted(removed) == list(range(8))


def test_sequences_are_nested_and_as_long_as_asked_for():
    model = toy_model(3)
    blocks = blocks_of(own_text(model, 6, 12))
    sequences = []
    for count in range(6):
        decision = decide(model, blocks, Target(sparsity=count / 6), SMALL)
        assert len(skipped(decision.plan)) == count
        sequences.append(decision.notes.get("removed", []))
    assert all(longer[:-1] == shorter for shorter, longer in itertools.pairwise(sequences))


@pytest.mark.parametrize("half", [0, 3, 4])
def test_a_half_layer_that_does_nothing_goes_first_and_costs_nothing(half):
    model = toy_model(3)
    silence(model, half)
    ids = own_text(model, 6, 12)
    first = greedy(model, ids, 1)[0]
    assert first == Step(half, mean_nll(model, ids, 3))


def test_greedy_is_never_better_than_the_best_set(record_property):
    model = toy_model(4)
    ids = own_text(model, 3, 8)
    found = greedy(model, ids, 3)[-1].nll
    all_sets = [loss_without(model, halves, ids) for halves in itertools.combinations(range(8), 3)]
    record_property("greedy_gap_nats", found - min(all_sets))
    assert min(all_sets) <= found < np.median(all_sets)


def test_shares_of_work_are_those_of_the_weights():
    model = toy_model(2)
    shares = shares_of_work(discover(model))
    layer = model.model.layers[0]
    attention = sum(p.weight.numel() for n, p in layer.self_attn.named_children() if n.endswith("proj"))
    ffn = sum(p.weight.numel() for n, p in layer.mlp.named_children() if n.endswith("proj"))
    assert shares == pytest.approx([x / (2 * (attention + ffn)) for x in (attention, ffn)] * 2)


@pytest.mark.parametrize("sparsity", [0.0, 0.02, 0.25, 0.5, 0.66, 0.75, 0.9])
def test_linear_flops_are_met_by_passing_over_what_does_not_fit(sparsity):
    model = toy_model(4)
    blocks = blocks_of(own_text(model, 6, 12))
    decision = decide(model, blocks, Target(sparsity=sparsity, match="linear_flops"), SMALL)
    shares = shares_of_work(discover(model))
    taken = skipped(decision.plan)
    found = sum(shares[half] for half in taken)
    # Nothing that is left fits any more.
    assert found <= sparsity + min(shares) / 2 + 1e-9
    assert all(found + shares[half] > sparsity + min(shares) / 2 for half in set(range(8)) - set(taken))
    assert abs(found - sparsity) <= max(shares) / 2
    assert decision.notes.get("linear_flops", 0.0) == pytest.approx(found)


def test_the_model_is_left_as_found_and_the_effort_counted():
    model = toy_model(3).train()
    blocks = blocks_of(own_text(model, 6, 12))
    before = snapshot(model)
    decision = decide(model, blocks, Target(sparsity=0.5), SMALL)
    assert_as_found(model, before)
    assert decision.effort == Effort(tokens_forward=40 * (1 + 6 + 5 + 4))
    assert decision == decide(model, blocks, Target(sparsity=0.5), SMALL)
    assert any("4 windows of 10 tokens" in text for text in decision.deviations)


def test_a_search_that_finds_no_finite_loss_stops():
    model = toy_model(2)
    with torch.no_grad():
        model.lm_head.weight[:] = math.nan
    with pytest.raises(EvaluationError, match="after 0 removed"):
        greedy(model, torch.zeros(1, 4, dtype=torch.int64), 1)
