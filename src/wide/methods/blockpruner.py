"""BlockPruner: sublayers are left out greedily, each time the one without which the perplexity is lowest.

Source: Zhong et al., "BlockPruner: Fine-grained Pruning for Large Language Models", 2024.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import nn

from wide.data.batches import TokenBlocks
from wide.errors import EvaluationError
from wide.evaluation.perplexity import exp_or_infinity
from wide.methods.block_gates import BlockGates, plan_without, undefined_as_worst
from wide.methods.calibration import calibration_windows, json_number
from wide.methods.catalogue import BlockPrunerConfig
from wide.methods.method import Decision, Target
from wide.models.block_spec import BlockSpec
from wide.models.cost import costs
from wide.plan import LayerPlan, Plan, Skipped

_ORIGINAL_TOKENS = 256 * 2048


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the greedy search: the sublayer removed, and the mean loss per token without it, nats."""

    sublayer: int
    nll: float

    @property
    def name(self) -> str:
        """As in a report, such as 'ffn 3'."""
        return f"{'ffn' if self.sublayer % 2 else 'attention'} {self.sublayer // 2}"


def greedy_steps(gates: BlockGates, shares: Sequence[float] | None = None, sparsity: float = 1.0) -> Iterator[Step]:
    """Yield sublayers in the order of their removal, each step when it is asked for; of equals the first.

    Every step scores all sublayers that are left, so n steps cost O(n * 2L) forwards, until a share of the work,
    `sparsity`, is gone. With `shares` of each sublayer in the work, `[2L]`, one that would leave out more by over half
    of the smallest is passed over, so that others come as close as they can. Raises EvaluationError if no loss of a
    step is finite.
    """
    keep = np.ones(2 * gates.num_layers, dtype=np.bool_)
    work = np.zeros(len(keep)) if shares is None else np.array(shares)
    while True:
        room = sparsity - work[~keep].sum() + work.min() / 2
        left = np.flatnonzero(keep & (work <= room))
        if not len(left):
            return
        keeps = np.tile(keep, (len(left), 1))
        keeps[np.arange(len(left)), left] = False
        removed = int((~keep).sum())
        nlls = undefined_as_worst(gates.mean_nll(keeps, title=f"blockpruner: {removed} sublayers removed"))
        best = int(nlls.argmin())
        if not np.isfinite(nlls[best]):
            raise EvaluationError(f"after {removed} removed sublayers no loss is finite: try bfloat16 or float32")
        keep[left[best]] = False
        yield Step(int(left[best]), float(nlls[best]))


def shares_of_work(specs: Sequence[BlockSpec]) -> list[float]:
    """Return the share of the matrix-product work of all layers that each sublayer has, K and V included, `[2L]`."""
    without_attention = Plan(tuple(LayerPlan(attention=Skipped()) for _ in specs))
    layers = costs(specs, without_attention, 0).layers
    total = sum(layer.total for layer in layers)
    attention = [layer.removed + layer.removed_kv for layer in layers]
    return [part / total for of, layer in zip(attention, layers, strict=True) for part in (of, layer.total - of)]


def decide(model: nn.Module, blocks: TokenBlocks, target: Target, settings: BlockPrunerConfig) -> Decision:
    """Decide which sublayers to leave out.

    With match='nominal' their number follows the target; with 'linear_flops' they are removed in the same order as long
    as they fit, see `greedy_steps`. Raises ConfigError if the text is too short, and EvaluationError if the loss is not
    finite.
    """
    gates = BlockGates(model, calibration_windows(blocks, settings), settings.batch_size)
    dense, shares = gates.dense_nll(), shares_of_work(gates.specs)
    if target.match == "nominal":
        steps = list(islice(greedy_steps(gates), round(target.sparsity * len(shares))))
    else:
        steps = list(greedy_steps(gates, shares, target.sparsity))
    removed = [step.sublayer for step in steps]
    deviations = ["calibrated on the benchmark's corpus, the original on Alpaca"]
    if gates.ids.numel() < _ORIGINAL_TOKENS:
        scored = "{} windows of {} tokens".format(*gates.ids.shape)
        deviations.append(f"scored on {scored}, the original on 256 of 2048")
    return Decision(
        plan=plan_without(removed, gates.num_layers),
        effort=gates.effort,
        notes={
            "removed": [step.name for step in steps],
            "perplexities": [json_number(exp_or_infinity(step.nll)) for step in steps],
            "dense_perplexity": json_number(exp_or_infinity(dense)),
            "linear_flops": sum(shares[sublayer] for sublayer in removed),
        },
        deviations=tuple(deviations),
    )
