"""What training minimises: language modelling, distance from the target sparsity, and optionally distillation.

Several processes: token sums and skip counts are summed over all of them before anything is divided or compared, and
the loss is scaled so that gradients *averaged* over processes are those of the joint batch.

Gradient accumulation: the LM loss is divided by the targets of the whole step. The sparsity term is taken per
micro-batch and averaged over them, because the rate of the step is unknown until its last forward; it equals that of
the joint batch while all micro-batches lie on the same side of the target, beyond `smoothing`, and are padded alike.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from wide.config import ObjectiveConfig
from wide.data.batches import IGNORED, TokenBatch
from wide.errors import ConfigError
from wide.models.attach import attachment
from wide.models.cost import half_weights, static_sparsity
from wide.models.lora import without_lora
from wide.models.observe import bypass, observe
from wide.models.pretrained import require_in_memory
from wide.routing import Routing
from wide.training.modes import forward_precision
from wide.training.parallel import DataParallel
from wide.training.token_loss import OutputHead, losses_of, token_losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one forward measured over all processes: float32 scalars on the device, outside the graph.

    Losses are in nats per target token; those of a micro-batch are its contributions to the step.

    Args:
        distillation: KL(dense || pruned).
        sparsity: Skip rate in the measure of the target ('uniform' reports the mean).
        attention: Mean over layers of the attention skip rates; `ffn` that of the FFN's.
    """

    loss: Tensor
    lm_loss: Tensor
    distillation: Tensor
    sparsity: Tensor
    attention: Tensor
    ffn: Tensor


