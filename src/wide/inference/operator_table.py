"""Which operator runs, and how, at which number of tokens."""

from dataclasses import dataclass
from typing import Literal

from wide.errors import ConfigError
from wide.kernels.gemv import MAX_ROWS
from wide.kernels.tuning import Choice

OperatorName = Literal["query", "attention", "output", "gate_up", "down"]
OPERATORS: tuple[OperatorName, ...] = ("query", "attention", "output", "gate_up", "down")
SUMS = ("output", "down")
"""Operators whose inputs are grouped; of the other products outputs are."""
How = Literal["few", "many", "dense"]
Rules = tuple[tuple[int, Choice], ...]
DENSE = Choice(backend="dense")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTable:
    """For each prunable operator, where skipping pays; elsewhere the dense product runs and skipped values become 0.

    Args:
        backend: Of the operators that nothing is chosen for (norms, routers, sorts, steps): 'triton' or 'torch'.
        cache: Whether attention over a cache skips: inactive pairs read no keys.
        rules: (operator, ((tokens, choice), ...)) by ascending tokens; each choice holds from its number of tokens on.
            An operator without rules is dense.

    Raises:
        ConfigError: If `rules` name an unknown operator.
    """

    backend: str = "triton"
    cache: bool = True
    rules: tuple[tuple[str, Rules], ...] = ()

    def __post_init__(self) -> None:
        """Refuse names that are no operators."""
        unknown = {name for name, _ in self.rules} - set(OPERATORS)
        if unknown:
            raise ConfigError(f"the table names {sorted(unknown)}; choose from {list(OPERATORS)}")

    @classmethod
    def fixed(
        cls,
        backend: str = "triton",
        *,
        query: int | None = 512,
        attention: int | None = 256,
        output: int | None = 512,
        gate_up: int | None = 512,
        down: int | None = None,
        few: tuple[str, ...] = ("query", "output", "gate_up", "down"),
    ) -> "OperatorTable":
        """Return a table that asks no measurements.

        Args:
            backend: Of all operators.
            query: Tokens of a forward from which the query projection gathers; None = always dense.
            attention: Tokens of a sequence from which prefill attention gathers; None = always dense.
            output: As `query`, for the output projection.
            gate_up: As `query`, for gate, up and activation.
            down: As `query`, for the down projection.
            few: Operators that skip weights when a forward has 1 to 4 tokens.

        Raises:
            ConfigError: If `few` names an unknown operator.
        """
        sparse, most = Choice(backend=backend), MAX_ROWS + 1
        starts = {"query": query, "attention": attention, "output": output, "gate_up": gate_up, "down": down}
        rules = []
        for name in dict.fromkeys((*starts, *few)):
            start, is_prompt = starts.get(name), name == "attention"
            found = [(1, sparse), (most, DENSE)] if name in few and not is_prompt else []
            if start is not None:
                found.append((start if is_prompt else max(start, most), sparse))
            rules.append((name, tuple(found)))
        return cls(backend=backend, rules=tuple(rules))

    def how(self, name: OperatorName, rows: int) -> How:
        """Return how an operator runs: 'few' or 'many' tokens' sparse form, or 'dense'."""
        if self.choice(name, rows).backend == "dense":
            return "dense"
        return "few" if rows <= MAX_ROWS and name != "attention" else "many"

    def choice(self, name: OperatorName, rows: int) -> Choice:
        """Return what an operator runs; `DENSE` where it does not skip."""
        found = DENSE
        for start, choice in dict(self.rules).get(name, ()):
            if rows >= start:
                found = choice
        return found
