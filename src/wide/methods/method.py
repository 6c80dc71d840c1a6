"""What a method receives and returns, and how a target counts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from torch import Tensor, nn

from wide.data.batches import TokenBlocks
from wide.errors import ConfigError
from wide.grouping import Grouping
from wide.methods.catalogue import Match
from wide.models.attach import plan_of
from wide.models.block_spec import BlockSpec, feed_forward
from wide.models.cost import costs
from wide.plan import Kept, LayerPlan, Plan, Routed
from wide.schema import Between, Checked


@dataclass(frozen=True, kw_only=True, slots=True)
class Target(Checked):
    """How much is to be pruned.

    Args:
        sparsity: Wanted share, in [0, 1).
        match: 'nominal' counts as each method's paper does (layers, heads and channels, slicing fraction, skipped
            groups); 'linear_flops' counts the matrix-product work of all decoder layers, K and V included, the output
            head not.
    """

    sparsity: Annotated[float, Between(0, 1, "high", "0.5 prunes half")]
    match: Match = "nominal"


@dataclass(slots=True)
class Effort:
    """Tokens of calibration that a method consumed: through a forward only, and through a forward with backward.

    `seconds_before` is the time of the earlier parts of a resumed training, which the caller of the last part has not
    seen.
    """

    tokens_forward: int = 0
    tokens_backward: int = 0
    seconds_before: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What a static method decided; nothing of it is attached yet.

    Args:
        tensors: Values of the plan by the names that `wide.plan` gives them, float32 on the CPU.
        weights: Base parameters to replace, by their name in the model's state dict, in any float dtype.
        notes: JSON-ready facts for the report: scores, the order of removal, levels chosen.
        deviations: Where this differs from the method's original, a sentence each.
    """

    plan: Plan
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    effort: Effort = field(default_factory=Effort)
    notes: Mapping[str, Any] = field(default_factory=dict)
    deviations: tuple[str, ...] = ()


Decide = Callable[[nn.Module, TokenBlocks, Target, Any], Decision]
"""(model, packed calibration text, target above 0, settings) -> what to do. The model is left as it was found."""


def dense_plan(num_layers: int) -> Plan:
    """Return the plan that leaves every sublayer as it is."""
    return Plan((LayerPlan(),) * num_layers)


def sublayer_plan(specs: Sequence[BlockSpec], **router: Any) -> Plan:
    """Return the plan in which every sublayer is one group with a router of its own; `router` has its other fields.

    An FFN that cannot be routed stays dense.
    """

    def routed(spec: BlockSpec, name: str) -> Routed:
        width = feed_forward(spec).width if name == "ffn" else spec.attention.query_width
        return Routed(grouping=Grouping.whole(width), **router)

    return plan_of(specs, routed)


def linear_work(specs: Sequence[BlockSpec], plan: Plan, heads: Any = None) -> tuple[float, float]:
    """Return a token's FLOP in the layers' products: what a plan routes or prunes, and all; `heads` as in `costs`."""
    layers = costs(specs, plan, 0, heads=heads).layers
    return sum(cost.prunable + cost.removed + cost.removed_kv for cost in layers), sum(cost.total for cost in layers)


def share_of_routed(specs: Sequence[BlockSpec], plan: Plan, target: Target, doing: str) -> float:
    """Return a target as a share of what a plan routes.

    Where it counts all matrix products of the decoder layers, the share is higher, because some are always computed.
    Raises ConfigError, with the largest target, if all that is routed is too little.
    """
    if target.match == "nominal":
        return target.sparsity
    prunable, total = linear_work(specs, plan)
    share = target.sparsity * total / max(prunable, 1.0)
    if share >= 1.0:
        raise ConfigError(
            f"sparsity {target.sparsity} of all matrix products cannot be reached by {doing}; stay below "
            f"{prunable / total:.4f}"
        )
    return share


def channels_share(specs: Sequence[BlockSpec], target: Target, kept: Sequence[Tensor]) -> float:
    """Return the share of FFN channels to prune beside heads that are decided, for a share of all matrix products.

    Keys and values that no head reads any more count; `kept` says by layer which query heads are kept, bool `[H_q]`.
    """
    units = [Grouping(spec.attention.query_width, spec.attention.head_dim) for spec in specs]
    left = [Kept(grouping=of, kept=int(heads.sum())) for of, heads in zip(units, kept, strict=True)]
    plan = Plan(tuple(LayerPlan(attention=half) for half in left))
    removed, total = linear_work(specs, plan, dict(enumerate(kept)))
    ffn = sum(layer.ffn for layer in costs(specs, sublayer_plan(specs, rank=1), 0).layers)
    return min(max((target.sparsity * total - removed) / ffn, 0.0), 1.0)


def width_share(specs: Sequence[BlockSpec], target: Target) -> float:
    """Return the share of query heads and of FFN channels to prune.

    With match='linear_flops' keys and values count in the total, so the share is above the target; those that no head
    reads any more are taken off by `channels_share`. Where queries are normed over their whole width, the query
    projection stays too. Raises ConfigError, with the largest target, if it cannot be reached, and
    UnsupportedModelError if a layer has no FFN that can be pruned.
    """
    for spec in specs:
        feed_forward(spec)
    plan = sublayer_plan(specs, rank=1)
    return share_of_routed(specs, plan, target, "pruning query heads and FFN channels, because K and V stay dense")
