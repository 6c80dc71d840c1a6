import itertools
import math

import numpy as np
import pytest
import torch
from depth_toys import assert_as_found, blocks_of, mean_nll, own_text, snapshot, toy_model, without_layers

from wide.errors import ConfigError, EvaluationError
from wide.methods import cooppruner
from wide.methods.block_gates import BlockGates, whole_layers
from wide.methods.catalogue import CoopPrunerConfig
from wide.methods.cooppruner import (
    contributions,
    decide,
    explained_variance,
    finite_pairs,
    fit_surrogate,
    measured_utilities,
    removed_counts,
    sample_kept_layers,
)
from wide.methods.method import Effort, Target
from wide.plan import Skipped

SMALL = CoopPrunerConfig(
    num_masks=60, num_contribution_masks=200, epochs=20, num_windows=4, window_length=10, batch_size=4
)


def draw(num_layers, removed, count, seed=0):
    return sample_kept_layers(num_layers, removed, count, np.random.default_rng(seed))


def utilities_of(model, kept, ids):
    return measured_utilities(BlockGates(model, ids, 16), kept, dense=mean_nll(model, ids, 16))


def skipped(plan):
    return [index for index, layer in enumerate(plan.layers) if isinstance(layer.ffn, Skipped)]


def shapley(values, num_players):
    """Return the Shapley values of a game given as an array over bit sets, by the definition."""
    result = np.zeros(num_players)
    for player in range(num_players):
        others = [p for p in range(num_players) if p != player]
        for size in range(num_players):
            weight = math.factorial(size) * math.factorial(num_players - size - 1) / math.factorial(num_players)
            for coalition in itertools.combinations(others, size):
                without = sum(1 << p for p in coalition)
                result[player] += weight * (values[without | 1 << player] - values[without])
    return result


def test_the_contribution_to_a_sum_is_the_summand():
    coefficients = torch.linspace(-1.0, 2.0, 9, dtype=torch.float64)
    kept = draw(9, [1, 3, 4], 500)
    found = contributions(lambda sets: sets @ coefficients + 0.25, kept, torch.float64)
    assert found == pytest.approx(coefficients.numpy(), abs=1e-12)


def test_over_sets_of_all_sizes_the_contributions_are_shapley_values():
    values = np.random.default_rng(0).random(256)
    table = torch.from_numpy(values)
    kept = draw(8, range(9), 90_000)
    bits = 2.0 ** torch.arange(8, dtype=torch.float64)
    found = contributions(lambda sets: table[(sets @ bits).long()], kept, torch.float64)
    assert np.abs(found - shapley(values, 8)).max() < 0.02
    assert found.sum() == pytest.approx(values[255] - values[0], abs=0.02)


def test_sampled_sets_have_the_sizes_of_the_strata_and_use_every_layer_alike():
    kept = draw(10, [1, 4, 7], 30_000)
    sizes, counts = np.unique((~kept).sum(1), return_counts=True)
    assert sizes.tolist() == [1, 4, 7]
    assert counts.tolist() == [10_000] * 3
    assert kept.mean(0) == pytest.approx(np.full(10, 0.6), abs=0.02)
    assert np.array_equal(kept, draw(10, [1, 4, 7], 30_000))


@pytest.mark.parametrize(
    ("num_layers", "count", "strata", "wanted"),
    [
        (32, 16, "paper", [2, 5, 8, 11, 14]),
        (32, 16, "spanning", [2, 5, 8, 11, 14, 17, 20]),
        (32, 26, "spanning", [2, 6, 10, 14, 18, 22, 26]),
        (28, 14, "paper", [2, 4, 7, 10, 12]),
        (6, 2, "paper", [1, 2, 3]),
        (2, 1, "paper", [1]),
        (4, 3, "spanning", [1, 2, 3]),
    ],
)
def test_strata_follow_the_depth(num_layers, count, strata, wanted):
    assert removed_counts(num_layers, count, strata) == wanted


def test_the_utility_is_that_of_the_deleted_and_of_the_zeroed_model():
    model = toy_model(5)
    ids = own_text(model, 3, 9)
    kept = np.array([[True, False, True, True, False], [False, True, True, True, True], [True] * 5])
    found = utilities_of(model, kept, ids)
    dense = mean_nll(model, ids, 3)
    deleted = [mean_nll(without_layers(model, set(np.flatnonzero(~row))), ids, 3) for row in kept]
    assert found == pytest.approx(np.exp(dense - np.array(deleted)), rel=1e-5)
    assert found[2] == pytest.approx(1.0, abs=1e-6)
    with torch.no_grad():
        for layer in np.flatnonzero(~kept[0]):
            for parameter in model.model.layers[layer].parameters():
                parameter.zero_()
    assert math.exp(dense - mean_nll(model, ids, 3)) == pytest.approx(found[0], rel=1e-5)


def test_undefined_utilities_go_together_with_their_sets():
    kept = draw(6, [1, 2], 10)
    utilities = np.arange(10.0)
    utilities[[2, 7]] = math.nan, math.inf
    sets, finite = finite_pairs(kept, utilities)
    assert finite.tolist() == [0, 1, 3, 4, 5, 6, 8, 9]
    assert np.array_equal(sets, kept[[0, 1, 3, 4, 5, 6, 8, 9]])
    with pytest.raises(EvaluationError, match="no loss of 10 sets"):
        finite_pairs(kept, np.full(10, math.nan))


