"""Everything that one `wide compare` is told."""

from dataclasses import dataclass
from typing import Any

from wide.cli.budget import Budget
from wide.cli.grid import GridOptions
from wide.cli.options import EvalOptions, RunOptions
from wide.config import ObjectiveConfig, RecoverConfig, StageConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredTasks:
    """Tasks on which every model of a comparison is evaluated.

    Args:
        tasks: Tasks of lm-evaluation-harness, separated by commas: wikitext, arc_easy, arc_challenge, boolq,
            winogrande, piqa, openbookqa, hellaswag; empty leaves them out.
        local_data: Folder with copies of the tasks' data; null loads them from the Hugging Face hub.
        limit: Items of each task; null means all.
    """

    tasks: str = ""
    local_data: str | None = None
    limit: int | None = None

    @property
    def names(self) -> list[str]:
        """The tasks by name."""
        return [name.strip() for name in self.tasks.split(",") if name.strip()]


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
