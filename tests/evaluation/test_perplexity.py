import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from wide.data.batches import IGNORED, TokenBlocks
from wide.data.documents import Document
from wide.data.token_stream import TokenStream
from wide.errors import DataError, EvaluationError
from wide.evaluation.perplexity import token_perplexity, window_losses

VOCAB = 11


class Bigram(nn.Module):
    """A causal LM whose next token depends on the present one only, so that context length does not matter."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCAB, VOCAB, generator=generator).to(dtype))
        self.shapes, self.ids = [], []

    def get_input_embeddings(self):
        return SimpleNamespace(weight=self.table)

    def forward(self, input_ids, use_cache):
        assert not use_cache
        assert not torch.is_grad_enabled()
        assert not self.training
        self.shapes.append(tuple(input_ids.shape))
        self.ids.append(input_ids)
        return SimpleNamespace(logits=self.table[input_ids])


class Letters:
    """Encodes each letter as a token."""

    def __call__(self, text, **_settings):
        return {"input_ids": [ord(letter) % VOCAB for letter in text]}


def nll(model, ids, scored):
    losses = -torch.log_softmax(model.table.detach().double(), -1)[ids[:-1], ids[1:]]
    return float(losses[[i - 1 for i in scored]].mean())


@given(st.integers(2, 60), st.integers(2, 12), st.integers(1, 12), st.integers(1, 4))
def test_each_token_is_scored_once_whatever_window_stride_and_batch(length, window, stride, batch_size):
    model, text = Bigram().train(), "the quick brown fox jumps over the lazy dog and runs back home"[:length]
    stride = min(stride, window)
    ids = torch.tensor(Letters()(text)["input_ids"])
    result = token_perplexity(model, text, tokenizer=Letters(), window=window, stride=stride, batch_size=batch_size)
    # Disjoint windows give no context to their first token; overlapping ones score all but the very first.
    scored = [i for i in range(1, len(ids)) if stride < window or i % window]
    assert result.tokens == len(scored)
    assert result.nll == pytest.approx(nll(model, ids, scored), abs=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.nll))
    assert (result.window, result.stride) == (window, stride)
    assert model.training


def test_the_bar_knows_that_short_windows_are_batches_of_their_own(monkeypatch):
    shown = []

    def progress(items, *, total, **_options):
        items = list(items)
        shown.append((len(items), total))
        return items

    monkeypatch.setattr("wide.evaluation.perplexity.progress", progress)
    for length in (20, 24, 27):
        token_perplexity(Bigram(), "a" * length, tokenizer=Letters(), window=8, batch_size=2)
    assert shown == [(2, 2), (2, 2), (3, 3)]


@pytest.mark.parametrize("stride", [8, 3])
def test_gemma_reads_bos_first_in_every_window(stride):
    class GemmaLetters(Letters):
        bos_token, bos_token_id = "<bos>", 5

    text, model = "the windows of a text that has no end", Bigram()
    token_perplexity(model, text, tokenizer=GemmaLetters(), window=8, stride=stride)
    plain = Bigram()
    token_perplexity(plain, text, tokenizer=Letters(), window=8, stride=stride)
    assert {int(ids[0, 0]) for ids in model.ids} == {5}
    assert all(torch.equal(ids[:, 1:], other[:, 1:]) for ids, other in zip(model.ids, plain.ids, strict=True))


def test_documents_are_joined_by_blank_lines():
    documents = [Document(name="a", text="first"), "second"]
    joined = token_perplexity(Bigram(), documents, tokenizer=Letters(), window=8)
    assert joined == token_perplexity(Bigram(), "first\n\nsecond", tokenizer=Letters(), window=8)


def test_blocks_do_not_score_document_starts():
    ids = np.arange(12, dtype=np.uint32) * 7 % VOCAB
    blocks = TokenBlocks(TokenStream(tokens=ids, starts=np.array([0, 6]), largest_id=10), 4)
    model = Bigram()
    result = token_perplexity(model, blocks, batch_size=2)
    scored = [i for i in range(12) if i % 4 and i != 6]
    assert result.tokens == len(scored)
    assert result.nll == pytest.approx(nll(model, torch.from_numpy(ids.astype(np.int64)), scored), abs=1e-6)
    assert model.shapes == [(2, 4), (1, 4)]


def test_bf16_logits_are_scored_in_float32():
    model, text = Bigram(torch.bfloat16), "hello world, how are you"
    ids = torch.tensor(Letters()(text)["input_ids"])
    result = token_perplexity(model, text, tokenizer=Letters(), window=64)
    assert result.nll == pytest.approx(nll(model, ids, range(1, len(ids))), abs=1e-5)


def test_the_standard_error_is_that_of_window_means():
    logits = torch.zeros(3, 5, VOCAB)
    sums, counts = window_losses(logits, torch.zeros(3, 5, dtype=torch.int64))
    assert torch.allclose(sums, torch.full((3,), 4 * math.log(VOCAB), dtype=torch.float64))
    assert counts.tolist() == [4, 4, 4]
    uniform = Bigram()
    nn.init.zeros_(uniform.table)
    result = token_perplexity(uniform, "a text of some length", tokenizer=Letters(), window=5)
    assert result.perplexity == pytest.approx(VOCAB)
    assert result.stderr == pytest.approx(0, abs=1e-6)


def test_ignored_labels_cost_nothing():
    labels = torch.tensor([[0, IGNORED, 2]])
    sums, counts = window_losses(torch.zeros(1, 3, VOCAB), labels)
    assert counts.tolist() == [1]
    assert float(sums) == pytest.approx(math.log(VOCAB))


def test_what_cannot_be_scored_is_refused():
    model = Bigram()
    with pytest.raises(EvaluationError, match="needs its tokenizer"):
        token_perplexity(model, "text")
    with pytest.raises(EvaluationError, match="1 tokens; at least 2"):
        token_perplexity(model, "x", tokenizer=Letters())
    with pytest.raises(EvaluationError, match="stride=9"):
        token_perplexity(model, "text", tokenizer=Letters(), window=8, stride=9)
    nn.init.constant_(model.table, math.nan)
    with pytest.raises(EvaluationError, match="window 0 is nan"):
        token_perplexity(model, "text", tokenizer=Letters(), window=8)


def test_a_foreign_tokenizer_is_refused():
    blocks = TokenBlocks(TokenStream(tokens=np.arange(20, dtype=np.uint32), starts=np.array([0]), largest_id=19), 4)
    with pytest.raises(DataError, match="vocabulary has 11"):
        token_perplexity(Bigram(), blocks)
