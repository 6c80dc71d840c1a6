"""Which tokens of lm-evaluation-harness's batches are real: it pads rows on the right and does not say how far."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wide.errors import EvaluationError

# The harness fills up with zeros, which may be a real token id as well.
_PAD_ID = 0


class RowLengths:
    """The lengths of the rows that a set of requests becomes.

    Requests with the same input tokens become one row (the harness reuses its logits), and rows come longest first;
    so even rows that differ only in trailing tokens of the padding's id are told apart.

    Args:
        requests: (key, context ids, continuation ids) as the harness hands them on.
        max_length: Tokens that the model sees at most; longer inputs lose their beginning.
    """

    def __init__(self, requests: Sequence[Any], max_length: int) -> None:
        """Work out what the harness will feed to the model."""
        inputs = {tuple([*context, *continuation][:-1]) for _, context, continuation in requests}
        self._lengths: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for tokens in inputs:
            row = tokens[-max_length:]
            self._lengths[_without_padding(row)].append(len(row))
        for lengths in self._lengths.values():
            lengths.sort()

    def valid(self, input_ids: Tensor) -> Tensor:
        """Return which tokens of a batch are real, bool `[B, T]`.

        Args:
            input_ids: Padded on the right, `[B, T]`.

        Raises:
            EvaluationError: If a row is none of the requests' (another version of the harness).
        """
        lengths = []
        for row in input_ids.tolist():
            expected = self._lengths.get(_without_padding(row))
            if not expected:
                raise EvaluationError(
                    "lm-evaluation-harness ran a row that none of its requests asked for, so padding cannot be told "
                    "from text; use version 0.4.13, or evaluate without counting skips"
                )
            lengths.append(expected.pop())
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return positions < torch.tensor(lengths, device=input_ids.device).unsqueeze(1)


def _without_padding(row: Sequence[int]) -> tuple[int, ...]:
    end = len(row)
    while end and row[end - 1] == _PAD_ID:
        end -= 1
    return tuple(row[:end])
