"""LoRA on top of any row of the benchmark, by one recipe: stage 2 of the paper."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from wide.config import ObjectiveConfig, RecoverConfig
from wide.data.batches import TokenBlocks
from wide.models.attach import attachment
from wide.training.stages import recover

PROVENANCE = "recover"
"""Key of the facts about the stage in an attachment's provenance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryReport:
    """What LoRA cost.

    Args:
        tokens_backward: Tokens through a forward with backward.
        seconds: Wall clock of the training.
        seed: Of the stage.
    """

    tokens_backward: int
    seconds: float
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


def recover_row(
    model: nn.Module,
    blocks: TokenBlocks,
    stage: RecoverConfig,
    *,
    output: Path | None = None,
    resume: bool = False,
    seed: int,
) -> RecoveryReport:
    """Train LoRA on an attached model; routers, where it has any, go on training toward the target of stage 1.

    What a static method pruned stays pruned.

    Args:
        model: A model after `apply` or `wide.load`, trained in place; all-dense plans are welcome.
        blocks: Training text.
        stage: The recipe, the same for all rows of a table.
        output: Folder for checkpoints, metrics and the adapter.
        resume: Continue from the newest checkpoint in `output`.
        seed: Of everything random; the one in `stage` does not count.

    Raises:
        NotAttachedError: If nothing is attached.
        MissingExtraError: If PEFT is not installed.
        TrainingError: If the loss is not finite.
    """
    stage = replace(stage, seed=seed)
    provenance = attachment(model).provenance
    # Routers record what they were trained to minimise; without routers there is nothing to steer.
    objective = None if "prune" in provenance else ObjectiveConfig(sparsity=0.0, weight=0.0)
    recover(model, blocks, objective=objective, stage=stage, output=output, resume=resume)
    facts = attachment(model).provenance[PROVENANCE]
    return RecoveryReport(tokens_backward=int(facts["tokens"]), seconds=float(facts["seconds"]), seed=seed)
