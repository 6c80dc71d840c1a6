"""The methods' settings as flags; nothing heavy is imported."""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from wide.cli.arguments import Arguments, build
from wide.cli.usage import UsageError
from wide.method_config import (
    BlockPrunerConfig,
    CoopPrunerConfig,
    DDPConfig,
    DenseConfig,
    DLLMConfig,
    ShortenedConfig,
    SkipGPTConfig,
    SkipGPTOriginalConfig,
    SliceGPTConfig,
    SparseGPTConfig,
    TyrConfig,
    WandaConfig,
    WideMethodConfig,
)

SETTINGS: Mapping[str, type[Any]] = {
    "dense": DenseConfig,
    "shortened-ppl": ShortenedConfig,
    "shortened-taylor": ShortenedConfig,
    "cooppruner": CoopPrunerConfig,
    "blockpruner": BlockPrunerConfig,
    "slicegpt": SliceGPTConfig,
    "tyr": TyrConfig,
    "ddp": DDPConfig,
    "skipgpt": SkipGPTConfig,
    "skipgpt-original": SkipGPTOriginalConfig,
    "dllm": DLLMConfig,
    "wide": WideMethodConfig,
    "wanda": WandaConfig,
    "sparsegpt": SparseGPTConfig,
}
"""The settings of each method by its name in the catalogue, which does not import them."""
TRAINED = ("skipgpt", "skipgpt-original", "dllm", "wide")
"""Methods that train routers, to which the flags of stage 1 apply."""


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
    # Dashes become underscores in keys.
    return build(SETTINGS[method], values.get(method.replace("-", "_"), {}), **changes)
