"""BlockPruner: half-layers are left out greedily, each time the one without which the perplexity is lowest.

Written over the machinery of this package; no pruning library is used. Source: Zhong et al., "BlockPruner: Fine-grained
Pruning for Large Language Models", 2024.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import Tensor, nn

from wide.data.batches import TokenBlocks
from wide.data.progress import progress
from wide.errors import EvaluationError
from wide.methods.block_gates import BlockGates, skipping_plan, undefined_as_worst
from wide.methods.calibration import dense_nll, json_number, perplexity, windows
from wide.methods.catalogue import BlockPrunerConfig
from wide.methods.method import Decision, Effort, Target, layer_weights
from wide.models.block_spec import BlockSpec

_ORIGINAL_TOKENS = 256 * 2048


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the greedy search.

    Args:
        half: The half-layer removed, 2i for the attention and 2i + 1 for the FFN of layer i.
        nll: Mean loss per token without it and all removed before, nats.
    """

    half: int
    nll: float

    @property
    def name(self) -> str:
        """As in a report, such as 'ffn 3'."""
        return f"{'ffn' if self.half % 2 else 'attention'} {self.half // 2}"


def greedy_steps(gates: BlockGates, ids: Tensor, *, batch_size: int, effort: Effort) -> Iterator[Step]:
    """Yield half-layers in the order of their removal, each step when it is asked for; of equals the first.

    Every step scores all half-layers that are left, so n steps cost O(n * 2L) forwards.

    Args:
        gates: Of the model.
        ids: Windows, int64 `[N, T]`.
        batch_size: Windows in a micro-batch.
        effort: The tokens are added here.

    Raises:
        EvaluationError: If no loss of a step is finite.
    """
    keep = np.ones(gates.num_halves, dtype=np.bool_)
    while keep.any():
        left = np.flatnonzero(keep)
        keeps = np.tile(keep, (len(left), 1))
        keeps[np.arange(len(left)), left] = False
        nlls = undefined_as_worst(gates.mean_nll(keeps, ids, batch_size=batch_size, effort=effort))
        best = int(nlls.argmin())
        if not np.isfinite(nlls[best]):
            raise EvaluationError(
                f"after {gates.num_halves - len(left)} removed half-layers the loss is not finite whichever is removed "
                "next; the model's dtype overflows: try bfloat16 or float32"
            )
        keep[left[best]] = False
        yield Step(int(left[best]), float(nlls[best]))


def shares_of_work(specs: Sequence[BlockSpec]) -> list[float]:
    """Return the share of the matrix-product work of all layers that each half-layer has, K and V included, `[2L]`."""
    weights = [layer_weights(spec) for spec in specs]
    total = sum(layer.total for layer in weights)
    return [part / total for layer in weights for part in (layer.query_output + layer.key_value, layer.ffn)]


def closest_prefix(steps: Iterable[Step], shares: Sequence[float], sparsity: float) -> list[Step]:
    """Return the first steps whose half-layers together come closest to a share of the work; of equals the fewer.

    Args:
        steps: In the order of removal; none is asked for beyond the one that reaches the share.
        shares: Of each half-layer in the work, `[2L]`.
        sparsity: Wanted share.
    """
    taken: list[Step] = []
    reached = 0.0
    for step in steps:
        before, reached = reached, reached + shares[step.half]
        taken.append(step)
        if reached >= sparsity:
            return taken[:-1] if sparsity - before <= reached - sparsity else taken
    return taken


def decide(model: nn.Module, blocks: TokenBlocks, target: Target, settings: BlockPrunerConfig) -> Decision:
    """Decide which half-layers to leave out.

    With match='nominal' their number follows the target; with 'linear_flops' they are removed in the same order until
    the share of the work that is closest to it.

    Raises:
        ConfigError: If the text is too short.
        EvaluationError: If the loss is not finite.
    """
    gates = BlockGates(model)
    keep = np.ones(gates.num_halves, dtype=np.bool_)
    count = round(target.sparsity * gates.num_halves)
    if target.sparsity == 0.0 or (target.match == "nominal" and count == 0):
        return Decision(plan=skipping_plan(keep))
    ids = windows(blocks, count=settings.num_windows, length=settings.window_length, seed=settings.seed)
    effort = Effort()
    dense = dense_nll(model, ids, settings.batch_size, effort=effort)
    shares = shares_of_work(gates.specs)
    found = greedy_steps(gates, ids, batch_size=settings.batch_size, effort=effort)
    title = "blockpruner: half-layers"
    if target.match == "nominal":
        steps = list(progress(islice(found, count), title=title, total=count, unit="half-layer"))
    else:
        steps = closest_prefix(progress(found, title=title, unit="half-layer"), shares, target.sparsity)
    removed = [step.half for step in steps]
    keep[removed] = False
    return Decision(
        plan=skipping_plan(keep),
        effort=effort,
        notes={
            "removed": [step.name for step in steps],
            "perplexities": [json_number(perplexity(step.nll)) for step in steps],
            "dense_perplexity": json_number(perplexity(dense)),
            "linear_flops": sum(shares[half] for half in removed),
        },
        deviations=_deviations(ids),
    )


def _deviations(ids: Tensor) -> tuple[str, ...]:
    deviations = ["calibrated on the benchmark's corpus, the original on Alpaca"]
    if ids.numel() < _ORIGINAL_TOKENS:
        count, length = ids.shape
        deviations.append(f"scored on {count} windows of {length} tokens, the original on 256 of 2048")
    return tuple(deviations)
