"""Which operator runs sparse at which number of tokens."""

from dataclasses import dataclass
from typing import Literal

from wide.errors import ConfigError
from wide.kernels.gemv import MAX_ROWS

OperatorName = Literal["query", "attention", "output", "gate_up", "down"]
OPERATORS: tuple[OperatorName, ...] = ("query", "attention", "output", "gate_up", "down")
How = Literal["few", "many", "dense"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTable:
    """For each prunable operator, where skipping pays; elsewhere the dense product runs and skipped values become 0.

    Attention over a cache always skips: inactive pairs read no keys.

    Args:
        backend: Of wide's operators: 'triton' or 'torch'.
        query: Tokens of a forward from which the query projection gathers; None = always dense.
        attention: Tokens of a sequence from which prefill attention gathers; None = always dense.
        output: As `query`, for the output projection.
        gate_up: As `query`, for gate, up and activation.
        down: As `query`, for the down projection.
        few: Operators that skip weights when a forward has 1 to 4 tokens.

    Raises:
        ConfigError: If `few` names an unknown operator.
    """

    backend: str = "triton"
    query: int | None = 512
    attention: int | None = 256
    output: int | None = 512
    gate_up: int | None = 512
    down: int | None = None
    few: tuple[str, ...] = ("query", "output", "gate_up", "down")

    def __post_init__(self) -> None:
        """Refuse names that are no operators."""
        unknown = set(self.few) - set(OPERATORS)
        if unknown:
            raise ConfigError(f"few names {sorted(unknown)}; choose from {list(OPERATORS)}")

    def how(self, name: OperatorName, rows: int) -> How:
        """Return how an operator runs: 'few' or 'many' tokens' sparse form, or 'dense'."""
        if rows <= MAX_ROWS and name != "attention":
            return "few" if name in self.few else "dense"
        start: int | None = getattr(self, name)
        return "many" if start is not None and rows >= start else "dense"
