"""The methods' settings as flags; nothing heavy is imported."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_args

from wide.cli.arguments import Arguments, build
from wide.cli.usage import UsageError
from wide.methods.catalogue import Match, get, names

SETTINGS: Mapping[str, type[Any]] = {name: get(name).settings for name in names()}
"""The settings of each method by its name."""
TRAINED = tuple(name for name in names() if get(name).trains)
"""Methods that train routers, to which the flags of stage 1 apply."""
VARIANT_KEYS = ("method", "match")
"""What a variant may say beside settings of its method."""
OBJECTIVE = ("weight", "distillation", "ramp", "smoothing")
"""What of the objective can be set for every method that trains routers; the target says the rest."""


def check_method(name: str) -> str:
    """Return the name of a method.

    Raises:
        UsageError: If there is none of this name; the message names the nearest.
    """
    if name not in SETTINGS:
        close = get_close_matches(name, SETTINGS, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise UsageError(f"there is no method {name!r}{hint} Methods (wide methods): {', '.join(SETTINGS)}")
    return name


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
    for name, settings in SETTINGS.items():
        if name in methods or name in only_in_files:
            flags.add_fields(settings, prefix=name, skip=("seed",))
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
    return build(SETTINGS[method], values, group=method, **changes)


def check_variants(variants: Mapping[str, Any]) -> None:
    """Refuse variants that name no method that prunes, or have the name of a method.

    Args:
        variants: By name, a mapping with the key 'method', perhaps 'match', and the settings in which the variant
            differs.

    Raises:
        UsageError: If a name, a method or a setting is not one.
    """
    for name, entry in variants.items():
        where = f"variants: {name}"
        if name in SETTINGS or name == "all" or not re.fullmatch(r"[A-Za-z0-9][\w.=+-]*", name):
            raise UsageError(f"{where}: a variant needs a name of its own, of letters, digits and . = + - _")
        if not isinstance(entry, Mapping) or not isinstance(entry.get("method"), str):
            raise UsageError(f"{where} must be a mapping with the key 'method', got {entry!r}")
        if entry["method"] == "dense":
            raise UsageError(f"{where}: the dense model has no variants; it is in every comparison, under its own name")
        if entry.get("match", "nominal") not in get_args(Match):
            raise UsageError(f"{where}: match must be one of {', '.join(get_args(Match))}, got {entry['match']!r}")
        known = _own_settings(entry["method"], where)
        for key in entry:
            if key not in VARIANT_KEYS and key not in known:
                close = get_close_matches(str(key), known, n=1, cutoff=0.4)
                hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(known) or 'none'}"
                raise UsageError(f"{where}: method {entry['method']} has no setting {key!r}{hint}")


def _own_settings(method: str, where: str) -> list[str]:
    try:
        return [field.name for field in fields(SETTINGS[check_method(method)]) if field.name != "seed"]
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def variant_settings(method: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which a variant differs, checked and converted as flags are.

    Raises:
        UsageError: If a value has a wrong type.
    """
    flags = Arguments("compare", "The settings of a variant.")
    flags.add_fields(SETTINGS[method], prefix=method, only=tuple(changes) or ("",))
    words = [
        f"--{method}.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()
    ]
    found: dict[str, Any] = flags.parse(words).get(method.replace("-", "_"), {})
    return found
