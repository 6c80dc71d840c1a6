"""After training: how much is skipped at inference, and the threshold that meets the target.

Training samples with Gumbel noise, inference does not, so the two skip rates differ. What inference skips is measured
on training text, thresholds are calibrated there, and where argmax (the paper's threshold, 0) misses the target by more
than 0.2 points, the calibrated one takes its place. A target for attention and FFN each is met by a threshold each.
"""

import warnings
from itertools import groupby
from typing import Any

from torch import nn

from wide.config import ObjectiveConfig
from wide.data.batches import BatchSource, TokenBatch
from wide.models.attach import attachment
from wide.models.cost import Measure, static_sparsity
from wide.models.thresholds import (
    DEFAULT_POINTS,
    balanced_thresholds,
    calibrate_thresholds,
    measure_sparsity,
    set_sparsity,
)
from wide.training.activations import TokensRead, counting
from wide.training.parallel import DataParallel
from wide.training.text_source import read_batches

# Of the tokens that the stage read, one in so many is read again to calibrate, within these bounds.
_SHARE = 32
_MIN_TOKENS, _MAX_TOKENS = 4_096, 65_536
# Tokens of a forward at least: a micro-batch of training is chosen for a backward, and may be very small.
_TOKENS_PER_FORWARD = 2_048
_TOLERANCE = 0.002


def meet_target(
    model: nn.Module, batches: list[TokenBatch], objective: ObjectiveConfig, *, adjust: bool, parallel: DataParallel
) -> dict[str, Any]:
    """Calibrate thresholds on text, set one of them, and return JSON-ready facts about both.

    A plan without routers has neither; the facts are then what it prunes. With `adjust` the thresholds are chosen here,
    0 or what meets the objective's target; otherwise they stay as they are. All processes end with those of the first.
    """
    measure: Measure = "linear_flops" if objective.target == "linear_flops" else "mean"
    if not attachment(model).plan.is_routed:
        return {"measure": "mean", "sparsity": static_sparsity(model).mean}
    target, read = objective.sparsity, TokensRead()
    points = sorted({*DEFAULT_POINTS, target} - {0.0})
    routers = attachment(model).routers()
    thresholds = [router.threshold for router in routers]
    with counting(model, read):
        calibrated = calibrate_thresholds(model, batches, measure=measure, sparsities=points)
        argmax = next(sparsity for sparsity, threshold in calibrated if threshold == 0.0)
        if adjust:
            thresholds = _chosen(model, batches, objective, argmax, (calibrated[0][0], calibrated[-1][0]))
        reached = measure_sparsity(model, batches, thresholds, measure=measure) if any(thresholds) else argmax
    # In one go: where processes have text of their own, their tables may be of different lengths.
    thresholds, attachment(model).thresholds_by_sparsity = parallel.agree((thresholds, calibrated))
    for router, threshold in zip(routers, thresholds, strict=True):
        router.threshold = threshold
    return {
        "measure": measure,
        "tokens": sum(int(batch.valid.sum()) for batch in batches),
        "tokens_forward": read.forward,
        "argmax_sparsity": argmax,
        "adjusted": adjust,
        "threshold": {router.half_layer: router.threshold for router in routers},
        "sparsity": reached,
    }


def _chosen(
    model: nn.Module, batches: list[TokenBatch], objective: ObjectiveConfig, argmax: float, ends: tuple[float, float]
) -> list[float]:
    """Return the threshold of each router with which inference meets the target."""
    target, routers = objective.sparsity, attachment(model).routers()
    kinds = {router.half_layer for router in routers}
    in_range = ends[0] - _TOLERANCE <= target <= ends[1] + _TOLERANCE
    if not in_range:
        warnings.warn(
            f"a threshold reaches {ends[0]:.1%} to {ends[1]:.1%} here, not the target of {target:.1%}: inference takes "
            f"the routers' own decisions, which skip {argmax:.1%}; train longer, or choose another target",
            stacklevel=4,
        )
    if in_range and objective.target == "uniform" and len(kinds) == 2:
        return balanced_thresholds(model, batches, target, tolerance=_TOLERANCE)
    return [set_sparsity(model, target) if in_range and abs(argmax - target) > _TOLERANCE else 0.0] * len(routers)


def calibration_size(read: int) -> int:
    """Return the tokens that are read, once a point, to calibrate after a stage that read so many."""
    return min(max(read // _SHARE, _MIN_TOKENS), _MAX_TOKENS)


def calibration_batches(source: BatchSource, *, step: int, batch_size: int, micro_batch_size: int) -> list[TokenBatch]:
    """Return the batches that training would have read next after so many steps, in pieces that fit in memory.

    `micro_batch_size` has the sequences of a piece; of short ones more.
    """
    tokens = calibration_size(step * source.batch_at(step, batch_size=batch_size).input_ids.numel())
    pieces = read_batches(
        source, batch_size=batch_size, micro_batch_size=micro_batch_size, tokens=tokens, step=step, whole=True
    )
    joined: list[TokenBatch] = []
    # Steps of a source may be of different lengths.
    for _, alike in groupby(pieces, key=lambda piece: piece.input_ids.shape[1]):
        same = list(alike)
        count = max(1, _TOKENS_PER_FORWARD // same[0].input_ids.numel())
        joined += [TokenBatch.joined(same[begin : begin + count]) for begin in range(0, len(same), count)]
    return joined
