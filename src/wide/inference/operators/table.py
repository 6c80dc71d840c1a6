"""Which operator runs, and how, at which number of tokens."""

from dataclasses import dataclass, field, replace
from typing import Literal

from wide.errors import ConfigError
from wide.kernels.gemv.op import MAX_ROWS
from wide.kernels.linear_int8 import op as linear_int8
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

    Raises ConfigError if `rules` name an unknown operator.

    Args:
        backend: Of the operators that nothing is chosen for (norms, routers, sorts, steps): 'triton' or 'torch'.
        cache: Whether attention over a cache skips: inactive pairs read no keys.
        rules: (operator, ((tokens, choice), ...)) by ascending tokens; each choice holds from its number of tokens on.
            An operator without rules is dense.
    """

    backend: str = "triton"
    cache: bool = True
    rules: tuple[tuple[str, Rules], ...] = ()
    # The rules by operator: every layer of every forward looks some up.
    _by_name: dict[str, Rules] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", dict(self.rules))
        unknown = set(self._by_name) - set(OPERATORS)
        if unknown:
            raise ConfigError(f"the table names {sorted(unknown)}; choose from {list(OPERATORS)}")

    @classmethod
    def fixed(cls, backend: str = "triton") -> "OperatorTable":
        """Return a table that asks no measurements, with one backend for all operators.

        Products skip for 1 to 4 tokens and from 512 on, down for few alone; attention over a prompt skips from 256 on.
        """
        sparse = Choice(backend=backend)
        few: Rules = ((1, sparse), (MAX_ROWS + 1, DENSE))
        many = (*few, (512, sparse))
        rules = {"query": many, "attention": ((256, sparse),), "output": many, "gate_up": many, "down": few}
        return cls(backend=backend, rules=tuple(rules.items()))

    def for_int8_rows(self) -> "OperatorTable":
        """Return the table where rows are quantised: as few as are not skip nothing, but for the fewest."""
        first, last = MAX_ROWS + 1, linear_int8.MAX_WHOLE_ROWS
        rules = []
        for name, old in self.rules:
            few = tuple(rule for rule in old if rule[0] < first)
            many = tuple(rule for rule in old if rule[0] > last + 1)
            between = ((first, DENSE), (last + 1, self.choice(name, last + 1)))  # type: ignore[arg-type]
            rules.append((name, old if name in ("query", "attention") else (*few, *between, *many)))
        return replace(self, rules=tuple(rules))

    def how(self, name: OperatorName, rows: int) -> How:
        """Return how an operator runs: 'few' or 'many' tokens' sparse form, or 'dense'."""
        if self.choice(name, rows).backend == "dense":
            return "dense"
        return "few" if rows <= MAX_ROWS and name != "attention" else "many"

    def choice(self, name: OperatorName, rows: int) -> Choice:
        """Return what an operator runs; `DENSE` where it does not skip."""
        found = DENSE
        for start, choice in self._by_name.get(name, ()):
            if rows >= start:
                found = choice
        return found


DENSE_TABLE = OperatorTable(backend="torch", cache=False)
"""By which nothing skips: dense products, and zeros in skipped places."""
