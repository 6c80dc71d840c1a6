"""How far a pruned model is from the dense one: KL on the dense model's largest logits."""

import torch
from torch import Tensor, nn
from torch.nn import functional

# Rows of logits that are turned to float32 at a time: 256 MiB for 8192 logits a row, forward and back.
_ROWS_PER_CHUNK = 4096


class TopKDivergence:
    """KL(dense || model) over the dense model's k largest logits of each token, renormalised over them.

    Args:
        model: The dense model, in evaluation mode; its logits are kept on its device.
        ids: Windows of text, int64 `[N, T]`.
        top_k: Logits of each token that count; the whole vocabulary where it is smaller.
        batch_size: Windows in a forward.

    Attributes:
        tokens: Tokens that went through a model so far, for the account of effort.

    Source: the fitness of Týr-the-Pruner's search.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, ids: Tensor, *, top_k: int, batch_size: int) -> None:
        """Run the dense model."""
        self._ids = ids.to(next(model.parameters()).device)
        self._batch_size = batch_size
        self.tokens = 0
        values: list[Tensor] = []
        indices: list[Tensor] = []
        for rows in self._ids.split(batch_size):
            # The last token predicts nothing that is in the window.
            logits = self._logits(model, rows)[:, :-1]
            top = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
            values.append(top.values)
            indices.append(top.indices.int())
        self._values, self._indices = torch.cat(values), torch.cat(indices)

    def _logits(self, model: nn.Module, rows: Tensor) -> Tensor:
        self.tokens += rows.numel()
        return model(input_ids=rows, use_cache=False).logits

    @property
    def num_windows(self) -> int:
        """Windows of text, N."""
        return len(self._ids)

    @torch.no_grad()
    def of(self, model: nn.Module, rows: list[int] | None = None, length: int | None = None) -> float:
        """Return the divergence of a model, nats per token.

        Args:
            model: The same model with other weights.
            rows: Windows to judge on; None means all.
            length: Only the first tokens of each window; None means all.
        """
        chosen = torch.tensor(range(self.num_windows) if rows is None else rows, device=self._ids.device)
        length = self._ids.shape[1] if length is None else min(length, self._ids.shape[1])
        total = torch.zeros((), dtype=torch.float64, device=self._ids.device)
        for part in chosen.split(self._batch_size):
            logits = self._logits(model, self._ids[part, :length])[:, :-1].flatten(0, 1)
            values = self._values[part, : length - 1].flatten(0, 1)
            indices = self._indices[part, : length - 1].flatten(0, 1)
            for begin in range(0, len(logits), _ROWS_PER_CHUNK):
                rows_now = slice(begin, begin + _ROWS_PER_CHUNK)
                ours = logits[rows_now].gather(-1, indices[rows_now].long()).float().log_softmax(-1)
                wanted = values[rows_now].float().log_softmax(-1)
                total += functional.kl_div(ours, wanted, reduction="sum", log_target=True).double()
        return float(total / (len(chosen) * (length - 1)))
