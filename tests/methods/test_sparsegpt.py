import pytest
import torch
from depth_toys import kept_weights
from depth_toys import random_text as text
from families import make

from wide.errors import ConfigError
from wide.methods.catalogue import SparseGPTConfig
from wide.methods.method import Target
from wide.methods.unstructured import SemiStructured, prune_by_activation, prune_with_updates
from wide.methods.unstructured import decide_with_updates as decide

SETTINGS = SparseGPTConfig(num_windows=6, window_length=16, batch_size=4, block_size=16)


def problem(width=48, outputs=20, samples=200):
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(width, width, generator=generator, dtype=torch.float64)
    inputs = torch.randn(samples, width, generator=generator, dtype=torch.float64) @ mixing
    return inputs, torch.randn(outputs, width, generator=generator, dtype=torch.float64)


def prune(weight, gram, sparsity=0.5, **changes):
    return prune_with_updates(weight, gram, sparsity, **({"damping": 0.01, "block_size": 16} | changes))


def test_sparsity_zero_is_the_identity():
    inputs, weight = problem()
    assert torch.equal(prune(weight, inputs.T @ inputs, 0.0), weight)


def test_uncorrelated_inputs_mean_a_mask_without_updates():
    _, weight = problem()
    energies = torch.rand(48, dtype=torch.float64) + 0.1
    pruned = prune(weight, torch.diag(energies), 0.5, damping=0.0, block_size=48)
    assert torch.equal(pruned[pruned != 0], weight[pruned != 0])
    # With a diagonal matrix the cost of a weight is its square times the energy of its input.
    costs = weight.square() * energies
    assert float(costs[pruned == 0].max()) <= float(costs[pruned != 0].min())


@pytest.mark.parametrize("block_size", [7, 16, 48, 128])
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.9])
def test_every_block_loses_exactly_its_share(block_size, sparsity):
    inputs, weight = problem()
    pruned = prune(weight, inputs.T @ inputs, sparsity, block_size=block_size)
    for begin in range(0, 48, block_size):
        block = pruned[:, begin : begin + block_size]
        assert int((block == 0).sum()) == int(sparsity * block.numel() + 1e-6)


def test_updates_beat_the_same_rate_of_wanda_and_of_magnitude():
    inputs, weight = problem()
    gram = inputs.T @ inputs

    def error(pruned):
        return float((inputs @ (pruned - weight).T).square().sum())

    ours = error(prune(weight, gram))
    assert ours < error(prune_by_activation(weight, gram.diagonal(), 0.5))
    assert ours < error(prune_by_activation(weight, torch.ones(48), 0.5))


@pytest.mark.parametrize("pattern", [SemiStructured(2, 4), SemiStructured(4, 8)])
def test_blocks_of_one_column_and_of_many_agree_on_patterns(pattern):
    inputs, weight = problem()
    gram = inputs.T @ inputs
    one, many = (prune(weight, gram, pattern=pattern, block_size=size) for size in (1, 128))
    torch.testing.assert_close(one, many)
    assert ((one != 0).view(20, -1, pattern.of).sum(-1) == pattern.keep).all()


def test_the_updates_of_one_row_are_those_of_columns_removed_one_by_one():
    # For a fixed mask the sweep equals least squares on the columns to the right, removal after removal.
    inputs, weight = problem(width=6, outputs=1)
    gram = inputs.T @ inputs
    pruned = prune(weight, gram, 0.5, damping=0.0, block_size=6)
    mask = (pruned == 0)[0]
    expected = weight[0].clone()
    for column in range(6):
        if mask[column]:
            right = slice(column, 6)
            whole = torch.linalg.inv(gram[right, right])
            expected[right] -= expected[column] / whole[0, 0] * whole[0]
    torch.testing.assert_close(pruned[0], expected.masked_fill(mask, 0.0))


def test_silent_inputs_lose_their_weights():
    inputs, weight = problem()
    inputs[:, [3, 40]] = 0.0
    pruned = prune(weight.float(), (inputs.T @ inputs).float(), 0.25)
    assert torch.isfinite(pruned).all()
    assert not pruned[:, [3, 40]].any()


def test_the_row_prunes_every_matrix_and_leaves_the_model():
    model = make("llama").bfloat16()
    with kept_weights(model) as before:
        decision = decide(model, text(), Target(sparsity=0.5, match="linear_flops"), SETTINGS)
    assert set(decision.weights) == {n for n, v in before.items() if ".layers." in n and v.ndim == 2}
    assert decision.notes["zero_share"] == pytest.approx(0.5, abs=0.01)


def test_a_block_size_that_cuts_runs_is_refused():
    settings = SparseGPTConfig(pattern="2:4", block_size=6)
    with pytest.raises(ConfigError, match="multiple of 4"):
        decide(make("llama"), text(), Target(sparsity=0.5), settings)
