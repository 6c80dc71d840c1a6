"""DDP, deterministic differentiable pruning: one real gate per query head and FFN channel, trained on frozen weights.

Minimised are the cross-entropy, the divergence from the dense model and an augmented Lagrangian that holds each kind of
unit to its target over all layers at once; its multipliers are maximised. What is left are scales: 0 prunes, other
values rescale what is kept.

Letters of the method: z the learned number of a unit, m = ReLU(z) its magnitude, s its retention score, mu the annealed
midpoint of the score, S the target.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBatch, TokenBlocks
from wide.data.progress import progress
from wide.errors import TrainingError
from wide.grouping import Grouping
from wide.methods.calibration import require_length
from wide.methods.catalogue import DDPConfig
from wide.methods.method import Decision, Effort, Target, channels_share, width_share
from wide.models.attach import attach, detach, plan_of
from wide.models.block_spec import BlockSpec, feed_forward
from wide.models.discovery import discover
from wide.models.gates import StaticGate
from wide.models.observe import bypass
from wide.plan import Kept, Plan, scale_name
from wide.training.modes import training_mode
from wide.training.objective import target_labels
from wide.training.token_loss import OutputHead, losses_of, num_targets, token_losses
from wide.training.trainer import learning_rate

_KINDS = ("attention", "ffn")
_FIRST_MIDPOINT = 0.5
# A sigmoid stretched to [-0.1, 1.1], with a slope that makes the score 0, 1/2 and 1 at 0, mu and 2 mu.
_SLOPE, _STRETCH, _SHIFT = 2.4, 1.2, 0.1
# The smallest number that every storage format of weights keeps apart from zero without losing digits.
_SMALLEST = 2.0**-14
# How far the soft sparsity may be from its target before the export has to force it.
_TOLERANCE = 0.01
# Steps after which the keys and values that no head reads any more are counted again.
_RECOUNT_EVERY = 25


def relu_gate(raw: Tensor) -> Tensor:
    """Return m = ReLU(z), with a gradient of 1 on both sides, so that gates can come back."""
    return raw + (raw.relu() - raw).detach()


def retention(magnitude: Tensor, midpoint: float) -> Tensor:
    """Return the retention score s of magnitudes m, float32: 0 at 0, one half at `midpoint` mu, 1 from 2 mu on.

    The gradient passes the clamp unchanged.
    """
    free = torch.sigmoid((magnitude - midpoint) * (_SLOPE / midpoint)) * _STRETCH - _SHIFT
    return free + (free.clamp(0.0, 1.0) - free).detach()


def annealed_midpoint(step: int, *, steps: int, final: float) -> float:
    """Return mu at a step counted from 0: 0.5 at first, falling with the square root of time to `final` at `steps`."""
    return _FIRST_MIDPOINT - (_FIRST_MIDPOINT - final) * math.sqrt(step / steps)


def soft_sparsity(score: Tensor) -> Tensor:
    """Return the share that the scores call pruned, 1 - mean(s)."""
    return 1.0 - score.mean()


class Multipliers:
    """The multipliers of one kind of unit in the augmented Lagrangian; they start at 0 and are maximised.

    They are of the distance from the target, of its square, and of the indecision s (1 - s).
    """

    def __init__(self, device: torch.device | None = None) -> None:
        zeros = (torch.zeros((), dtype=torch.float32, device=device, requires_grad=True) for _ in range(3))
        self.linear, self.quadratic, self.binary = zeros

    def penalty(self, score: Tensor, sparsity: float) -> Tensor:
        """Return what the loss gains: linear d + quadratic d^2 + binary mean(s (1 - s)), d the distance from S.

        `score` is s of all units of the kind, `[units]` float32; `sparsity` is S.
        """
        distance = soft_sparsity(score) - sparsity
        indecision = (score * (1.0 - score)).mean()
        return self.linear * distance + self.quadratic * distance.square() + self.binary * indecision


class Exported(NamedTuple):
    """Scales of one kind of unit, ready for a plan: per layer float32 `[units]`; 0 prunes.

    `relu_zeros` is the share of units whose magnitude was 0 before anything was forced; in layers that are `forced` a
    unit had to be kept, because all of them would have gone.
    """

    scales: tuple[Tensor, ...]
    relu_zeros: float
    forced: tuple[int, ...]


def export(raw: Sequence[Tensor], *, pruned: int) -> Exported:
    """Return the scales of trained gates z, float32 `[units]` per layer, one kind of unit over all layers.

    The `pruned` smallest units over all layers go, first layers first among equals, and more where more have a
    magnitude of 0. At least one unit of each layer is kept; where its magnitude is 0, it keeps the smallest scale that
    any format of weights can hold, which changes nothing.
    """
    magnitudes = torch.cat([z.detach().float().cpu() for z in raw]).relu()
    scales = magnitudes.clone()
    scales[magnitudes.argsort(stable=True)[:pruned]] = 0.0
    layers = list(scales.split([z.numel() for z in raw]))
    forced = []
    for index, (layer, z) in enumerate(zip(layers, raw, strict=True)):
        if not layer.any():
            best = int(z.argmax())
            layer[best] = max(float(z[best].detach()), _SMALLEST)
            forced.append(index)
    relu_zeros = float((magnitudes == 0).float().mean())
    return Exported(tuple(layer.clone() for layer in layers), relu_zeros, tuple(forced))


class _Goal(NamedTuple):
    """Share and number of units of one kind to prune, over all layers."""

    sparsity: float
    pruned: int


_Goals = Callable[[Sequence[Tensor] | None], Mapping[str, _Goal]]
"""(by layer, which query heads would be kept now, once there are gates) -> by kind, what is to be reached."""


class _Course:
    def __init__(
        self,
        model: nn.Module,
        gates: Mapping[str, Sequence[StaticGate]],
        goals: _Goals,
        text: TokenBlocks,
        settings: DDPConfig,
    ) -> None:
        self._model, self._gates, self._text, self._settings = model, gates, text, settings
        self._goals_for, self.goals = goals, goals(None)
        self._device = next(model.parameters()).device
        self._head = OutputHead(model)
        self._compute = torch.compile(losses_of, fullgraph=True, dynamic=False) if settings.compile else losses_of
        self._scales = [gate.scale for of_kind in gates.values() for gate in of_kind]
        self._multipliers = {kind: Multipliers(self._device) for kind in _KINDS}
        rates = {"linear": settings.linear_rate, "quadratic": settings.quadratic_rate, "binary": settings.binary_rate}
        groups: list[dict[str, Any]] = [{"params": self._scales, "peak": settings.learning_rate}]
        for name, rate in rates.items():
            wanted = [getattr(multipliers, name) for multipliers in self._multipliers.values()]
            groups.append({"params": wanted, "peak": rate, "maximize": True})
        self._optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=0.0)

    def train(self) -> dict[str, Any]:
        settings = self._settings
        how = {"gradient_checkpointing": settings.gradient_checkpointing, "compile": settings.compile}
        with training_mode(self._model, routers=False, others=self._scales, **how):
            for step in progress(range(settings.steps), title="ddp: gates", unit="step"):
                if step % _RECOUNT_EVERY == 0:
                    self._recount()
                self._step(step)
        self._recount()
        return self._facts()

    def exported(self, kind: str) -> Exported:
        return export([gate.scale for gate in self._gates[kind]], pruned=self.goals[kind].pruned)

    def _recount(self) -> None:
        self.goals = self._goals_for([scale != 0 for scale in self.exported("attention").scales])

    def _step(self, step: int) -> None:
        settings = self._settings
        self._optimizer.zero_grad(set_to_none=True)
        entropy, divergence = self._language(self._text.batch_at(step, batch_size=settings.batch_size))
        midpoint = annealed_midpoint(step, steps=settings.steps, final=settings.midpoint_end)
        scores = {kind: self._scores(kind, midpoint) for kind in _KINDS}
        penalties = [self._multipliers[kind].penalty(scores[kind], self.goals[kind].sparsity) for kind in _KINDS]
        penalty = torch.stack(penalties).sum()
        torch.autograd.backward(penalty)
        # Looked at before the step, so that what is not finite never reaches a gate.
        gradients = [scale.grad.sum() for scale in self._scales if scale.grad is not None]
        self._check(step, torch.stack([entropy, divergence, penalty.detach(), *gradients]))
        share = learning_rate(step, steps=settings.steps, peak=1.0, warmup=settings.warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * share
        self._optimizer.step()
        with torch.no_grad():
            for scale in self._scales:
                scale.clamp_(min=settings.lowest)

    def _language(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Differentiate cross-entropy + weight * divergence; return both, nats per target token."""
        weight = self._settings.distillation
        targets = max(num_targets(target_labels(batch)), 1)
        measured = torch.zeros(2, device=self._device)
        for part in batch.split(self._settings.micro_batch_size):
            moved = part.to(self._device)
            inputs = {"input_ids": moved.input_ids, "use_cache": False}
            teacher = None
            if weight:
                with torch.no_grad(), bypass(self._model):
                    teacher = self._head.states(self._model, **inputs)[0]
            states, head = self._head.states(self._model, **inputs)
            # The token loss mixes with weights that sum to one; these are 1 and `weight`.
            mixed, entropy, divergence = token_losses(
                states,
                target_labels(moved),
                teacher=teacher,
                distillation=weight / (1.0 + weight),
                head=head,
                compute=self._compute,
            )
            torch.autograd.backward(mixed * ((1.0 + weight) / targets))
            measured += torch.stack([entropy, divergence]) / targets
        return measured[0], measured[1]

    def _scores(self, kind: str, midpoint: float) -> Tensor:
        return retention(torch.cat([gate.factors() for gate in self._gates[kind]]), midpoint)

    def _check(self, step: int, found: Tensor) -> None:
        if not torch.isfinite(found).all():
            entropy, divergence, penalty = (float(value) for value in found[:3])
            raise TrainingError(
                f"ddp, step {step}: cross-entropy {entropy}, divergence {divergence}, penalty {penalty}, or a gradient "
                "of the gates is not finite, so training stopped; nothing is kept. Try a lower learning_rate (now "
                f"{self._settings.learning_rate:g}), or a bfloat16 or float32 base instead of float16"
            )

    @torch.no_grad()
    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for kind in _KINDS:
            score = self._scores(kind, self._settings.midpoint_end)
            facts[kind] = {
                "soft_sparsity": float(soft_sparsity(score)),
                "decided": float(((score < _TOLERANCE) | (score > 1 - _TOLERANCE)).float().mean()),
            }
        return facts


