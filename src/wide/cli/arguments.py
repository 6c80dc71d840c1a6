"""From dataclasses to flags and YAML, and back: one schema, in which unknown keys are refused."""

import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace

from wide.cli.recipes import find_recipe, is_recipe, recipe_command
from wide.errors import UsageError
from wide.runs.settings import flags_named

T = TypeVar("T")
# How a run is carried out, not what it is: left out of the saved configuration.
_NOT_SAVED = {"config", "print_config", "debug", "resume", "overwrite", "json", "shard", "table", "help"}


class Arguments:
    """The flags of one command, which are also the keys of its YAML files.

    Args:
        command: Name of the command.
        description: What it does, for `--help`.
        usage: The words after the command, for `--help`.
    """

    def __init__(self, command: str, description: str, usage: str = "[FLAGS]") -> None:
        """Begin with the flags that every command has."""
        self._command = command
        self._parser = ArgumentParser(
            prog=f"wide {command}", usage=f"wide {command} {usage}", description=description, exit_on_error=False
        )
        self._parser.add_argument(
            "--config",
            action=ActionConfigFile,
            help="YAML file, or the name of a recipe (wide recipes list); flags win over it.",
        )
        self._refused: dict[str, str] = {}
        self._only_in_files: set[str] = set()
        self._other_names: dict[str, str] = {}
        self.add_switch("debug", "Show the traceback of an error.")

    def refuse(self, names: Iterable[str], reason: str, *, even_known: bool = False) -> None:
        """Say why flags or groups of flags do not belong here, instead of that they are unknown.

        Args:
            names: Flags without dashes; the name of a group stands for all its flags.
            reason: What comes after the flag in the message.
            even_known: Refuse groups that are known, too, on the command line; files may have them.
        """
        self._refused |= dict.fromkeys(names, reason)
        if even_known:
            self._only_in_files |= set(names)

    def also_called(self, names: Mapping[str, str]) -> None:
        """Take further names of flags, by which other commands know them: name -> flag, without dashes."""
        self._other_names |= {f"--{name}": f"--{flag}" for name, flag in names.items()}

    def add_switch(self, name: str, text: str) -> None:
        """Add a flag without a value."""
        self._parser.add_argument(f"--{name}", action="store_true", help=text)

    def add_folders(self, text: str) -> None:
        """Add folders that are named without a flag, as `folders`."""
        self._parser.add_argument("folders", nargs="*", type=Path, help=text)

    def add_fields(
        self,
        cls: type,
        *,
        prefix: str = "",
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        otherwise: str = "",
        **defaults: Any,
    ) -> None:
        """Add the fields of a dataclass as flags, with its docstring as their help.

        Args:
            cls: A dataclass.
            prefix: Group of the flags, e.g. 'train' for `--train.steps`; empty for everyday flags.
            only: Fields to add; empty means all.
            skip: Fields to leave out.
            otherwise: Where a value comes from that is not given; then every field may be null, and is by default.
            defaults: Other defaults than the dataclass has.
        """
        hints, texts = typing.get_type_hints(cls), field_texts(cls)
        group = self._parser.add_argument_group(prefix or _title(cls), _title(cls) if prefix else None)
        for field in fields(cls):
            if field.name in skip or (only and field.name not in only):
                continue
            kind, text = hints[field.name], texts[field.name]
            default = None if otherwise else defaults.get(field.name, field.default)
            if otherwise:
                kind, text = kind | None, f"{text} Null means {otherwise}."
            options = {"required": True} if default is MISSING else {"default": default}
            name = f"{prefix}.{field.name}" if prefix else field.name
            # argparse expands % in help texts.
            group.add_argument(f"--{name}", type=kind, help=text.replace("%", "%%"), **options)

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return all values by key, groups as nested dictionaries.

        Raises:
            UsageError: If a flag or key is unknown (the message names the nearest), a value has a wrong type, or a
                required one is missing.
        """
        configs, words = _split_configs(arguments)
        parts = [word.partition("=") for word in words]
        flags = ["".join((self._other_names.get(name, name), *value)) for name, *value in parts]
        self._refuse_unknown_flags(flags)
        for path in configs:
            self._refuse_unknown_keys(path)
        from_files = [argument for path in configs for argument in ("--config", str(path))]
        try:
            values = self._parser.parse_args([*from_files, *flags])
        except ArgumentError as error:
            raise UsageError(f"{_in_one_line(error)} (see {self._parser.prog} --help)") from error
        assert isinstance(values, Namespace)
        parsed: dict[str, Any] = values.as_dict()
        return parsed

    def defaults(self) -> dict[str, Any]:
        """Return what every key means that is not given, groups as nested dictionaries; required ones are None."""
        found: dict[str, Any] = self._parser.get_defaults(skip_validation=True).as_dict()
        return found

    def known_keys(self) -> list[str]:
        """Return every key in dotted form."""
        return [action.dest for action in self._parser._actions if action.dest not in ("help", "print_config")]

    def _refuse_unknown_flags(self, flags: Sequence[str]) -> None:
        known = [name for action in self._parser._actions for name in action.option_strings]
        for flag in flags:
            name = flag.partition("=")[0]
            if name == "--":
                return
            if not name.startswith("--"):
                continue
            if name[2:].partition(".")[0] in self._only_in_files:
                self._refuse_misplaced(name, name[2:])
            if name not in known:
                self._refuse_misplaced(name, name[2:])
                raise UsageError(f"{self._parser.prog} has no flag {name}{_nearest(name, known)}")

    def _refuse_misplaced(self, shown: str, name: str) -> None:
        for each in (name, name.partition(".")[0]):
            if each in self._refused:
                raise UsageError(f"{shown} {self._refused[each]}")

    def _refuse_recipe_of_another(self, path: Path) -> None:
        command = recipe_command(_read_yaml(path))
        if is_recipe(path) and command != self._command:
            raise UsageError(
                f"{path.stem} is a recipe of wide {command}, not of {self._parser.prog}: run wide {command} --config "
                f"{path.stem}"
            )

    def _refuse_unknown_keys(self, path: Path) -> None:
        known = self.known_keys()
        groups = sorted({name.rpartition(".")[0] for name in known if "." in name})
        for key in _dotted(_read_yaml(path), groups):
            # A key may be written as its flag is, and groups that are methods have dashes.
            if key.replace("-", "_") not in known:
                self._refuse_recipe_of_another(path)
                self._refuse_misplaced(f"{path}: {key}", key)
                raise UsageError(f"{path}: {self._parser.prog} has no key {key!r}{_nearest(key, [*known, *groups])}")


def look_ahead(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what a command line says, unchecked, before all flags are known because some depend on it.

    Args:
        arguments: The command line. Keys of its files stand as they are written, groups as mappings; flags win over
            them and are text.

    Raises:
        UsageError: If a configuration file cannot be read.
    """
    configs, flags = _split_configs(arguments)
    found: dict[str, Any] = {}
    for path in configs:
        found |= {str(key): value for key, value in _read_yaml(path).items()}
    for flag, following in pairwise([*flags, ""]):
        name, equals, value = flag.partition("=")
        if name.startswith("--"):
            found[name[2:]] = value if equals else following
    return found


