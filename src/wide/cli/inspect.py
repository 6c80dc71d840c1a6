"""`wide inspect`: what a model can be pruned to, or what an adapter holds; neither loads weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from wide.cli.arguments import Arguments, build
from wide.cli.console import say
from wide.cli.usage import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectOptions:
    """What to look at.

    Args:
        model: Hub name or local folder of a base model; only its configuration is read.
        adapter: Folder of an adapter, or of a run that holds one.
    """

    model: str | None = None
    adapter: str | None = None


def arguments() -> Arguments:
    """Return the flags of the command."""
    flags = Arguments("inspect", "Say what a model can be pruned to (or why not), or what an adapter holds.")
    flags.add_fields(InspectOptions)
    return flags


def run(given: Sequence[str]) -> None:
    """Carry out the command.

    Raises:
        UsageError: If neither or both are named.
        UnsupportedModelError: If the model cannot be routed, with the reason.
    """
    options = build(InspectOptions, arguments().parse(given))
    if (options.model is None) == (options.adapter is None):
        raise UsageError("name either --model or --adapter")
    if options.adapter is not None:
        from wide.cli.describe_adapter import describe_adapter
        from wide.cli.loading import find_adapter

        say(describe_adapter(find_adapter(options.adapter)))
        return
    from wide.cli.describe_model import describe_model

    assert options.model is not None
    say(describe_model(options.model))
