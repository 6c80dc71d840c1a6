import pytest
import torch
from depth_toys import kept_weights
from depth_toys import random_text as text
from families import make

from wide.errors import ConfigError, ShapeError
from wide.methods.catalogue import WandaConfig
from wide.methods.layer_runner import LayerRunner
from wide.methods.method import Target
from wide.methods.unstructured import InputEnergy, SemiStructured, count_of, parse_pattern, prune_by_activation
from wide.methods.unstructured import decide_by_activation as decide
from wide.models.discovery import discover
from wide.plan import Dense

SETTINGS = WandaConfig(num_windows=6, window_length=16, batch_size=4)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_equal_inputs_mean_magnitude_within_each_row():
    weight = torch.randn(9, 20)
    pruned = prune_by_activation(weight, torch.full((20,), 3.0), 0.5)
    for row, before in zip(pruned, weight, strict=True):
        assert sorted(row[row != 0].abs().tolist()) == sorted(before.abs().tolist())[10:]


@pytest.mark.parametrize(("sparsity", "width", "zeros"), [(0.5, 20, 10), (0.29, 100, 29), (0.3, 7, 2), (0.999, 9, 8)])
def test_every_row_loses_exactly_its_share_even_among_equals(sparsity, width, zeros):
    assert count_of(sparsity, width) == zeros
    pruned = prune_by_activation(torch.ones(5, width), torch.ones(width), sparsity)
    assert ((pruned == 0).sum(1) == zeros).all()


def test_scaling_a_channel_against_its_column_changes_no_mask():
    weight, squares = torch.randn(6, 16), torch.rand(16)
    factor = torch.rand(16) * 10 + 0.1
    plain = prune_by_activation(weight, squares, 0.5) == 0
    scaled = prune_by_activation(weight / factor, squares * factor.square(), 0.5) == 0
    assert torch.equal(plain, scaled)


def test_a_silent_channel_goes_first():
    squares = torch.rand(10) + 0.1
    squares[4] = 0.0
    pruned = prune_by_activation(torch.randn(8, 10), squares, 0.1)
    assert not pruned[:, 4].any()


@pytest.mark.parametrize("text_of_pattern", ["2:4", "4:8", "1:4"])
def test_patterns_are_exact(text_of_pattern):
    keep, of = map(int, text_of_pattern.split(":"))
    pattern = parse_pattern(text_of_pattern, 1 - keep / of)
    assert pattern == SemiStructured(keep, of)
    pruned = prune_by_activation(torch.randn(7, 32), torch.rand(32), 0.0, pattern)
    assert ((pruned != 0).view(7, -1, of).sum(-1) == keep).all()


def test_input_energy_sums_squares_over_batches():
    energy = InputEnergy(5, torch.device("cpu"))
    values = torch.randn(4, 3, 5).bfloat16()
    energy.add(values[:1])
    energy.add(values[1:])
    torch.testing.assert_close(energy.squares, values.double().square().sum((0, 1)))


@pytest.mark.parametrize("family", ["llama", "phi3", "arcee", "gemma2"])
def test_the_row_prunes_every_matrix_and_leaves_the_model(family):
    model = make(family)
    with kept_weights(model) as before:
        decision = decide(model, text(), Target(sparsity=0.5), SETTINGS)
    matrices = {n for n, v in before.items() if ".layers." in n and v.ndim == 2}
    assert set(decision.weights) == matrices
    for name, weight in decision.weights.items():
        assert ((weight == 0).sum(1) == weight.shape[1] // 2).all()
        assert torch.equal(weight[weight != 0], before[name][weight != 0])
    assert all(isinstance(half, Dense) for layer in decision.plan.layers for half in (layer.attention, layer.ffn))
    assert decision.effort.tokens_forward == 2 * 6 * 16
    assert decision.notes["zero_share"] == 0.5


def test_later_layers_are_judged_on_the_outputs_of_pruned_ones():
    model = make("llama")
    decision = decide(model, text(), Target(sparsity=0.75), SETTINGS)
    from wide.methods.calibration import windows

    ids = windows(text(), count=6, length=16, seed=0)
    name = "model.layers.1.mlp.down_proj.weight"
    dense = model.state_dict()[name].clone()
    specs = discover(model)
    first = {n: v for n, v in decision.weights.items() if ".layers.0." in n}
    model.load_state_dict(model.state_dict() | first)
    runner = LayerRunner(model, specs, ids, batch_size=6)
    runner.advance(0)
    energy = InputEnergy(64, torch.device("cpu"))
    runner.observe(1, {specs[1].ffn.down: energy.add})
    assert torch.equal(decision.weights[name], prune_by_activation(dense, energy.squares, 0.75))


def test_a_pattern_in_a_whole_model():
    settings = WandaConfig(pattern="2:4", num_windows=2, window_length=16)
    decision = decide(make("llama").bfloat16(), text(), Target(sparsity=0.5), settings)
    for weight in decision.weights.values():
        assert weight.dtype == torch.bfloat16
        assert ((weight != 0).view(len(weight), -1, 4).sum(-1) <= 2).all()


@pytest.mark.parametrize("pattern", ["4:2", "2-4", "0:4", "dense"])
def test_a_malformed_pattern_is_refused(pattern):
    with pytest.raises(ConfigError, match="N:M"):
        parse_pattern(pattern, 0.5)


def test_a_pattern_against_its_target_or_width_is_refused():
    with pytest.raises(ConfigError, match=r"needs a target of 0.5, not 0.25"):
        parse_pattern("2:4", 0.25)
    settings = WandaConfig(pattern="8:16", num_windows=2, window_length=16)
    with pytest.raises(ShapeError, match="no multiple of 16"):
        decide(make("llama", intermediate_size=72), text(), Target(sparsity=0.5), settings)
