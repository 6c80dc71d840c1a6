"""The row 'wide': a router per half-layer decides per token which channel groups execute."""

from pathlib import Path

from torch import nn

from wide.config import ObjectiveConfig, StageConfig
from wide.data.batches import TokenBlocks
from wide.method_config import WideMethodConfig
from wide.methods.method import Effort, Method, Target
from wide.methods.routed import train_routers


def train(
    model: nn.Module,
    blocks: TokenBlocks,
    target: Target,
    settings: WideMethodConfig,
    *,
    stage: StageConfig,
    objective: ObjectiveConfig,
    output: str | Path | None = None,
    resume: bool = False,
) -> tuple[Effort, tuple[str, ...]]:
    """Train the routers, see `train_routers`."""
    return train_routers(
        model,
        settings,
        blocks,
        target,
        stage=stage,
        objective=objective,
        output=output,
        resume=resume,
        uniform=settings.uniform,
        calibrate_threshold=settings.calibrate_threshold,
    )


METHOD = Method(
    name="wide",
    kind="dynamic",
    summary="each token chooses which groups of heads and of FFN channels it executes",
    source="WIDE, sections 3.1 and 3.2",
    settings=WideMethodConfig,
    train=train,
)