def add_run_switches(flags: Arguments) -> None:
    """Add what to do with a folder that is not empty."""
    flags.add_switch("resume", "Continue the run that lies in --output from its last checkpoint.")
    flags.add_switch("overwrite", "Replace the run that lies in --output.")


def build(cls: type[T], values: Mapping[str, Any], *, group: str = "", **changes: Any) -> T:
    """Return a dataclass from the parsed values of its fields; keys that are not its fields are ignored.

    Args:
        cls: The dataclass.
        values: All values.
        group: Prefix of its flags, e.g. 'train'; empty for everyday flags.
        changes: Values that win.

    Raises:
        ConfigError: If a value is out of its range; the message names it as its flag does.
    """
    if group:
        values = values.get(group.replace("-", "_"), {})
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    with flags_named(group, of=names - set(changes), not_of=changes):
        return cls(**({key: value for key, value in values.items() if key in names} | changes))


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that say what a run is, without those that say how it is carried out."""
    return {key: value for key, value in values.items() if key not in _NOT_SAVED}


def field_texts(cls: type) -> dict[str, str]:
    """Return what the docstrings of a dataclass and its bases say about each field.

    Args:
        cls: A dataclass with Google-style 'Args:'.
    """
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        section = (base.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
        for entry in re.split(r"\n(?= {8}\w+: )", f"\n{section}"):
            name, _, text = entry.strip().partition(": ")
            if text:
                texts[name] = " ".join(text.split())
    return texts


def _title(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).splitlines()[0].rstrip(".")


def _split_configs(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the configuration files, in order, and all other arguments."""
    configs, others = [], []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name != "--config":
            others.append(argument)
            continue
        value = value if equals else next(remaining, "")
        if not value:
            raise UsageError("--config needs a YAML file or the name of a recipe (wide recipes list)")
        configs.append(find_recipe(value))
    return configs, others


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {_in_one_line(error)}") from error
    if found is None:
        raise UsageError(f"{path} is empty; write keys and values into it (wide recipes show NAME prints an example)")
    if not isinstance(found, Mapping):
        raise UsageError(f"{path} must hold keys and values, not {type(found).__name__}")
    return found


def _dotted(found: Mapping[Any, Any], groups: Sequence[str], prefix: str = "") -> list[str]:
    keys = []
    for name, value in found.items():
        key = f"{prefix}{name}"
        is_group = isinstance(value, Mapping) and key.replace("-", "_") in groups
        keys += _dotted(value, groups, f"{key}.") if is_group else [key]
    return keys


def _nearest(name: str, known: Sequence[str]) -> str:
    # The right word in a wrong group is a common slip that spelling alone does not find.
    leaf = name.lstrip("-").rpartition(".")[2]
    close = [key for key in known if key.lstrip("-").rpartition(".")[2] == leaf]
    close = close or get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = re.sub(r'Parser key "([^"]+)": ', r"\1: ", text)
    return re.sub(r"<class '(\w+)'>", r"\1", text).replace("typing.Literal", "one of ")
