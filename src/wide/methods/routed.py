"""Training the routers of a dynamic method to a target of the benchmark, and the row 'wide'."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from wide.config import ObjectiveConfig, SparsityTarget, StageConfig, WideConfig
from wide.data.batches import TokenBlocks
from wide.methods.catalogue import WideMethodConfig
from wide.methods.method import Effort, Target, share_of_routed
from wide.models.attach import attach, attachment, plan_for
from wide.models.block_spec import BlockSpec
from wide.models.discovery import discover
from wide.models.router import Router
from wide.plan import Plan
from wide.training.stages import prune

# Share by which inference may miss the target before the report says so.
_TOLERANCE = 0.01
# Paper and code of WIDE differ; by (router_bias, router_input).
_ROUTERS = {
    (False, "normed"): "routers have no bias and read the normed input, as in the paper's equations; those of the "
    "authors' code have biases and read the stream before the norm (router_bias true, router_input residual)",
    (True, "residual"): "routers have biases and read the stream before the norm, as in the authors' code; those of "
    "the paper's equations have no bias and read the normed input",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """What a dynamic method trains; a nominal target is a share of what has routers.

    Args:
        objective: Its sparsity and measure are replaced by the target's.
        uniform: Steer attention and FFN to the same share each.
        initialise: Draws the initial parameters of a router in place of those that it comes with.
        deviations: Where this differs from the method's original, a sentence each.
    """

    target: Target
    stage: StageConfig
    objective: ObjectiveConfig
    config: WideConfig | Plan = field(default_factory=WideConfig)
    uniform: bool = False
    initialise: Callable[[Router], None] | None = None
    deviations: tuple[str, ...] = ()


Route = Callable[[Sequence[BlockSpec], Any, Routing], Routing]
"""(the model's layers, the method's settings, what is asked for) -> what is trained."""


def train(
    model: nn.Module,
    route: Route,
    blocks: TokenBlocks,
    settings: Any,
    asked: Routing,
    *,
    output: str | Path | None = None,
    resume: bool = False,
) -> tuple[Effort, tuple[str, ...]]:
    """Attach routers, train them in place until the model skips the target, and set their threshold.

    Return the text consumed (by all processes, over all parts of a resumed run, with what the start and the calibration
    of the threshold read), and sentences on how the row differs from its original and inference from argmax at the
    target. Raises as `wide.prune`.
    """
    specs = discover(model)
    wanted = route(specs, settings, asked)
    config = wanted.config
    plan = config if isinstance(config, Plan) else plan_for(config, specs)
    objective = objective_for(specs, plan, wanted.target, wanted.objective, uniform=wanted.uniform)
    if wanted.initialise is not None:
        attach(model, config)
        for router in attachment(model).routers():
            wanted.initialise(router)
    prune(
        model,
        blocks,
        config=config if wanted.initialise is None else None,
        objective=objective,
        stage=wanted.stage,
        output=output,
        resume=resume,
        calibrate_threshold=settings.calibrate_threshold,
    )
    record = attachment(model).provenance["prune"]
    return effort_of(record), (*wanted.deviations, *_deviations(record["inference"], objective))


def route_wide(_specs: Sequence[BlockSpec], settings: WideMethodConfig, asked: Routing) -> Routing:
    """Return the row 'wide': a router per sublayer decides per token which channel groups execute."""
    told = _ROUTERS.get((settings.router_bias, settings.router_input))
    deviations = () if told is None else (told,)
    return dataclasses.replace(asked, config=settings, uniform=settings.uniform, deviations=deviations)


def objective_for(
    specs: Sequence[BlockSpec], plan: Plan, target: Target, objective: ObjectiveConfig, *, uniform: bool = False
) -> ObjectiveConfig:
    """Return an objective that steers what a plan routes to a target of the benchmark; the rest of it stays.

    With `uniform`, attention and FFN are steered to that share each, instead of their mean. Raises ConfigError, with
    the largest target, if it cannot be reached by skipping all that is routed.
    """
    share = share_of_routed(specs, plan, target, "skipping what this plan routes")
    counted: SparsityTarget = "uniform" if uniform else "mean" if target.match == "nominal" else "linear_flops"
    return dataclasses.replace(objective, sparsity=share, target=counted)


def effort_of(record: Mapping[str, Any]) -> Effort:
    """Return the text that a stage consumed, as the model's provenance tells of it."""
    seen, start = int(record["tokens"]), record.get("start", {})
    before = record["seconds_before"] + (start["seconds"] if start.get("resumed") else 0.0)
    teacher = seen if record["objective"]["distillation"] else 0
    return Effort(
        tokens_forward=teacher + record["inference"].get("tokens_forward", 0) + start.get("tokens_forward", 0),
        tokens_backward=seen + start.get("tokens_backward", 0),
        seconds_before=before,
    )


def _deviations(inference: dict[str, Any], objective: ObjectiveConfig) -> tuple[str, ...]:
    found = []
    thresholds = inference["threshold"]
    if any(thresholds.values()):
        margins = {f"{value:.3f}" for value in thresholds.values()}
        each = " and ".join(f"{value:.3f} ({kind})" for kind, value in thresholds.items())
        found.append(
            f"groups execute from a margin of {margins.pop() if len(margins) == 1 else each} instead of argmax, which "
            f"skipped {inference['argmax_sparsity']:.1%}"
        )
    if abs(inference["sparsity"] - objective.sparsity) > _TOLERANCE:
        found.append(
            f"inference skips {inference['sparsity']:.1%} of calibration text ({inference['measure']}), "
            f"{objective.sparsity:.1%} was wanted"
        )
    return tuple(found)
