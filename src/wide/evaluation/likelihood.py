"""Log-likelihoods of continuations given contexts, many short requests in few forwards."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from wide.data.progress import progress
from wide.errors import EvaluationError
from wide.models.observe import model_device
from wide.models.packing import unpacked

# A forward holds `batch_size` rows, and more of them while they are short: up to so many tokens for each.
_TOKENS_PER_ROW = 256
# Scored positions whose logits are held in float32 at once.
_POSITIONS_PER_CHUNK = 4096
# Longer rows come first, and what fills up the shorter ones changes nothing that is looked at.
_PAD_ID = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One input of the model, without its last token, which predicts nothing.

    The `continuations`, (request, ids), are each predicted by the row's last positions.
    """

    tokens: tuple[int, ...]
    continuations: list[tuple[int, Sequence[int]]] = field(default_factory=list)


@unpacked()
def log_likelihoods(
    model: nn.Module,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_length: int,
    batch_size: int,
    after_forward: Callable[[Tensor], None] | None = None,
) -> list[tuple[float, bool]]:
    """Return the log-likelihood of each continuation, in nats, and whether greedy decoding yields it.

    Requests that differ in the last token only (the options of many tasks) are one row. The log-softmax is taken in
    float32 and summed in float64 whatever the model's dtype. Raises EvaluationError if logits are not numbers.

    Args:
        requests: (context ids, continuation ids), neither empty.
        max_length: Tokens that the model sees at most; longer inputs lose their beginning.
        batch_size: Rows per forward; short rows are more, up to 256 tokens for each of `batch_size`.
        after_forward: Called with bool `[B, T]`, True for tokens that are no padding, after each forward.
    """
    device = model_device(model)
    found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
    batches = list(_batches(_rows(requests, max_length), batch_size))
    for batch in progress(batches, title="likelihoods", total=len(batches), unit="batch"):
        ids = pad_sequence([torch.tensor(row.tokens) for row in batch], batch_first=True, padding_value=_PAD_ID)
        logits = model(input_ids=ids.to(device), use_cache=False).logits
        if after_forward is not None:
            after_forward((torch.arange(ids.shape[1]) < torch.tensor([[len(row.tokens)] for row in batch])).to(device))
        for request, value in _scored(batch, logits):
            found[request] = value
    return found


def _rows(requests: Sequence[tuple[Sequence[int], Sequence[int]]], max_length: int) -> list[Row]:
    rows: dict[tuple[int, ...], Row] = {}
    for request, (context, continuation) in enumerate(requests):
        if not context or not continuation or len(continuation) > max_length:
            raise EvaluationError(
                f"request {request} has {len(context)} tokens of context and {len(continuation)} to score; wanted at "
                f"least one each, and at most {max_length} to score; choose a longer window"
            )
        tokens = tuple([*context, *continuation][-(max_length + 1) : -1])
        rows.setdefault(tokens, Row(tokens)).continuations.append((request, continuation))
    return sorted(rows.values(), key=lambda row: (-len(row.tokens), row.tokens))


def _batches(rows: Sequence[Row], batch_size: int) -> Iterator[Sequence[Row]]:
    begin = 0
    while begin < len(rows):
        count = max(batch_size, batch_size * _TOKENS_PER_ROW // len(rows[begin].tokens))
        yield rows[begin : begin + count]
        begin += count


def _scored(batch: Sequence[Row], logits: Tensor) -> Iterable[tuple[int, tuple[float, bool]]]:
    """Yield (request, (log-likelihood, is greedy)); waits for the device once a batch."""
    requests, places = list[int](), list[tuple[int, int, int, int]]()
    for index, row in enumerate(batch):
        for request, continuation in row.continuations:
            first = len(row.tokens) - len(continuation)
            places += [(len(requests), index, first + place, token) for place, token in enumerate(continuation)]
            requests.append(request)
    owner, *where = torch.tensor(places).unbind(1)
    chosen, best = (torch.cat(parts) for parts in zip(*_chosen(logits, where), strict=True))
    sums = torch.zeros(len(requests), dtype=torch.float64).index_add_(0, owner, chosen.cpu().double())
    # Accuracies of a broken model look like bad accuracies.
    if bool(sums.isnan().any()):
        raise EvaluationError(
            "the model's logits are not numbers; its weights or its dtype are at fault: try float32, and check "
            "the model without routing"
        )
    misses = torch.zeros(len(requests)).index_add_(0, owner, (~best.cpu()).float())
    return zip(requests, zip(sums.tolist(), (misses == 0).tolist(), strict=True), strict=True)


def _chosen(logits: Tensor, where: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield log-probabilities of the targets, float32, and whether they are the most likely, a chunk at a time."""
    moved = [part.to(logits.device).split(_POSITIONS_PER_CHUNK) for part in where]
    for row, position, target in zip(*moved, strict=True):
        chunk = logits[row, position].float()
        yield chunk.log_softmax(-1).gather(1, target.unsqueeze(1)).squeeze(1), chunk.argmax(-1) == target
