import pytest
import torch

from wide.errors import ConfigError
from wide.methods.second_order import (
    GramAccumulator,
    UnitPruner,
    curvature_of_units,
    damped,
    inverse,
    remove_rows,
    restricted_least_squares,
    unit_scores,
)


def problem(width=12, outputs=7, samples=50):
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(width, width, generator=generator, dtype=torch.float64)
    inputs = torch.randn(samples, width, generator=generator, dtype=torch.float64) @ mixing
    rows = torch.randn(width, outputs, generator=generator, dtype=torch.float64)
    return inputs, rows


def least_loss(inputs, rows, removed):
    """Half the squared output error of the best weights without the removed rows, by plain least squares."""
    outputs = inputs @ rows
    best = torch.linalg.lstsq(inputs[:, ~removed], outputs).solution
    return 0.5 * float((inputs[:, ~removed] @ best - outputs).square().sum()), best


def marked(width, *channels):
    mask = torch.zeros(width, dtype=torch.bool)
    mask[list(channels)] = True
    return mask


def test_the_gram_matrix_sums_over_batches_and_dtypes():
    values = torch.randn(3, 5, 7).bfloat16()
    seen = GramAccumulator(7, device=torch.device("cpu"))
    seen.add(values[:1])
    seen.add(values[1:])
    flat = values.float().reshape(-1, 7)
    torch.testing.assert_close(seen.matrix, flat.T @ flat)
    assert seen.matrix.dtype == torch.float32


def test_damping_adds_a_share_of_the_mean_diagonal_and_leaves_its_input():
    gram = torch.diag(torch.tensor([1.0, 3.0]))
    assert damped(gram, 0.5).diagonal().tolist() == [2.0, 4.0]
    assert gram.diagonal().tolist() == [1.0, 3.0]


def test_a_singular_matrix_is_an_error_that_names_damping():
    with pytest.raises(ConfigError, match="damping"):
        inverse(torch.zeros(3, 3))


def test_removing_rows_equals_restricted_least_squares_and_plain_least_squares():
    inputs, rows = problem()
    gram = inputs.T @ inputs
    removed = marked(12, 0, 4, 5, 11)
    inverse_left, updated = remove_rows(inverse(gram), rows, removed)
    _, best = least_loss(inputs, rows, removed)
    torch.testing.assert_close(updated, best)
    torch.testing.assert_close(restricted_least_squares(gram, gram @ rows, ~removed), best)
    torch.testing.assert_close(inverse_left, torch.linalg.inv(gram[~removed][:, ~removed]))


def test_rows_removed_in_two_steps_equal_rows_removed_at_once():
    inputs, rows = problem()
    whole = inverse(inputs.T @ inputs)
    once = remove_rows(whole, rows, marked(12, 1, 2, 9))
    first = remove_rows(whole, rows, marked(12, 2))
    twice = remove_rows(*first, marked(11, 1, 8))
    for left, right in zip(once, twice, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("unit_size", [1, 3, 4, 12])
def test_half_the_curvature_is_the_loss_of_removing_the_unit(unit_size):
    inputs, rows = problem()
    curvature = curvature_of_units(inverse(inputs.T @ inputs), rows, unit_size)
    for unit, score in enumerate(curvature / 2):
        removed = marked(12, *range(unit * unit_size, (unit + 1) * unit_size))
        expected = (
            0.5 * float((inputs @ rows).square().sum()) if removed.all() else least_loss(inputs, rows, removed)[0]
        )
        assert float(score) == pytest.approx(expected, rel=1e-9)


def test_units_of_one_channel_are_the_general_case():
    inputs, rows = problem()
    inverse_gram = inverse(inputs.T @ inputs)
    one_by_one = [curvature_of_units(inverse_gram, rows, 1)[i] for i in range(12)]
    general = [rows[i] @ rows[i] / inverse_gram[i, i] for i in range(12)]
    torch.testing.assert_close(torch.stack(one_by_one), torch.stack(general))


def test_the_score_is_the_first_plus_the_second_order_term():
    inputs, rows = problem()
    gram = inputs.T @ inputs
    inverse_gram, moments = inverse(gram), gram @ rows
    first = torch.stack([(rows[i : i + 3] * moments[i : i + 3]).sum() for i in range(0, 12, 3)])
    second = curvature_of_units(inverse_gram, rows, 3) / 2
    torch.testing.assert_close(unit_scores(inverse_gram, rows, moments, 3), first + second)


@pytest.mark.parametrize("rounds", [1, 4, 100])
@pytest.mark.parametrize("unit_size", [1, 3])
def test_pruned_units_are_counted_exactly_and_the_rest_is_the_best_fit(rounds, unit_size):
    inputs, rows = problem(width=15)
    gram = inputs.T @ inputs
    pruner = UnitPruner(rows.T.contiguous(), gram, unit_size=unit_size, damping=0.0)
    for removed in range(pruner.num_units + 1):
        weight, kept = pruner.prune(removed, rounds=rounds)
        channels = kept.repeat_interleave(unit_size)
        assert int(kept.sum()) == pruner.num_units - removed
        assert not weight[:, ~channels].any()
        if removed == 0:
            assert torch.equal(weight, rows.T)
        elif removed < pruner.num_units:
            torch.testing.assert_close(weight[:, channels].T, least_loss(inputs, rows, ~channels)[1])


def test_dead_inputs_are_no_trouble():
    inputs, rows = problem()
    inputs[:, [2, 7]] = 0.0
    pruner = UnitPruner(rows.T.float(), (inputs.T @ inputs).float(), unit_size=1, damping=0.01)
    weight, kept = pruner.prune(5, rounds=3)
    assert torch.isfinite(weight).all()
    assert int(kept.sum()) == 7
    assert not weight[:, [2, 7]].any()


def test_the_other_of_two_equal_channels_takes_over_what_is_removed():
    inputs, rows = problem()
    inputs[:, 8] = inputs[:, 3]
    gram = damped(inputs.T @ inputs, 1e-9)
    kept = ~marked(12, 3)
    weight = restricted_least_squares(gram, gram @ rows, kept)
    outputs = inputs @ rows
    assert float((inputs[:, kept] @ weight - outputs).norm() / outputs.norm()) < 1e-6
