import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from wide.errors import EvaluationError
from wide.evaluation.likelihood import log_likelihoods

# Zero is a real token here, as in tokenizers whose first id is BOS; it also fills up the rows.
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
REQUESTS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def one_by_one(model, requests, max_length):
    """The definition: one request a forward, nothing shared, nothing padded."""
    found = []
    for context, continuation in requests:
        tokens = [*context, *continuation][-(max_length + 1) :]
        scores = model(torch.tensor([tokens[:-1]])).logits[0, -len(continuation) :].double().log_softmax(-1)
        target = torch.tensor(continuation)
        total = float(scores.gather(1, target.unsqueeze(1)).sum())
        found.append((total, bool((scores.argmax(-1) == target).all())))
    return found


@settings(max_examples=25)
@given(REQUESTS, st.integers(1, 4), st.integers(6, 12))
def test_they_are_those_of_one_request_a_forward(model, requests, batch_size, max_length):
    found = log_likelihoods(model, requests, max_length=max_length, batch_size=batch_size)
    expected = one_by_one(model, requests, max_length)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-5, abs=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@given(REQUESTS, st.integers(1, 4))
def test_every_input_is_run_once_and_padding_is_told_from_real_zeros(requests, batch_size):
    seen = []

    class Recorder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, use_cache):
            self.ids = input_ids
            return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 4)})

    model = Recorder()
    log_likelihoods(
        model,
        requests,
        max_length=64,
        batch_size=batch_size,
        after_forward=lambda valid: seen.extend(
            tuple(row[real].tolist()) for row, real in zip(model.ids, valid, strict=True)
        ),
    )
    assert sorted(seen) == sorted({(*context, *continuation)[:-1] for context, continuation in requests})


def test_short_rows_share_a_forward_and_long_ones_keep_to_the_batch_size(model):
    sizes = []

    def count(valid):
        sizes.append(tuple(valid.shape))

    requests = [([row % 16, row // 16, 1], [2]) for row in range(200)] + [([row] * 300, [1]) for row in range(5)]
    log_likelihoods(model, requests, max_length=400, batch_size=2, after_forward=count)
    # The last long row takes a short one along.
    assert sizes == [(2, 300), (2, 300), (2, 300), (170, 3), (29, 3)]


def test_bfloat16_logits_are_normalised_in_float32(model):
    requests = [([1, 2, 3], [4, 5]), ([1, 2], [3])]
    low = LlamaForCausalLM(model.config).eval().requires_grad_(False)
    low.load_state_dict(model.state_dict())
    low.to(torch.bfloat16)
    found = log_likelihoods(low, requests, max_length=8, batch_size=1)
    for (context, continuation), (value, _) in zip(requests, found, strict=True):
        logits = low(torch.tensor([[*context, *continuation][:-1]])).logits[0, -len(continuation) :]
        exact = logits.double().log_softmax(-1).gather(1, torch.tensor(continuation).unsqueeze(1)).sum()
        assert value == pytest.approx(float(exact), rel=1e-6)


def test_requests_without_context_and_too_long_continuations_are_refused(model):
    for request in (([], [1]), ([1], []), ([1], [1] * 9)):
        with pytest.raises(EvaluationError, match=r"request 1 has .* at most 8 to score"):
            log_likelihoods(model, [([1], [2]), request], max_length=8, batch_size=1)
