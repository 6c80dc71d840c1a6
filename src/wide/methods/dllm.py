"""Layer skipping in D-LLM's manner: each token executes or skips whole layers, one router for both halves.

As the WIDE paper's comparison most probably runs it: routers alone, no eviction of keys and values, no protected layers
or tokens, and a penalty on the mean skip rate. Written over the machinery of this package.
"""

from pathlib import Path

from torch import nn

from wide.config import ObjectiveConfig, StageConfig
from wide.data.batches import TokenBlocks
from wide.grouping import Grouping
from wide.method_config import DLLMConfig
from wide.methods.linear_work import feed_forward
from wide.methods.method import Effort, Method, Target
from wide.methods.routed import train_routers
from wide.models.block_spec import BlockSpec
from wide.models.discovery import discover
from wide.plan import Following, LayerPlan, Plan, Routed


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


METHOD = Method(
    name="dllm",
    kind="dynamic",
    summary="each token executes or skips whole layers, by one router for both halves",
    source="Jiang et al., D-LLM, NeurIPS 2024; layer_skip of the WIDE paper",
    settings=DLLMConfig,
    train=train,
)
