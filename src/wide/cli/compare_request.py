"""Everything that one `wide compare` is told."""

from dataclasses import dataclass
from typing import Any

from wide.cli.budget import Budget
from wide.cli.grid import GridOptions
from wide.cli.options import EvalOptions, RunOptions, ScoredTasks
from wide.config import ObjectiveConfig, RecoverConfig, StageConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest:
    """Everything that one `wide compare` does.

    Args:
        run: Model, data, output.
        grid: What is compared.
        budget: Calibration text of all methods.
        settings: Of every method, the dense model included, by name.
        objective: Loss of methods that train routers.
        stage: Training of routers; its sequence length packs the calibration text of all methods.
        recover: LoRA for all rows; None leaves it out.
        scoring: Evaluation on held-out text.
        tasks: Evaluation on tasks.
    """

    run: RunOptions
    grid: GridOptions
    budget: Budget
    settings: dict[str, Any]
    objective: ObjectiveConfig
    stage: StageConfig
    recover: RecoverConfig | None
    scoring: EvalOptions
    tasks: ScoredTasks
