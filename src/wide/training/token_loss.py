"""Cross-entropy and distillation on logits, float32, a chunk of tokens at a time.

All logits `[B, T, V]` would be the peak of memory: with an `OutputHead` only those of a chunk exist. The gradient is
computed in the forward, where each chunk is at hand, so that nothing is computed twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional

from wide.data.batches import IGNORED
from wide.models.discovery import scale_and_cap
from wide.models.having import having
from wide.models.packing import unpacked

# 256 MiB of float32 a chunk: enough rows to keep a GPU busy with the product.
ELEMENTS_PER_CHUNK = 1 << 26

Chunk = Callable[[Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor, Tensor]]


def token_losses(
    states: Tensor,
    labels: Tensor,
    *,
    teacher: Tensor | None = None,
    distillation: float = 0.0,
    head: "OutputHead | None" = None,
    compute: "Chunk | None" = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums over target tokens, in nats.

    Args:
        states: Logits `[B, T, V]`, any floating dtype, or what `head` makes logits of, `[B, T, D]`, without gradient of
            its weights.
        labels: `[B, T]` int64 at the positions of their tokens (shifted here), `IGNORED` where there is no target.
        teacher: The same as `states` of the dense model; needed for distillation.
        distillation: Weight w of KL(teacher || model); the loss is (1 - w) CE + w KL.
        compute: `losses_of`, compiled; None runs it as it is.

    Returns:
        The loss (with gradient, backward once), the cross-entropy and the divergence (without), float32 scalars.
    """
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    flat_teacher = None if teacher is None else teacher.flatten(0, 1)
    apply: Any = _TokenLoss.apply
    flat, chunk = states.flatten(0, 1), compute or losses_of
    loss, entropy, divergence = apply(flat, targets, flat_teacher, distillation, head, chunk)
    return loss, entropy, divergence


def num_targets(labels: Tensor) -> int:
    """Return how many tokens of `labels` `[B, T]` are targets; on the CPU this waits for nothing."""
    return int((labels[:, 1:] != IGNORED).sum())


class OutputHead:
    """The last linear layer of a causal LM and what the model makes of its output, apart from the rest of the model."""

    def __init__(self, model: Any) -> None:
        self._model, self._linear = model, model.get_output_embeddings()
        self._factor, self._cap = scale_and_cap(model.config)
        # Whether that is all the model does, and leaves the head whole, which the first forward shows.
        self._is_all: bool | None = None

    @unpacked()
    def states(self, run: Callable[..., Any], **inputs: Any) -> tuple[Tensor, "OutputHead | None"]:
        """Return what the head reads, `[B, T, D]`, and the head; of a model that does more, its logits and None.

        `run` is the model, or what stands in for it; `inputs` are without position ids.
        """
        # A head that is trained, if only its bias or by LoRA, runs as the model has it.
        is_plain = isinstance(self._linear, nn.Linear) and not any(
            parameter.requires_grad for parameter in self._linear.parameters()
        )
        if not is_plain or self._is_all is False:
            return run(**inputs).logits, None
        read: list[Tensor] = []
        # In the place of logits, a few numbers which show what the model does with them.
        probe = torch.linspace(-60.0, 60.0, 7, device=self._linear.weight.device).view(1, 1, -1)

        def forward(states: Tensor) -> Tensor:
            read.append(states)
            return probe.to(states.dtype)

        with having(self._linear, forward=forward):
            found = run(**inputs).logits
        if self._is_all is None:
            # FSDP gathers the head with the last norm and leaves both whole until the backward; other ways to lay it
            # over devices do not.
            is_whole = not any(isinstance(parameter, DTensor) for parameter in self._linear.parameters())
            # Once only: looking waits for the device.
            self._is_all = len(read) == 1 and is_whole and torch.equal(found, self._finished(probe.to(found.dtype)))
        return (read[0], self) if self._is_all else (run(**inputs).logits, None)

    @property
    def width(self) -> int:
        """Logits of a token, V."""
        return int(self._linear.out_features)

    def __call__(self, states: Tensor) -> Tensor:
        """Return the logits `[..., V]` of states `[..., D]`."""
        # Without hooks: those of FSDP belong to the forward of the whole model.
        return self._finished(self._linear.forward(states))

    def _finished(self, logits: Tensor) -> Tensor:
        if self._factor != 1.0:
            logits = logits * self._factor
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        targets: Tensor,
        teacher: Tensor | None,
        distillation: float,
        head: OutputHead | None,
        compute: Chunk,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        sums = torch.zeros(2, dtype=torch.float32, device=states.device)
        width = states.shape[-1] if head is None else head.width
        # Chunks of one size, as far as that goes, are compiled once.
        chunks = -(-len(states) * width // ELEMENTS_PER_CHUNK)
        for places in torch.arange(len(states)).tensor_split(chunks):
            part = slice(int(places[0]), int(places[-1]) + 1)
            rows, taught = states[part].detach(), None if teacher is None else teacher[part]
            with torch.set_grad_enabled(gradient is not None):
                logits = rows if head is None else head(rows.requires_grad_(gradient is not None))
            if head is not None and taught is not None:
                taught = head(taught)
            slope, entropy, divergence = compute(logits.detach(), targets[part], taught, distillation)
            sums += torch.stack([entropy, divergence])
            if gradient is not None:
                gradient[part] = slope if head is None else torch.autograd.grad(logits, rows, slope)[0]
        ctx.gradient = gradient
        entropy, divergence = sums.unbind()
        ctx.mark_non_differentiable(entropy, divergence)
        return entropy * (1.0 - distillation) + divergence * distillation, entropy, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("the token loss can be differentiated once; run the forward again")
        return gradient.mul_(slope), None, None, None, None, None


def losses_of(
    logits: Tensor, targets: Tensor, teacher: Tensor | None, distillation: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of a chunk's loss by its logits, in their dtype, and its cross-entropy and divergence.

    `logits` and those of the dense model, `teacher`, are `[R, V]`; `targets` are `[R]`, `IGNORED` where there is none.
    """
    counted = targets != IGNORED
    index = targets.where(counted, 0).unsqueeze(-1)
    log_p = functional.log_softmax(logits, dim=-1, dtype=torch.float32)
    entropy = -log_p.gather(-1, index).squeeze(-1).where(counted, 0.0).sum()
    divergence, wanted = torch.zeros_like(entropy), None
    if teacher is not None:
        log_q = functional.log_softmax(teacher, dim=-1, dtype=torch.float32)
        wanted = log_q.exp()
        divergence = (wanted * log_q.sub_(log_p)).sum(-1).where(counted, 0.0).sum()
    # d/dlogits of (1 - w) CE + w KL is p - (1 - w) onehot - w q.
    slope = log_p.exp_()
    if torch.compiler.is_compiling():
        # One kernel with what is around it, which a scatter is not.
        columns = torch.arange(logits.shape[-1], device=logits.device)
        slope = torch.where(columns == index, slope + (distillation - 1.0), slope)
    else:
        slope.scatter_add_(-1, index, slope.new_full(index.shape, distillation - 1.0))
    if wanted is not None:
        slope = slope.sub_(wanted, alpha=distillation)
    return slope.to(logits.dtype).masked_fill(~counted.unsqueeze(-1), 0.0), entropy, divergence
