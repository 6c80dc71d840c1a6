"""SkipGPT: each token executes or skips the attention and the FFN of every layer; keys and values are never skipped.

Two rows: `METHOD` as the WIDE paper runs it, with its own routers and schedule, and `ORIGINAL` as its authors released
it. Written over the machinery of this package; no code of either is used.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from wide.config import ObjectiveConfig, StageConfig
from wide.data.batches import TokenBlocks
from wide.grouping import Grouping
from wide.method_config import SkipGPTConfig, SkipGPTOriginalConfig
from wide.methods.method import Effort, Method, Target
from wide.methods.routed import train_routers
from wide.models.block_spec import BlockSpec
from wide.models.discovery import discover
from wide.plan import Dense, Half, LayerPlan, Plan, Routed, RouterForm, RouterInput

_DEFAULT_RANK_SHARE = 4


def train(
    model: nn.Module,
    blocks: TokenBlocks,
    target: Target,
    settings: SkipGPTConfig,
    *,
    stage: StageConfig,
    objective: ObjectiveConfig,
    output: str | Path | None = None,
    resume: bool = False,
) -> tuple[Effort, tuple[str, ...]]:
    """Train the row of the WIDE paper: bottleneck routers on the residual stream each half reads."""
    plan = half_layer_plan(discover(model), rank=settings.router_rank, router_input="residual", form="bottleneck")
    effort, found = train_routers(
        model,
        plan,
        blocks,
        target,
        stage=stage,
        objective=objective,
        output=output,
        resume=resume,
        uniform=settings.uniform,
        calibrate_threshold=settings.calibrate_threshold,
    )
    return effort, (
        f"routers are linear bottlenecks of rank {settings.router_rank}, the original's are MLPs",
        "the FFN's router reads the stream after the attention, the original's the stream before it",
        f"the temperature ends at {stage.temperature_end:g}, the original's at 1",
        "inference routes by margin, the original samples",
        *found,
    )


def train_original(
    model: nn.Module,
    blocks: TokenBlocks,
    target: Target,
    settings: SkipGPTOriginalConfig,
    *,
    stage: StageConfig,
    objective: ObjectiveConfig,
    output: str | Path | None = None,
    resume: bool = False,
) -> tuple[Effort, tuple[str, ...]]:
    """Train the authors' row: MLP routers, both of a layer on its input, with their temperatures and weight.

    Steps, sizes and learning rate stay those of `stage`.
    """
    specs = discover(model)
    plan = half_layer_plan(
        specs,
        rank=settings.router_rank or max(specs[0].hidden_size // _DEFAULT_RANK_SHARE, 1),
        router_input="layer_input",
        form=settings.router_form,
    )
    effort, found = train_routers(
        model,
        plan,
        blocks,
        target,
        stage=dataclasses.replace(
            stage, temperature_start=settings.temperature_start, temperature_end=settings.temperature_end
        ),
        objective=dataclasses.replace(objective, weight=settings.weight),
        output=output,
        resume=resume,
        calibrate_threshold=settings.calibrate_threshold,
    )
    return effort, (
        "inference routes by margin, the original samples at temperature 1",
        "padding is left out of the skip rate, the original counts it",
        *found,
    )


def half_layer_plan(specs: Sequence[BlockSpec], *, rank: int, router_input: RouterInput, form: RouterForm) -> Plan:
    """Return the plan in which every half-layer is one group with a router of its own.

    Args:
        specs: Parts of the decoder layers; an FFN that cannot be routed stays dense.
        rank: Width of the routers.
        router_input: What both routers of a layer read.
        form: What the routers are made of; all have a bias.
    """

    def routed(width: int) -> Half:
        return Routed(grouping=Grouping.whole(width), rank=rank, router_input=router_input, bias=True, form=form)

    return Plan(
        tuple(
            LayerPlan(
                attention=routed(spec.attention.query_width),
                ffn=Dense() if spec.ffn is None else routed(spec.ffn.width),
            )
            for spec in specs
        )
    )


METHOD = Method(
    name="skipgpt",
    kind="dynamic",
    summary="each token executes or skips whole half-layers, as the WIDE paper runs SkipGPT",
    source="Zhao et al., SkipGPT: Each Token is One of a Kind, ICML 2025; token routers of the WIDE paper",
    settings=SkipGPTConfig,
    train=train,
)
ORIGINAL = Method(
    name="skipgpt-original",
    kind="dynamic",
    summary="each token executes or skips whole half-layers, with SkipGPT's own routers and schedule",
    source="Zhao et al., SkipGPT: Each Token is One of a Kind, ICML 2025; github.com/EIT-NLP/SkipGPT",
    settings=SkipGPTOriginalConfig,
    train=train_original,
)