def decide(model: nn.Module, blocks: TokenBlocks, target: Target, settings: DDPConfig) -> Decision:
    """Train gates and return them as scales.

    Raises ConfigError if the sequences are longer than the blocks, or the target is out of reach; UnsupportedModelError
    if a layer's FFN is not of the known kind; TrainingError if a loss is not finite.
    """
    specs = discover(model)
    length = settings.sequence_length or blocks.sequence_length
    require_length(blocks, length, "sequence_length")
    text = blocks.cut(length, seed=settings.seed)
    with _gated(model, specs, settings) as gates:
        course = _Course(model, gates, partial(_goals, specs, target), text, settings)
        facts = course.train()
        exported = {kind: course.exported(kind) for kind in _KINDS}
    seen = settings.steps * settings.batch_size * length
    effort = Effort(tokens_forward=seen if settings.distillation else 0, tokens_backward=seen)
    tensors = {scale_name(index, kind): scale for kind in _KINDS for index, scale in enumerate(exported[kind].scales)}
    return Decision(
        plan=_plan(specs, tensors),
        tensors=tensors,
        effort=effort,
        notes={
            kind: facts[kind]
            | {"pruned": float((torch.cat(result.scales) == 0).float().mean()), "relu_zeros": result.relu_zeros}
            for kind, result in exported.items()
        },
        deviations=_deviations(facts, exported, course.goals),
    )


