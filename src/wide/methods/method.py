"""What a method of the benchmark receives and returns; one decision, made in place."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, nn

from wide.data.batches import TokenBlocks
from wide.errors import ConfigError
from wide.method_config import Match
from wide.plan import Plan

Kind = Literal["dense", "depth", "width", "stream", "unstructured", "dynamic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """How much is to be pruned.

    Args:
        sparsity: Wanted share, in [0, 1).
        match: 'nominal' counts as each method's paper does (layers, heads and channels, slicing fraction, skipped
            groups); 'linear_flops' counts the matrix-product work of all decoder layers, K and V included, the
            output head not.

    Raises:
        ConfigError: If the share is out of its range.
    """

    sparsity: float
    match: Match = "nominal"

    def __post_init__(self) -> None:
        """Refuse what no method can reach."""
        if not 0.0 <= self.sparsity < 1.0:
            raise ConfigError(f"sparsity must lie in [0, 1), got {self.sparsity}; 0.5 prunes half")
        if self.match not in get_args(Match):
            raise ConfigError(f"match must be 'nominal' or 'linear_flops', got {self.match!r}")


@dataclass(slots=True)
class Effort:
    """What a method consumed.

    Args:
        tokens_forward: Calibration tokens through a forward only.
        tokens_backward: Calibration tokens through a forward with backward.
        seconds_before: Wall clock of the earlier parts of a resumed training, which whoever called the last part has
            not seen.
    """

    tokens_forward: int = 0
    tokens_backward: int = 0
    seconds_before: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What a static method decided; nothing of it is attached yet.

    Args:
        plan: What each half-layer runs.
        tensors: Values of the plan by the names that `wide.plan` gives them, float32 on the CPU.
        weights: Base parameters to replace, by their name in the model's state dict, in any float dtype.
        effort: Calibration text consumed.
        notes: JSON-ready facts for the report: scores, the order of removal, levels chosen.
        deviations: Where this differs from the method's original, a sentence each.
    """

    plan: Plan
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    effort: Effort = field(default_factory=Effort)
    notes: Mapping[str, Any] = field(default_factory=dict)
    deviations: tuple[str, ...] = ()


Decide = Callable[[nn.Module, TokenBlocks, Target, Any], Decision]
"""(model, packed calibration text, target, the method's settings) -> what to do. The model is left as it was found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A row of the benchmark's table.

    Args:
        name: As on the command line.
        kind: What it removes.
        summary: One line for `wide methods`.
        source: Paper or repository.
        settings: The frozen dataclass of `wide.method_config` with the method's options, defaults as the original's.
        decide: For methods that decide once: returns a `Decision`, which the caller attaches.
        train: For methods that train routers: attaches and trains in place and returns the effort and the deviations.
    """

    name: str
    kind: Kind
    summary: str
    source: str
    settings: type[Any]
    decide: Decide | None = None
    train: Callable[..., tuple[Effort, tuple[str, ...]]] | None = None

    def default_settings(self) -> Any:
        """Return the method's settings with the original's values."""
        assert dataclasses.is_dataclass(self.settings)
        return self.settings()
