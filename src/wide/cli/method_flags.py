"""The settings of methods as flags, for every command that runs methods."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from wide.cli.arguments import Arguments, build
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


def settings_of(method: str, values: Mapping[str, Any], **changes: Any) -> Any:
    """Return the settings of a method from parsed values.

    Args:
        method: Its name.
        values: All values, groups as nested dictionaries.
        changes: Values that win.

    Raises:
        ConfigError: If a value is out of its range.
    """
    return build(get(method).settings, values, group=method, **changes)


def typed_settings(method: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a method as they are read from YAML, checked and converted as flags are.

    Raises:
        UsageError: If a value has a wrong type.
    """
    flags = Arguments("compare", "The settings of a variant.")
    flags.add_fields(get(method).settings, prefix=method, only=tuple(changes) or ("",))
    words = [
        f"--{method}.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()
    ]
    found: dict[str, Any] = flags.parse(words).get(method.replace("-", "_"), {})
    return found
