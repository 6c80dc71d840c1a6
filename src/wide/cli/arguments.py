"""From dataclasses to flags and YAML, and back: one schema, in which unknown keys are refused."""

import argparse
import inspect
import os
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser

from wide.cli.recipes import find_recipe, is_recipe, recipe_command, recipe_names
from wide.errors import UsageError, nearest
from wide.methods.catalogue import get, names

if TYPE_CHECKING:
    from wide.runs.folder import RunFolder


COMPLETING = "_ARGCOMPLETE"
"""Set where a shell asks how a line goes on (argcomplete): the number of words before what is completed."""


class _Help(argparse.HelpFormatter):
    """Says of a flag what it does and what it is by default; its type shows in the name of its value."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.required:
            return f"{text} (required)"
        default = action.default
        if default in (None, "", argparse.SUPPRESS) or action.nargs == 0:
            return text
        return f"{text} (default: {str(default).lower() if isinstance(default, bool) else default})"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kind = getattr(action, "_typehint", None)
        kinds = {kind, *typing.get_args(kind)}
        return "N" if int in kinds else "X" if float in kinds else action.dest.rpartition(".")[2].upper()


class _Loader(yaml.SafeLoader):
    """Reads YAML, and refuses a mapping with the same key twice, of which PyYAML would take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"line {line}: the key {name!r} stands in line {lines[name]} already; keep one")
            lines[name] = line
        return node


