"""`wide methods`: the methods of the benchmark, what they remove, and where they come from."""

from collections.abc import Sequence

from wide.errors import UsageError
from wide.methods.catalogue import get, names
from wide.runs.process import say

USAGE = """usage: wide methods          names, what is removed, summary, source

Run one with: wide prune --method NAME, several with: wide compare --methods NAME,NAME
wide prune --method NAME --help lists its settings."""


def run(arguments: Sequence[str]) -> None:
    if list(arguments) not in ([], ["list"]):
        raise UsageError(f"cannot understand: wide methods {' '.join(arguments)}\n{USAGE}")
    methods = [get(name) for name in names()]
    widths = [max(len(text) for text in texts) for texts in zip(*((m.name, m.kind) for m in methods), strict=True)]
    for method in methods:
        say(f"{method.name:<{widths[0]}}  {method.kind:<{widths[1]}}  {method.summary}")
        say(f"{'':<{sum(widths) + 4}}{method.source}")
