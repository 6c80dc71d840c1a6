import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wide.errors import EvaluationError
from wide.evaluation.padding import RowLengths

# Zero is a real token here, as in tokenizers whose first id is BOS.
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=12), st.integers(1, 4))
def test_padding_is_told_from_real_zeros(pairs, batch_size):
    requests = [(None, context, continuation) for context, continuation in pairs]
    rows = sorted({(*c, *t)[:-1] for c, t in pairs}, key=len, reverse=True)
    lengths = RowLengths(requests, max_length=64)
    for begin in range(0, len(rows), batch_size):
        batch = rows[begin : begin + batch_size]
        width = max(len(row) for row in batch)
        padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in batch])
        assert lengths.valid(padded).sum(1).tolist() == [len(row) for row in batch]


def test_long_rows_lose_their_beginning():
    lengths = RowLengths([(None, [5, 6, 7, 8], [9, 9])], max_length=3)
    assert lengths.valid(torch.tensor([[7, 8, 9, 0]])).tolist() == [[True, True, True, False]]


def test_an_unknown_row_is_refused():
    with pytest.raises(EvaluationError, match="none of its requests"):
        RowLengths([(None, [1], [2])], max_length=8).valid(torch.tensor([[3]]))