def test_a_forward_that_breaks_down_has_no_utility():
    class Broken(BlockGates):
        def mean_nll(self, keeps, title):
            return np.array([1.0, math.nan, math.inf, 2.0])

    model = toy_model(4)
    gates = Broken(model, own_text(model, 1, 4), 1)
    found = measured_utilities(gates, ~np.eye(4, dtype=bool), dense=1.0)
    assert found == pytest.approx([1.0, math.nan, math.nan, math.exp(-1)], nan_ok=True)


def test_undefined_utilities_do_not_change_what_is_learnt_from_the_others(monkeypatch):
    model = toy_model(6)
    blocks = blocks_of(own_text(model, 6, 12))
    true = cooppruner.measured_utilities
    monkeypatch.setattr(cooppruner, "sample_kept_layers", doubling(cooppruner.sample_kept_layers))
    monkeypatch.setattr(cooppruner, "measured_utilities", lambda *a, **k: spoil_even(true(*a, **k)))
    spoilt = decide(model, blocks, Target(sparsity=0.5), SMALL)
    monkeypatch.setattr(cooppruner, "measured_utilities", true)
    monkeypatch.setattr(cooppruner, "sample_kept_layers", sample_kept_layers)
    whole = decide(model, blocks, Target(sparsity=0.5), SMALL)
    assert spoilt.notes["undefined_utilities"] == SMALL.num_masks
    assert spoilt.notes["contributions"] == pytest.approx(whole.notes["contributions"], abs=1e-6)


def doubling(sample):
    """Draw the sets that are measured twice each, one beside the other."""

    def twice(num_layers, removed, count, generator):
        kept = sample(num_layers, removed, count, generator)
        return np.repeat(kept, 2, axis=0) if count == SMALL.num_masks else kept

    return twice


def spoil_even(utilities):
    utilities[::2] = math.nan
    return utilities


def test_the_surrogate_ranks_unseen_sets_and_finds_a_good_one():
    model = toy_model(12, initializer_range=0.1)
    ids = own_text(model, 6, 12)
    generator = np.random.default_rng(0)
    strata = removed_counts(12, 4, "paper")
    sets = np.unique(sample_kept_layers(12, strata, 900, generator), axis=0)
    sets = generator.permutation(sets)
    utilities = utilities_of(model, sets, ids)
    settings = CoopPrunerConfig(surrogate_batch_size=32, learning_rate=0.05, epochs=150, rate_step=100)
    surrogate = fit_surrogate(sets[100:], utilities[100:], settings)
    unseen = sets[:100]
    predicted = surrogate(torch.from_numpy(unseen.astype(np.float32))).detach().numpy()
    ranks = [values.argsort().argsort() for values in (predicted, utilities[:100])]
    assert np.corrcoef(*ranks)[0, 1] >= 0.9
    assert explained_variance(surrogate, unseen, utilities[:100]) > 0.7
    values = contributions(surrogate, sample_kept_layers(12, strata, 4000, generator))
    chosen = np.ones((1, 12), dtype=bool)
    chosen[0, values.argsort()[:4]] = False
    scores = utilities_of(model, np.concatenate([chosen, sample_kept_layers(12, [4], 100, generator)]), ids)
    assert (scores[0] >= scores[1:]).mean() >= 0.95


def test_the_plan_skips_the_layers_that_contribute_least():
    model = toy_model(6)
    blocks = blocks_of(own_text(model, 6, 12))
    before = snapshot(model)
    state = torch.get_rng_state()
    decisions = [decide(model, blocks, Target(sparsity=0.5, match=m), SMALL) for m in ("nominal", "linear_flops")]
    assert decisions[0] == decisions[1]
    assert torch.equal(state, torch.get_rng_state())
    assert_as_found(model, before)
    notes = decisions[0].notes
    removed = skipped(decisions[0].plan)
    assert removed == sorted(notes["removed"])
    assert notes["removed"] == np.argsort(notes["contributions"], kind="stable")[:3].tolist()
    different = len(np.unique(draw(6, notes["strata"], SMALL.num_masks, SMALL.seed), axis=0))
    assert decisions[0].effort == Effort(tokens_forward=40 * (1 + different))


def test_extrapolation_is_said_and_spanning_avoids_it():
    model = toy_model(8)
    blocks = blocks_of(own_text(model, 6, 12))
    paper = decide(model, blocks, Target(sparsity=0.75), SMALL)
    assert any("extrapolated" in text for text in paper.deviations)
    spanning = CoopPrunerConfig(strata="spanning", num_masks=40, epochs=2, num_windows=2, window_length=6)
    decision = decide(model, blocks, Target(sparsity=0.75), spanning)
    assert not any("extrapolated" in text for text in decision.deviations)
    assert max(decision.notes["strata"]) == 6


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="'paper' or 'spanning'"):
        CoopPrunerConfig(strata="all")
    with pytest.raises(ConfigError, match="num_masks must be at least 1"):
        CoopPrunerConfig(num_masks=0)


def test_sets_are_whole_layers():
    assert whole_layers(np.array([[True, False]])).tolist() == [[True, True, False, False]]
