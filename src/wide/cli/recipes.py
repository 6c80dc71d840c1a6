"""`wide recipes`: list, show or copy the configurations that ship with wide."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from wide.cli.recipe_files import recipe_command, recipe_names, recipe_path
from wide.cli.usage import UsageError
from wide.errors import ConfigError

_USAGE = """usage: wide recipes list                  names and what they are for
       wide recipes show NAME             print one
       wide recipes copy NAME [DEST]      copy one, to change it (default: NAME.yaml here)

Run one with: wide COMMAND --config NAME [FLAGS], where the list says which command it is for."""


def run(arguments: Sequence[str]) -> None:
    """Carry out the command.

    Raises:
        UsageError: If the words cannot be understood.
        ConfigError: If there is no such recipe, or the destination exists.
    """
    words = [word for word in arguments if word != "--debug"]
    if "-h" in words or "--help" in words:
        print(_USAGE)
        return
    match words:
        case ["list"] | []:
            _list()
        case ["show", name]:
            print(recipe_path(name).read_text(encoding="utf-8"), end="")
        case ["copy", name]:
            _copy(name, Path(f"{name}.yaml"))
        case ["copy", name, destination]:
            _copy(name, Path(destination))
        case _:
            raise UsageError(f"cannot understand: wide recipes {' '.join(words)}\n{_USAGE}")


def _list() -> None:
    names = recipe_names()
    width = max(map(len, names))
    for name in names:
        settings = _settings(recipe_path(name))
        print(f"{name:<{width}}  {recipe_command(settings):<7}  {settings['description']}")


def _copy(name: str, destination: Path) -> None:
    source = recipe_path(name)
    target = destination / source.name if destination.is_dir() else destination
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another destination")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    print(f"copied to {target}; run it with: wide {recipe_command(_settings(target))} --config {target}")


def _settings(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return settings