class Arguments:
    """The flags of one command, which are also the keys of its YAML files.

    Args:
        first: The flags that `--help` explains, without dashes; all others are explained by `--help_all`. Empty
            explains all.
    """

    def __init__(self, command: str, description: str, usage: str = "[FLAGS]", first: Sequence[str] = ()) -> None:
        self._command, self._first = command, first
        self._groups: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._only_in_files: set[str] = set()
        self._never_null: list[str] = []
        self._parser = ArgumentParser(
            prog=f"wide {command}",
            usage=f"wide {command} {usage}",
            description=description,
            exit_on_error=False,
            formatter_class=_Help,
        )
        self._parser.add_argument("--help_all", action="help", help="Explain all flags.")
        text = "YAML file, or the name of a recipe (wide recipes list); flags win over it."
        self._parser.add_argument("--config", action=ActionConfigFile, help=text)
        self.add_switch("debug", "Show the traceback of an error.")

    def refuse(self, names: Iterable[str], reason: str, *, even_known: bool = False) -> None:
        """Say why flags or groups of flags do not belong here, instead of that they are unknown.

        Args:
            names: Flags without dashes; the name of a group stands for all its flags.
            even_known: Refuse groups that are known, too, on the command line; files may have them.
        """
        self._refused |= dict.fromkeys(names, reason)
        if even_known:
            self._only_in_files |= set(names)

    def add_switch(self, name: str, text: str) -> None:
        """Add a flag without a value."""
        self._parser.add_argument(f"--{name}", action="store_true", help=text)

    def add_run_switches(self) -> None:
        """Add what to do with a folder that is not empty."""
        self.add_switch("resume", "Continue the run in --output from its last checkpoint.")
        self.add_switch("overwrite", "Replace the run in --output.")

    def add_methods(self, methods: Sequence[str], *, asked_by: str, only_in_files: Collection[str] = ()) -> None:
        """Add the settings of methods, prefixed by the method's name, and refuse those of all others.

        The seed is not among them: it is the run's.

        Args:
            asked_by: The words of the command line that name them, for the message.
            only_in_files: Methods that do not run, whose settings may stand in configuration files all the same.
        """
        for name in names():
            if name in methods or name in only_in_files:
                self.add_fields(get(name).settings, prefix=name, skip=("seed",))
            if name not in methods:
                reason = f"is a flag of method {name}, and the command runs {asked_by}"
                self.refuse([name], reason, even_known=name in only_in_files)

    def add_folders(self, text: str) -> None:
        """Add folders that are named without a flag, as `folders`."""
        self._parser.add_argument("folders", nargs="*", type=Path, help=text)

    def add_fields(
        self, cls: type, *, prefix: str = "", only: Sequence[str] = (), skip: Sequence[str] = (), **defaults: Any
    ) -> None:
        """Add the fields of a dataclass as flags, with its docstring as their help.

        Args:
            prefix: Group of the flags, e.g. 'train' for `--train.steps`; empty for everyday flags.
            defaults: Other defaults than the dataclass has.
        """
        hints, texts = typing.get_type_hints(cls), field_texts(cls)
        group = self._parser.add_argument_group(prefix or _title(cls), _title(cls) if prefix else None)
        if prefix:
            self._groups.setdefault(prefix, _title(cls))
        for field in fields(cls):
            if field.name in skip or (only and field.name not in only):
                continue
            # Null is the word of YAML.
            kind, text = hints[field.name], re.sub(r"\bNone\b", "null", texts[field.name])
            default = defaults.get(field.name, field.default)
            options = {"required": True} if default is MISSING else {"default": default}
            name = f"{prefix}.{field.name}" if prefix else field.name
            if default is not None and types.NoneType not in typing.get_args(kind):
                self._never_null.append(name.replace("-", "_"))
            # argparse expands % in help texts.
            group.add_argument(f"--{name}", type=kind, help=text.replace("%", "%%"), **options)

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return all values by key, groups as nested dictionaries.

        Raises UsageError if a flag or key is unknown (the message names the nearest), a value has a wrong type, or a
        required one is missing.
        """
        if COMPLETING in os.environ:
            _complete(self._parser._actions)
        if self._first and {"-h", "--help"} & set(arguments):
            self._explain()
        # Python's word for null, which no text means.
        configs, words = _split_configs([re.sub(r"^(--\S+=)?None$", r"\1null", word) for word in arguments])
        parts = [word.partition("=") for word in words]
        flags = ["".join((self._spelled_here(name), *value)) for name, *value in parts]
        self._refuse_unknown_flags(flags)
        for path in configs:
            self._refuse_unknown_keys(path)
        from_files = [argument for path in configs for argument in ("--config", str(path))]
        try:
            values = self._parser.parse_args([*from_files, *flags])
        # The parser meets values of types that nobody writes with errors of Python's.
        except (ArgumentError, TypeError, RuntimeError) as error:
            raise UsageError(f"{_in_one_line(error)} (see {self._parser.prog} --help)") from error
        for name in self._never_null:
            if values.get(name) is None:
                raise UsageError(
                    f"{name} must not be null; give a value, or leave it out (see {self._parser.prog} --help)"
                )
        parsed: dict[str, Any] = values.as_dict()
        if any(map(is_recipe, configs)) and not any(flag.startswith("--description") for flag in flags):
            # A recipe's says what the recipe is for, not what becomes of it with other flags.
            parsed["description"] = ""
        return parsed

    def folder(self, values: Mapping[str, Any]) -> "RunFolder":
        """Return the output folder that parsed values name, checked and not touched yet."""
        from wide.runs.folder import RunFolder

        return RunFolder(
            values["output"],
            values,
            resume=bool(values.get("resume")),
            # Processes that share a comparison all go on with what they find there.
            shared=values.get("shard") is not None,
            overwrite=bool(values["overwrite"]),
            resumable="resume" in values,
        )

    def known_keys(self) -> list[str]:
        """Return every key in dotted form."""
        others = ("help", "help_all", "print_config")
        return [action.dest for action in self._parser._actions if action.dest not in others]

    def _explain(self) -> typing.NoReturn:
        parser, first, formatter = self._parser, self._first, _Help(self._parser.prog)
        known = {action.dest: action for action in parser._actions}
        formatter.add_usage(parser.usage, [], [])
        formatter.add_text(parser.description)
        formatter.start_section("first flags")
        formatter.add_arguments([known[name] for name in first])
        formatter.end_section()
        formatter.start_section(f"more flags, which {parser.prog} --help_all explains")
        others = [name for name in self.known_keys() if "." not in name and name not in first]
        formatter.add_text(", ".join(f"--{name}" for name in others))
        formatter.end_section()
        print(formatter.format_help(), end="")
        for prefix, title in self._groups.items():
            print(f"  --{prefix + '.*':<13} {re.split('[:;]', title)[0]}")
        raise SystemExit(0)

    def _known_flags(self) -> list[str]:
        return [name for action in self._parser._actions for name in action.option_strings]

    def _spelled_here(self, flag: str) -> str:
        """Return a flag as this command spells it; others have it with a group, or without."""
        known, name = self._known_flags(), flag.removeprefix("--")
        group, _, leaf = name.rpartition(".")
        # The settings of method wide are everyday flags of wide prune.
        if name == flag or flag in known or name in self._refused or group not in ("", self._command, "wide"):
            return flag
        same = [each for each in known if (each if group else each.rpartition(".")[2]).lstrip("-") == leaf]
        mine = [each for each in same if each == f"--wide.{leaf}"] or same
        return mine[0] if len(mine) == 1 else flag

    def _refuse_unknown_flags(self, flags: Sequence[str]) -> None:
        known = self._known_flags()
        for flag in flags:
            name = flag.partition("=")[0]
            if name == "--":
                return
            if not name.startswith("--"):
                continue
            if {name[2:], name[2:].partition(".")[0]} & self._only_in_files:
                self._refuse_misplaced(name, name[2:])
            if name not in known:
                self._refuse_misplaced(name, name[2:])
                raise UsageError(f"{self._parser.prog} has no flag {name}{_nearest(name, known)}")

    def _refuse_misplaced(self, shown: str, name: str) -> None:
        for each in (name, name.partition(".")[0]):
            if each in self._refused:
                raise UsageError(f"{shown} {self._refused[each]}")

    def _refuse_unknown_keys(self, path: Path) -> None:
        known, found = self.known_keys(), _read_yaml(path)
        groups = sorted({name.rpartition(".")[0] for name in known if "." in name})
        command, keys = recipe_command(found), _dotted(found, groups)
        same = [key for key in keys if [each.replace("-", "_") for each in keys].count(key.replace("-", "_")) > 1]
        if same:
            raise UsageError(f"{path}: {' and '.join(same)} are one key; keep one of them")
        for key in keys:
            # A key may be written as its flag is, and groups that are methods have dashes; names of settings have none.
            group, dot, leaf = key.rpartition(".")
            if f"{group.replace('-', '_')}{dot}{leaf}" not in known:
                if is_recipe(path) and command != self._command:
                    words = f"{path.stem} is a recipe of wide {command}, not of {self._parser.prog}"
                    raise UsageError(f"{words}: run wide {command} --config {path.stem}")
                self._refuse_misplaced(f"{path}: {key}", key)
                if key.replace("-", "_") in groups:
                    raise UsageError(f"{path}: {key} is a group of settings; write them below it, or leave it out")
                raise UsageError(f"{path}: {self._parser.prog} has no key {key!r}{_nearest(key, [*known, *groups])}")


def _complete(actions: Iterable[Any]) -> None:
    """Answer a shell that asks how the line goes on, and end the process."""
    import argcomplete
    from argcomplete.completers import FilesCompleter

    fixed = {"method": names(), "config": recipe_names()}

    def words_or_files(prefix: str, action: Any, **how: Any) -> list[str]:
        words = [word for word in words_of[action.dest] if word.startswith(prefix)]
        return words or FilesCompleter()(prefix, action=action, **how)

    # The parser of jsonargparse itself completes neither words to choose from nor files.
    plain, words_of = argparse.ArgumentParser(add_help=False), dict[str, Sequence[str]]()
    for action in actions:
        if action.option_strings and action.nargs == 0:
            plain.add_argument(*action.option_strings, action="store_true")
        elif action.option_strings:
            kinds = (kind := getattr(action, "_typehint", None), *typing.get_args(kind))
            words = [typing.get_args(each) for each in kinds if typing.get_origin(each) is typing.Literal]
            words += [("true", "false")] if bool in kinds else [()]
            words_of[action.dest] = fixed.get(action.dest, words[0])
            plain.add_argument(*action.option_strings, dest=action.dest).completer = words_or_files  # type: ignore[attr-defined]
    argcomplete.autocomplete(plain)


def look_ahead(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what a command line says, unchecked, before all flags are known because some depend on it.

    Raises UsageError if a configuration file cannot be read.

    Args:
        arguments: The command line. Keys of its files stand as they are written, groups as mappings; flags win over
            them and are text.
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


def field_texts(cls: type) -> dict[str, str]:
    """Return what the docstrings of a dataclass and its bases say about each field."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        # From Python 3.13 on docstrings come without the indentation of the class.
        section = inspect.cleandoc(base.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
        for entry in re.split(r"\n(?= {4}\w+: )", f"\n{section}"):
            name, _, text = entry.strip().partition(": ")
            if text:
                texts[name] = " ".join(text.split())
    return texts


def _title(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).splitlines()[0].rstrip(".")


def _split_configs(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
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


def load_yaml(text: str) -> Any:
    """Return what YAML says; raises yaml.YAMLError if it is damaged, or a mapping has a key twice."""
    return yaml.load(text, Loader=_Loader)


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    try:
        found = load_yaml(path.read_text(encoding="utf-8"))
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
    return f"; did you mean {close[0]}?" if close else nearest(name, known)


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = re.sub(r'Parser key "([^"]+)": ', r"\1: ", text)
    return re.sub(r"<class '(\w+)'>", r"\1", text).replace("typing.Literal", "one of ")
