"""Layer skipping in D-LLM's manner: each token executes or skips whole layers, one router for both halves.

Two rows. `METHOD` is as the WIDE paper's comparison most probably runs it: routers alone, no eviction of keys and
values, no protected layers or tokens. `ORIGINAL` has its authors' MLP routers, eviction, dense first layers and first
tokens, and as a setting their penalty on every token. Otherwise both are steered by a penalty on the mean skip rate.
Written over the machinery of this package.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from wide.config import ObjectiveConfig, StageConfig
from wide.data.batches import TokenBlocks
from wide.errors import ConfigError
from wide.grouping import Grouping
from wide.method_config import DLLMConfig, DLLMOriginalConfig
from wide.methods.linear_work import feed_forward
from wide.methods.method import Effort, Method, Target
from wide.methods.routed import linear_work, train_routers
from wide.models.block_spec import BlockSpec
from wide.models.discovery import discover
from wide.plan import Dense, Following, LayerPlan, Plan, Routed


def train(
    model: nn.Module,
    blocks: TokenBlocks,
    target: Target,
    settings: DLLMConfig,
    *,
    stage: StageConfig,
    objective: ObjectiveConfig,
    output: str | Path | None = None,
    resume: bool = False,
) -> tuple[Effort, tuple[str, ...]]:
    """Train one router a layer, on the input of the layer.

    Raises:
        UnsupportedModelError: If a layer's FFN cannot be routed.
    """
    plan = Plan(tuple(_layer(spec, settings.router_rank) for spec in discover(model)))
    effort, found = train_routers(
        model,
        plan,
        blocks,
        target,
        stage=stage,
        objective=objective,
        output=output,
        resume=resume,
        calibrate_threshold=settings.calibrate_threshold,
    )
    return effort, (
        f"routers are linear bottlenecks of rank {settings.router_rank}, the original's are MLPs of width 512",
        "routers are trained alone, the original trains LoRA with them",
        "keys and values of skipping tokens stay visible, the original evicts them",
        "no layer and no token is protected, the original protects the first two of each",
        "the penalty is on the mean skip rate, the original's on that of every token",
        f"the temperature falls from {stage.temperature_start:g} to {stage.temperature_end:g}, the original's is 1",
        *found,
    )


def _layer(spec: BlockSpec, rank: int) -> LayerPlan:
    feed_forward(spec)
    grouping = Grouping.whole(spec.attention.query_width)
    return LayerPlan(
        attention=Routed(grouping=grouping, rank=rank, router_input="layer_input", bias=True), ffn=Following()
    )


def train_original(
    model: nn.Module,
    blocks: TokenBlocks,
    target: Target,
    settings: DLLMOriginalConfig,
    *,
    stage: StageConfig,
    objective: ObjectiveConfig,
    output: str | Path | None = None,
    resume: bool = False,
) -> tuple[Effort, tuple[str, ...]]:
    """Train one MLP router a layer, behind the first layers, and evict what skipping tokens would leave in the cache.

    A nominal target counts the dense first layers, too, as the original does. Steps, sizes and learning rate stay
    those of `stage`.

    Raises:
        ConfigError: If the layers that have routers cannot skip as much.
        UnsupportedModelError: If a layer's FFN cannot be routed.
    """
    specs = discover(model)
    plan = Plan(tuple(_original_layer(spec, settings) for spec in specs))
    of_routed = _target_of_routed_layers(target, plan)
    objective, penalty = _penalty(settings, objective, specs, plan, target)
    effort, found = train_routers(
        model,
        plan,
        blocks,
        of_routed,
        stage=dataclasses.replace(stage, temperature_start=settings.temperature, temperature_end=settings.temperature),
        objective=objective,
        output=output,
        resume=resume,
        calibrate_threshold=settings.calibrate_threshold,
    )
    return effort, (
        "routers are trained before LoRA, the original trains both together",
        *penalty,
        "steps, sizes and learning rate are those of all rows; the original's are 10 epochs of its task at 9e-3 x "
        "batch size / 256",
        "inference routes by margin; the original's threshold is a probability of one half",
        f"rates are means over the {_num_routed(plan)} of {len(plan.layers)} layers that have routers; a nominal "
        "target counts all layers",
        *found,
    )


def _penalty(
    settings: DLLMOriginalConfig, objective: ObjectiveConfig, specs: Sequence[BlockSpec], plan: Plan, target: Target
) -> tuple[ObjectiveConfig, tuple[str, ...]]:
    """Return the objective with the penalty that is set, and what of it is not the original's."""
    if settings.penalty == "mean":
        return objective, (
            f"the penalty is on the mean skip rate with a weight of {objective.weight:g} throughout; the original's on "
            "that of every token with a weight that rises from 0 to 5",
        )
    # The original's rates are over all layers, those of the objective over what has routers.
    routed, layers = _num_routed(plan), len(plan.layers)
    weight, told = settings.weight * routed / layers, tuple[str, ...]()
    if target.match == "linear_flops":
        skippable, total = linear_work(specs, plan)
        weight = settings.weight * skippable / total
        if not math.isclose(skippable * layers, total * routed):
            told = ("a token's rate is the share of its matrix products that it skips, the original's that of layers",)
    return dataclasses.replace(objective, weight=weight, per_token=True, weight_ramp=True), told


def _original_layer(spec: BlockSpec, settings: DLLMOriginalConfig) -> LayerPlan:
    feed_forward(spec)
    if spec.index < settings.dense_layers:
        return LayerPlan(attention=Dense(), ffn=Dense())
    attention = Routed(
        grouping=Grouping.whole(spec.attention.query_width),
        rank=settings.router_rank,
        router_input="layer_input",
        bias=True,
        form="dllm",
        evicts=settings.evict,
        first_tokens=settings.first_tokens,
    )
    return LayerPlan(attention=attention, ffn=Following())


def _num_routed(plan: Plan) -> int:
    return sum(isinstance(layer.attention, Routed) for layer in plan.layers)


def _target_of_routed_layers(target: Target, plan: Plan) -> Target:
    """Return a nominal target as the share of the layers with routers; work is counted over all layers anyway."""
    routed = _num_routed(plan)
    if not routed:
        raise ConfigError(f"dense_layers leaves none of {len(plan.layers)} layers to skip; choose fewer")
    if target.match != "nominal":
        return target
    share = target.sparsity * len(plan.layers) / routed
    if share >= 1.0:
        raise ConfigError(
            f"sparsity {target.sparsity} of all layers cannot be reached by skipping {routed} of {len(plan.layers)}; "
            f"stay below {routed / len(plan.layers):.4f}, or choose fewer dense_layers"
        )
    return dataclasses.replace(target, sparsity=share)


METHOD = Method(
    name="dllm",
    kind="dynamic",
    summary="each token executes or skips whole layers, by one router for both halves",
    source="Jiang et al., D-LLM, NeurIPS 2024; layer_skip of the WIDE paper",
    settings=DLLMConfig,
    train=train,
)
ORIGINAL = Method(
    name="dllm-original",
    kind="dynamic",
    summary="each token executes or skips whole layers, with D-LLM's own routers, eviction and protected tokens",
    source="Jiang et al., D-LLM, NeurIPS 2024; github.com/Jyk-122/D-LLM",
    settings=DLLMOriginalConfig,
    train=train_original,
)
