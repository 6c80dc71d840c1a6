import math

import pytest
import torch
from depth_toys import assert_as_found, blocks_of, own_text, snapshot, toy_model

from wide.errors import ConfigError, EvaluationError
from wide.evaluation.perplexity import exp_or_infinity
from wide.methods.block_gates import BlockGates
from wide.methods.calibration import json_number, windows
from wide.methods.method import Effort


def numbered(rows, length):
    """Blocks in which every token is its own position in the text."""
    return blocks_of(torch.arange(rows * length).reshape(rows, length))


@pytest.mark.parametrize(
    ("rows", "block", "count", "length"), [(7, 20, 5, 6), (7, 20, 7, 20), (3, 20, 9, 6), (1, 9, 1, 2)]
)
def test_windows_are_contiguous_and_do_not_overlap(rows, block, count, length):
    ids = windows(numbered(rows, block), count=count, length=length, seed=3)
    assert ids.dtype == torch.int64
    assert ids.shape == (count, length)
    assert (ids.diff(dim=1) == 1).all()
    assert (ids[:, 0] // block == ids[:, -1] // block).all()
    assert len(ids.unique()) == count * length


def test_a_block_is_used_again_only_after_all_others():
    first = windows(numbered(5, 12), count=5, length=4, seed=0)[:, 0] // 12
    assert sorted(first.tolist()) == list(range(5))
    again = windows(numbered(5, 12), count=12, length=4, seed=0)[:, 0] // 12
    assert sorted(again.bincount().tolist()) == [2, 2, 2, 3, 3]


def test_the_seed_decides_the_windows():
    blocks = numbered(20, 16)
    draws = [windows(blocks, count=4, length=5, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_windows_start_at_any_place_of_a_block():
    blocks = numbered(1, 16)
    begins = {int(windows(blocks, count=1, length=13, seed=seed)[0, 0]) for seed in range(60)}
    assert begins == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("wrong", "way_out"),
    [
        ({"length": 13}, "--train.sequence_length 13 or more"),
        ({"length": 1}, "at least 2 tokens"),
        ({"count": 0}, "at least 1 window"),
        ({"count": 10}, "holds 9 windows"),
    ],
)
def test_impossible_windows_name_the_way_out(wrong, way_out):
    with pytest.raises(ConfigError, match=way_out):
        windows(numbered(3, 12), **({"count": 2, "length": 4, "seed": 0} | wrong))


def test_a_first_token_begins_every_window():
    blocks = numbered(5, 13)
    plain = windows(blocks, count=9, length=4, seed=1)
    blocks.first = 99
    found = windows(blocks, count=9, length=4, seed=1)
    assert found[:, 0].tolist() == [99] * 9
    assert torch.equal(found[:, 1:], plain[:, 1:].where(plain[:, 1:] % 13 > 0, 99))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_every_token_weighs_the_same_in_any_micro_batch(batch_size):
    model = toy_model(2)
    ids = own_text(model, 7, 9)
    with torch.no_grad():
        log_p = model(input_ids=ids).logits.double().log_softmax(-1)
    wanted = -log_p[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    model.train()
    before = snapshot(model)
    gates = BlockGates(model, ids, batch_size)
    assert gates.dense_nll() == pytest.approx(float(wanted), rel=1e-6)
    assert gates.effort == Effort(tokens_forward=63, tokens_backward=0)
    assert_as_found(model, before)


def test_a_model_without_a_finite_loss_is_refused():
    model = toy_model(2)
    with torch.no_grad():
        model.lm_head.weight[:] = math.nan
    with pytest.raises(EvaluationError, match="unpruned model's loss"):
        BlockGates(model, torch.zeros(1, 4, dtype=torch.int64), 1).dense_nll()


def test_numbers_of_a_report():
    assert exp_or_infinity(0.0) == 1.0
    assert exp_or_infinity(1e4) == math.inf
    assert exp_or_infinity(math.nan) == math.inf
    assert [json_number(x) for x in (1.5, math.inf, math.nan)] == [1.5, None, None]
