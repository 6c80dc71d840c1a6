"""How much calibration text each method of a comparison reads."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from wide.config import StageConfig
from wide.errors import ConfigError

# The setting that says how much a method reads, the first one that it has.
_SIZES = ("steps", "num_masks", "num_windows")


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Calibration text of all rows.

    Args:
        budget: 'original' reads what each method's settings say, which by default is what its authors read; 'equal'
            gives every method as many tokens of text as the training of routers reads (train.steps x batch_size x
            sequence_length), or the whole text where that is less. How often a method reads its text is its own.
        budget_scale: Factor on that amount, for all methods alike.
    """

    budget: Literal["original", "equal"] = "original"
    budget_scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a factor that leaves nothing."""
        if not self.budget_scale > 0:
            raise ConfigError(f"budget_scale must be positive, got {self.budget_scale}; 1 changes nothing")

    def of_training(self, stage: StageConfig) -> StageConfig:
        """Return the training of routers, scaled."""
        return replace(stage, steps=_scaled(stage.steps, self.budget_scale))

    def of_method(self, settings: Any, stage: StageConfig, num_tokens: int) -> Any:
        """Return a method's settings with this budget.

        Args:
            settings: Of the method.
            stage: The training of routers, not scaled.
            num_tokens: Tokens of the whole text.
        """
        names = {field.name for field in fields(settings)}
        if self.budget == "equal":
            wanted = int(min(self.budget_scale * stage.steps * stage.batch_size * stage.sequence_length, num_tokens))
            return _with_tokens(settings, names, wanted, stage.sequence_length)
        name = next((size for size in _SIZES if size in names), None)
        if name is None:
            return settings
        changed = replace(settings, **{name: _scaled(getattr(settings, name), self.budget_scale)})
        if "stage_tokens" not in names:
            return changed
        return replace(changed, stage_tokens=tuple(_scaled(n, self.budget_scale) for n in settings.stage_tokens))


def _with_tokens(settings: Any, names: set[str], tokens: int, block_length: int) -> Any:
    """Return settings under which a method reads so many tokens of text once."""
    if "steps" in names:
        length = settings.sequence_length or block_length
        return replace(settings, steps=max(1, tokens // (settings.batch_size * length)))
    if "num_windows" in names:
        return replace(settings, num_windows=max(1, tokens // settings.window_length))
    return settings


def _scaled(size: int, factor: float) -> int:
    return max(1, round(size * factor))
