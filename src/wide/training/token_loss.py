"""Cross-entropy and distillation on logits, float32, a chunk of tokens at a time.

Logits are the peak of memory: `[B, T, V]`. Beside them only their gradient exists, in their own dtype; float32 copies
live for one chunk. The gradient is computed in the forward, where each chunk is at hand.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from wide.data.batches import IGNORED

# 64 MiB of float32 a chunk.
_ELEMENTS_PER_CHUNK = 1 << 24


def token_losses(
    logits: Tensor, labels: Tensor, *, teacher: Tensor | None = None, distillation: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums over target tokens, in nats.

    Args:
        logits: `[B, T, V]`, any floating dtype.
        labels: `[B, T]` int64 at the positions of their tokens (shifted here), `IGNORED` where there is no target.
        teacher: Logits of the dense model, `[B, T, V]`; needed for distillation.
        distillation: Weight w of KL(teacher || model); the loss is (1 - w) CE + w KL.

    Returns:
        The loss (with gradient, backward once), the cross-entropy and the divergence (without), float32 scalars.
    """
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    flat_teacher = None if teacher is None else teacher.flatten(0, 1)
    apply: Any = _TokenLoss.apply
    loss, entropy, divergence = apply(logits.flatten(0, 1), targets, flat_teacher, distillation)
    return loss, entropy, divergence


def num_targets(labels: Tensor) -> int:
    """Return how many tokens of `labels` `[B, T]` are targets; on the CPU this waits for nothing."""
    return int((labels[:, 1:] != IGNORED).sum())


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, teacher: Tensor | None, distillation: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        entropy = torch.zeros((), dtype=torch.float32, device=logits.device)
        divergence = torch.zeros_like(entropy)
        rows = max(1, _ELEMENTS_PER_CHUNK // logits.shape[-1])
        for begin in range(0, len(logits), rows):
            part = slice(begin, begin + rows)
            counted = targets[part] != IGNORED
            index = targets[part].where(counted, 0).unsqueeze(-1)
            log_p = functional.log_softmax(logits[part].float(), dim=-1)
            entropy -= log_p.gather(-1, index).squeeze(-1).where(counted, 0.0).sum()
            wanted = None
            if teacher is not None:
                log_q = functional.log_softmax(teacher[part].float(), dim=-1)
                wanted = log_q.exp()
                divergence += (wanted * log_q.sub_(log_p)).sum(-1).where(counted, 0.0).sum()
            if gradient is not None:
                # d/dlogits of (1 - w) CE + w KL is p - (1 - w) onehot - w q.
                slope = log_p.exp_()
                slope.scatter_add_(-1, index, slope.new_full(index.shape, distillation - 1.0))
                if wanted is not None:
                    slope.sub_(wanted, alpha=distillation)
                gradient[part] = slope.masked_fill_(~counted.unsqueeze(-1), 0.0)
        ctx.gradient = gradient
        ctx.mark_non_differentiable(entropy, divergence)
        loss = entropy * (1.0 - distillation) + divergence * distillation
        return loss, entropy, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, *_unused: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("the token loss can be differentiated once; run the forward again")
        return gradient.mul_(slope), None, None, None