def _goals(specs: Sequence[BlockSpec], target: Target, kept: Sequence[Tensor] | None) -> dict[str, _Goal]:
    """Return the goals; where all matrix products count, with the heads that would be kept now."""
    share = of_channels = width_share(specs, target)
    if target.match == "linear_flops" and kept is not None:
        of_channels = channels_share(specs, target, kept)
    heads = [spec.attention.num_query_heads for spec in specs]
    channels = sum(feed_forward(spec).width for spec in specs)
    if target.match == "nominal":
        # Whole heads of each layer, as the original counts; the fraction of a digit keeps 0.3 * 10 at 3.
        attention = sum(int(share * count + 1e-6) for count in heads)
        attention_share = attention / sum(heads)
    else:
        attention, attention_share = round(share * sum(heads)), share
    return {"attention": _Goal(attention_share, attention), "ffn": _Goal(of_channels, round(of_channels * channels))}


@contextmanager
def _gated(model: nn.Module, specs: Sequence[BlockSpec], settings: DDPConfig) -> Iterator[dict[str, list[StaticGate]]]:
    """Attach a gate per query head and FFN channel, drawn around 1, for the length of the block."""
    generator = torch.Generator().manual_seed(settings.seed)
    tensors = {
        scale_name(spec.index, kind): 1.0 + settings.initial_spread * torch.randn(units, generator=generator)
        for spec in specs
        for kind, units in (("attention", spec.attention.num_query_heads), ("ffn", feed_forward(spec).width))
    }
    attach(model, _plan(specs, tensors), specs=specs, tensors=tensors)
    try:
        found = [module for module in model.modules() if isinstance(module, StaticGate)]
        for gate in found:
            gate.transform = relu_gate
        yield {kind: [gate for gate in found if gate.half_layer == kind] for kind in _KINDS}
    finally:
        detach(model)


def _plan(specs: Sequence[BlockSpec], tensors: Mapping[str, Tensor]) -> Plan:
    def kept(spec: BlockSpec, kind: str) -> Kept:
        heads = Grouping(spec.attention.query_width, spec.attention.head_dim)
        grouping = Grouping(feed_forward(spec).width, 1) if kind == "ffn" else heads
        return Kept(grouping=grouping, kept=int(tensors[scale_name(spec.index, kind)].count_nonzero()))

    return plan_of(specs, kept)


def _deviations(facts: dict[str, Any], exported: Mapping[str, Exported], goals: Mapping[str, _Goal]) -> tuple[str, ...]:
    found = [
        "trained on the benchmark's corpus, the original on FineWeb-Edu",
        "the export prunes the target's share exactly, as the original's own evaluation does; the original exports "
        "every gate above 0",
    ]
    for kind, result in exported.items():
        reached, wanted = facts[kind]["soft_sparsity"], goals[kind].sparsity
        if abs(reached - wanted) > _TOLERANCE:
            found.append(
                f"{kind}: training ended at a soft sparsity of {reached:.1%} for a target of {wanted:.1%}, the export "
                "forced the rest"
            )
        if result.forced:
            found.append(f"{kind}: one unit was kept by force in layers {list(result.forced)}, which lost all of them")
    return tuple(found)