class Objective:
    """The training loss of an attached model; plain torch, for any loop.

        loss, measured = Objective(model, ObjectiveConfig(sparsity=0.5))(batch)

    Routers in training mode sample masks with straight-through gradient; without routers the rates that are reported
    are those of the static plan. With `fuse`, `torch.compile` fuses the loss of a chunk of tokens.

    Raises:
        NotAttachedError: If the model carries no plan.
        ConfigError: If there are no routers and the sparsity term is on.
        UnsupportedModelError: If routers are offloaded.

    Source: paper, section 3.2 ('mean') and the appendix on uniform sparsity ('uniform').
    """

    def __init__(
        self, model: nn.Module, config: ObjectiveConfig, *, parallel: DataParallel | None = None, fuse: bool = False
    ) -> None:
        # What accelerate brings for a forward gets no gradient that lasts.
        require_in_memory(model, "training routers", added_only=True)
        self._model = model
        self._head = OutputHead(model)
        self._compute = torch.compile(losses_of, fullgraph=True, dynamic=False) if fuse else losses_of
        self.config = config
        self._parallel = parallel or DataParallel()
        self._routers = attachment(model).routers()
        device = next(model.parameters()).device
        # Rows: the terms of the sparsity loss, then mean attention and mean FFN rates for the report.
        self._num_terms, rows = self._weights()
        self._rows = rows.to(device)
        # Averages over the groups of each sublayer, [sublayers, sum of N_G].
        shares = (torch.full((1, router.num_groups), 1.0 / router.num_groups) for router in self._routers)
        self._groups = torch.block_diag(*shares).to(device)
        self._static: Tensor | None = None
        if not self._routers:
            # What the plan prunes, as the rows of `_rates`.
            found = static_sparsity(model)
            self._static = torch.tensor([found.mean, found.attention, found.ffn], device=device)

    def __call__(
        self,
        batch: TokenBatch,
        *,
        targets_in_step: Tensor | float | None = None,
        micro_batches: int = 1,
        padded: bool | None = None,
    ) -> tuple[Tensor, Measured]:
        """Run the model and return the loss to differentiate, and what was measured.

        Args:
            batch: This process's tokens, on the model's device; padding (`valid` False) counts nowhere.
            targets_in_step: Target tokens of the whole step over all processes, at least 1; None means this batch is
                the step.
            micro_batches: Forwards in the step.
            padded: Whether the batch holds padding; None looks, which waits for the device.
        """
        if padded is None:
            padded = not bool(batch.valid.all())
        # Without padding no mask is handed over: it would cost the fast attention kernels.
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.valid.long() if padded else None}
        teacher = None
        if self.config.distillation:
            with torch.no_grad(), bypass(self._model), without_lora(self._model), forward_precision(self._model):
                teacher = self._head.states(self._model, **inputs, use_cache=False)[0]
        with observe(self._model) as routing, forward_precision(self._model):
            states, head = self._head.states(self._model, **inputs, use_cache=False)
        labels = target_labels(batch)
        token_sum, entropy, divergence = token_losses(
            states, labels, teacher=teacher, distillation=self.config.distillation, head=head, compute=self._compute
        )
        if targets_in_step is None:
            targets_in_step = self._parallel.sum((labels[:, 1:] != IGNORED).sum().float())
        sums = torch.stack([token_sum.detach(), entropy, divergence])
        distance, rates, total = self._steered(routing, batch.valid, sums)
        sparsity_loss = self.config.weight / micro_batches * distance
        if isinstance(targets_in_step, Tensor):
            targets_in_step = targets_in_step.clamp(min=1)
        loss = self._parallel.world * token_sum / targets_in_step + sparsity_loss
        return loss, Measured(
            loss=total[0] / targets_in_step + sparsity_loss.detach(),
            lm_loss=total[1] / targets_in_step,
            distillation=total[2] / targets_in_step,
            sparsity=rates[: self._num_terms].mean(),
            attention=rates[-2],
            ffn=rates[-1],
        )

    def distance(self, routing: Routing, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sparsity term without its weight, for a loop with a loss of its own, and the skip rate measured.

        `routing` is what `observe` saw of a forward in training mode; `valid`, bool `[B, T]`, is False for padding of
        it.
        """
        distance, rates, _ = self._steered(routing, valid, valid.new_zeros(0, dtype=torch.float32))
        return distance, rates[: self._num_terms].mean()

    def _steered(self, routing: Routing, valid: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distance from the target, the rows' skip rates, and `sums` over all processes."""
        tokens = valid.sum().float()
        skipped = tokens - self._executed(routing, valid)
        total = self._parallel.sum(torch.cat([sums, tokens[None], skipped.detach()]))
        rates = self._rates(skipped, total[len(sums) + 1 :], total[len(sums)])
        difference = self.config.sparsity - rates[: self._num_terms]
        distance = _distance(difference, self.config.smoothing).sum() / self._num_terms
        return distance, rates.detach(), total

    def _executed(self, routing: Routing, valid: Tensor) -> Tensor:
        """Return the tokens that each routed sublayer executes, by the group, `[sublayers]` float32, with gradient."""
        if not self._routers:
            return torch.zeros(0, device=valid.device)
        masks = [getattr(routing[router.layer_index], router.half_layer) for router in self._routers]
        # One product over all groups of all layers, instead of a handful of kernels for each sublayer.
        with _counting(valid):
            return self._groups @ (valid.flatten().float() @ torch.cat(masks, dim=-1).flatten(0, 1).float())

    def _rates(self, skipped: Tensor, skipped_everywhere: Tensor, tokens: Tensor) -> Tensor:
        """Return the rows' skip rates over all processes, with this process's part of the gradient."""
        if self._static is not None:
            return self._static
        tokens = tokens.clamp(min=1)
        local = skipped / tokens
        # The value is global; the gradient is this process's share times the number of processes, for averaging.
        rates = skipped_everywhere / tokens + self._parallel.world * (local - local.detach())
        with _counting(rates):
            return self._rows @ rates

    def _weights(self) -> tuple[int, Tensor]:
        if not self._routers:
            if self.config.weight:
                raise ConfigError("this plan has no routers that a sparsity term could steer; set objective.weight=0")
            return 1, torch.zeros(3, 0)
        by_kind = [half_weights(self._model, "attention"), half_weights(self._model, "ffn")]
        config = self.config
        if config.target == "uniform":
            terms = [row for row in by_kind if any(row)]
        else:
            terms = [half_weights(self._model, config.target)]
        return len(terms), torch.tensor([*terms, *by_kind], dtype=torch.float32)


def _counting(like: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products stay float32, inside an autocast too: bfloat16 cannot count to 1000."""
    return torch.autocast(like.device.type, enabled=False)


def target_labels(batch: TokenBatch) -> Tensor:
    """Return the labels `[B, T]` with padding ignored, whatever they said there."""
    return batch.labels.where(batch.valid, IGNORED)


def _distance(difference: Tensor, smoothing: float) -> Tensor:
    """Return |difference|, where it is smaller than `smoothing` a parabola that joins it; less half of `smoothing`."""
    if not smoothing:
        return difference.abs()
    zeros = torch.zeros_like(difference)
    return functional.huber_loss(difference, zeros, reduction="none", delta=smoothing) / smoothing
