"""Which operator runs, and how, at which number of tokens."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from wide.errors import ConfigError
from wide.kernels.gemv import MAX_ROWS
from wide.kernels.tuning import Choice

OperatorName = Literal["query", "attention", "output", "gate_up", "down"]
OPERATORS: tuple[OperatorName, ...] = ("query", "attention", "output", "gate_up", "down")
How = Literal["few", "many", "dense"]
Rules = tuple[tuple[int, Choice], ...]
DENSE = Choice(backend="dense")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTable:
    """For each prunable operator, where skipping pays; elsewhere the dense product runs and skipped values become 0.

    Args:
        backend: Of wide's operators: 'triton' or 'torch'.
        query: Tokens of a forward from which the query projection gathers; None = always dense.
        attention: Tokens of a sequence from which prefill attention gathers; None = always dense.
        output: As `query`, for the output projection.
        gate_up: As `query`, for gate, up and activation.
        down: As `query`, for the down projection.
        few: Operators that skip weights when a forward has 1 to 4 tokens.
        cache: Whether attention over a cache skips: inactive pairs read no keys.
        rules: (operator, ((tokens, choice), ...)) by ascending tokens; each choice holds from its number of tokens on
            and replaces what the fields above say of that operator.

    Raises:
        ConfigError: If `few` or `rules` name an unknown operator.
    """

    backend: str = "triton"
    query: int | None = 512
    attention: int | None = 256
    output: int | None = 512
    gate_up: int | None = 512
    down: int | None = None
    few: tuple[str, ...] = ("query", "output", "gate_up", "down")
    cache: bool = True
    rules: tuple[tuple[str, Rules], ...] = ()

    def __post_init__(self) -> None:
        """Refuse names that are no operators."""
        unknown = {*self.few, *(name for name, _ in self.rules)} - set(OPERATORS)
        if unknown:
            raise ConfigError(f"the table names {sorted(unknown)}; choose from {list(OPERATORS)}")

    def how(self, name: OperatorName, rows: int) -> How:
        """Return how an operator runs: 'few' or 'many' tokens' sparse form, or 'dense'."""
        few = rows <= MAX_ROWS and name != "attention"
        rules = self._rules(name)
        if rules is not None:
            skips = _last(rules, rows).backend != "dense"
        elif few:
            skips = name in self.few
        else:
            start: int | None = getattr(self, name)
            skips = start is not None and rows >= start
        if not skips:
            return "dense"
        return "few" if few else "many"

    def choice(self, name: OperatorName, rows: int) -> Choice:
        """Return the measured choice of an operator; without one, the operator's own defaults."""
        rules = self._rules(name)
        return Choice(backend=self.backend) if rules is None else _last(rules, rows)

    def with_rules(self, name: OperatorName, rules: Rules) -> "OperatorTable":
        """Return a table with other rules for one operator."""
        kept = tuple(entry for entry in self.rules if entry[0] != name)
        return dataclasses.replace(self, rules=(*kept, (name, rules)))

    def without(self, name: OperatorName, *, few: bool) -> "OperatorTable":
        """Return a table in which one operator is dense for few tokens, or for many."""
        rules = self._rules(name)
        if rules is not None:
            kept = tuple(rule for rule in rules if (rule[0] <= MAX_ROWS) != few)
            first = (1, DENSE) if few else (MAX_ROWS + 1, DENSE)
            return self.with_rules(name, tuple(sorted((*kept, first), key=lambda rule: rule[0])))
        if few:
            return dataclasses.replace(self, few=tuple(n for n in self.few if n != name))
        changes: dict[str, Any] = {name: None}
        return dataclasses.replace(self, **changes)

    def with_many(self, name: OperatorName, choice: Choice) -> "OperatorTable":
        """Return a table in which one operator runs as chosen for many tokens, for few as before."""
        first = Choice(backend=self.backend) if name in self.few else DENSE
        rules = self._rules(name) or ((1, first),)
        kept = tuple(rule for rule in rules if rule[0] <= MAX_ROWS)
        return self.with_rules(name, (*kept, (MAX_ROWS + 1, choice)))

    def _rules(self, name: str) -> Rules | None:
        for known, rules in self.rules:
            if known == name:
                return rules
        return None


def _last(rules: Rules, rows: int) -> Choice:
    found = DENSE
    for start, choice in rules:
        if rows >= start:
            found = choice
    return found
