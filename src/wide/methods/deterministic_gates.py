"""Deterministic gates: real scales that learn which units go, without any sampling.

Pure functions on tensors; who multiplies what by a gate is not their business. Letters of the method: z the learned
number of a unit, m = ReLU(z) its magnitude, s its retention score, mu the annealed midpoint of the score, S the target.

Source: DDP (deterministic differentiable pruning).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FIRST_MIDPOINT = 0.5
# A sigmoid stretched to [-0.1, 1.1], with a slope that makes the score 0, 1/2 and 1 at 0, mu and 2 mu.
_SLOPE, _STRETCH, _SHIFT = 2.4, 1.2, 0.1
# The smallest number that every storage format of weights keeps apart from zero without losing digits.
_SMALLEST = 2.0**-14


def relu_gate(raw: Tensor) -> Tensor:
    """Return m = ReLU(z), with a gradient of 1 on both sides, so that gates can come back."""
    return raw + (raw.relu() - raw).detach()


def retention(magnitude: Tensor, midpoint: float) -> Tensor:
    """Return the retention score s in [0, 1]; the gradient passes the clamp unchanged.

    Args:
        magnitude: m, any shape, float32.
        midpoint: mu; the score is 0 at 0, one half at mu and 1 from 2 mu on.
    """
    free = torch.sigmoid((magnitude - midpoint) * (_SLOPE / midpoint)) * _STRETCH - _SHIFT
    return free + (free.clamp(0.0, 1.0) - free).detach()


def annealed_midpoint(step: int, *, steps: int, final: float) -> float:
    """Return mu at a step counted from 0: 0.5 at first, falling with the square root of time to `final` at `steps`."""
    return FIRST_MIDPOINT - (FIRST_MIDPOINT - final) * math.sqrt(step / steps)


def soft_sparsity(score: Tensor) -> Tensor:
    """Return the share that the scores call pruned, 1 - mean(s)."""
    return 1.0 - score.mean()


class Multipliers(nn.Module):
    """The multipliers of one kind of unit in the augmented Lagrangian; they start at 0 and are maximised.

    Attributes:
        linear: Of the distance from the target.
        quadratic: Of its square.
        binary: Of the indecision s (1 - s).
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Start at zero, float32."""
        super().__init__()
        self.linear = nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))
        self.quadratic = nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))
        self.binary = nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))

    def penalty(self, score: Tensor, sparsity: float) -> Tensor:
        """Return what the loss gains: linear d + quadratic d^2 + binary mean(s (1 - s)), d the distance from S.

        Args:
            score: s of all units of the kind, `[units]` float32.
            sparsity: S, the wanted share of pruned units.
        """
        distance = soft_sparsity(score) - sparsity
        indecision = (score * (1.0 - score)).mean()
        return self.linear * distance + self.quadratic * distance.square() + self.binary * indecision


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Scales of one kind of unit, ready for a plan.

    Args:
        scales: Per layer float32 `[units]`; 0 prunes.
        relu_zeros: Share of the units whose magnitude was 0 before anything was forced.
        forced: Layers in which a unit had to be kept, because all of them would have gone.
    """

    scales: tuple[Tensor, ...]
    relu_zeros: float
    forced: tuple[int, ...]


def export(raw: Sequence[Tensor], *, pruned: int | None) -> Exported:
    """Return the scales of trained gates, one kind of unit over all layers.

    At least one unit of each layer is kept; where its magnitude is 0, it keeps the smallest scale that any format of
    weights can hold, which changes nothing.

    Args:
        raw: z per layer, float32 `[units]`.
        pruned: Units that go, the smallest over all layers, first layers first among equals; more go only where more
            have a magnitude of 0. None prunes exactly those.
    """
    magnitudes = torch.cat([z.detach().float().cpu() for z in raw]).relu()
    scales = magnitudes.clone()
    if pruned is not None:
        scales[magnitudes.argsort(stable=True)[:pruned]] = 0.0
    layers = list(scales.split([z.numel() for z in raw]))
    forced = []
    for index, (layer, z) in enumerate(zip(layers, raw, strict=True)):
        if not layer.any():
            best = int(z.argmax())
            layer[best] = max(float(z[best]), _SMALLEST)
            forced.append(index)
    return Exported(
        scales=tuple(layer.clone() for layer in layers),
        relu_zeros=float((magnitudes == 0).float().mean()),
        forced=tuple(forced),
    )
