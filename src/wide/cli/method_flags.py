"""The settings of methods as flags, for every command that runs methods."""

from collections.abc import Collection, Sequence

from wide.cli.arguments import Arguments
from wide.methods.catalogue import get, names


def add_method_flags(
    flags: Arguments, methods: Sequence[str], *, asked_by: str, only_in_files: Collection[str] = ()
) -> None:
    """Add the settings of methods as flags, prefixed by the method's name, and refuse those of all others.

    The seed is not among them: it is the run's.

    Args:
        flags: Of a command.
        methods: The methods that run.
        asked_by: The words of the command line that name them, for the message.
        only_in_files: Methods that do not run, whose settings may stand in configuration files all the same.
    """
    for name in names():
        if name in methods or name in only_in_files:
            flags.add_fields(get(name).settings, prefix=name, skip=("seed",))
        if name not in methods:
            reason = f"is a flag of method {name}, and the command runs {asked_by}"
            flags.refuse([name], reason, even_known=name in only_in_files)
