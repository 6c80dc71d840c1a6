"""Layer skipping in D-LLM's manner: each token executes or skips whole layers, one router for both sublayers.

'dllm' is as the WIDE paper's comparison most probably runs it: routers alone, no eviction of keys and values, no
protected layers or tokens. 'dllm-original' has its authors' MLP routers, eviction, dense first layers and first tokens.
Both are steered by a penalty on the mean skip rate.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from wide.errors import ConfigError
from wide.grouping import Grouping
from wide.methods.catalogue import DLLMConfig, DLLMOriginalConfig
from wide.methods.method import Target, dense_plan
from wide.methods.routed import Routing
from wide.models.block_spec import BlockSpec, feed_forward
from wide.plan import Following, LayerPlan, Plan, Routed


def route(specs: Sequence[BlockSpec], settings: DLLMConfig, asked: Routing) -> Routing:
    """Return one bottleneck router a layer, on its input; raises UnsupportedModelError if an FFN cannot be routed."""
    stage = asked.stage
    return dataclasses.replace(
        asked,
        config=Plan(tuple(_layer(spec, rank=settings.router_rank) for spec in specs)),
        deviations=(
            f"routers are linear bottlenecks of rank {settings.router_rank}, the original's are MLPs of width 512",
            "routers are trained alone, the original trains LoRA with them",
            "keys and values of skipping tokens stay visible, the original evicts them",
            "no layer and no token is protected, the original protects the first two of each",
            "the penalty is on the mean skip rate, the original's on that of every token",
            f"the temperature falls from {stage.temperature_start:g} to {stage.temperature_end:g}, the original's is 1",
        ),
    )


def route_original(specs: Sequence[BlockSpec], settings: DLLMOriginalConfig, asked: Routing) -> Routing:
    """Return one MLP router a layer behind the first ones; what skipping tokens would leave in the cache is evicted.

    A nominal target counts the dense first layers, too, as the original does. Steps, sizes and learning rate stay those
    that are asked for. Raises ConfigError if the layers that have routers cannot skip as much, and
    UnsupportedModelError if an FFN cannot be routed.
    """
    protected = settings.dense_layers
    own: dict[str, Any] = {"form": "dllm", "evicts": True, "first_tokens": settings.first_tokens}
    behind = tuple(_layer(spec, rank=settings.router_rank, **own) for spec in specs[protected:])
    plan = Plan((*dense_plan(len(specs[:protected])).layers, *behind))
    for spec in specs:
        feed_forward(spec)
    heat = settings.temperature
    return dataclasses.replace(
        asked,
        config=plan,
        target=_target_of_routed_layers(asked.target, plan),
        stage=dataclasses.replace(asked.stage, temperature_start=heat, temperature_end=heat),
        deviations=(
            "routers are trained before LoRA, the original trains both together",
            "LoRA has the recipe of all rows, its temperatures included; the original's temperature is 1 throughout",
            f"the penalty is on the mean skip rate with a weight of {asked.objective.weight:g} throughout; the "
            "original's on that of every token with a weight that rises from 0 to 5",
            "steps, sizes and learning rate are those of all rows; the original's are 10 epochs of its task at 9e-3 x "
            "batch size / 256",
            "inference routes by margin; the original's threshold is a probability of one half",
            f"rates are means over the {_num_routed(plan)} of {len(specs)} layers that have routers; a nominal target "
            "counts all layers",
        ),
    )


def _layer(spec: BlockSpec, **router: Any) -> LayerPlan:
    feed_forward(spec)
    whole = Grouping.whole(spec.attention.query_width)
    return LayerPlan(attention=Routed(grouping=whole, router_input="layer_input", bias=True, **router), ffn=Following())


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
