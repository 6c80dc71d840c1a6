"""`wide recipes`: list, show or copy the configurations that ship with wide; `--config` finds them by name."""

import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from wide.errors import ConfigError, UsageError, nearest

_USAGE = """usage: wide recipes list                  names and what they are for
       wide recipes show NAME             print one
       wide recipes copy NAME [DEST]      copy one, to change it (default: NAME.yaml here)

Run one with: wide COMMAND --config NAME [FLAGS], where the list says which command it is for."""


def run(arguments: Sequence[str]) -> None:
    """Carry out the command."""
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


def recipe_names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the file of a recipe.

    Raises:
        UsageError: If there is none of that name; the message names the nearest.
    """
    names = recipe_names()
    if name not in names:
        hint = nearest(name, names, otherwise=".")
        raise UsageError(f"there is no recipe {name!r}{hint} Recipes: {', '.join(names)}")
    return _folder() / f"{name}.yaml"


def find_recipe(name: str) -> Path:
    """Return the file that `--config` means: a YAML file, or else a recipe of that name.

    Raises:
        UsageError: If there is neither.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml") or path.name != name:
        raise UsageError(f"there is no configuration file {name}; name a YAML file, or one of the recipes")
    return recipe_path(name)


def is_recipe(path: Path) -> bool:
    """Return whether a file is a recipe that ships, not a file of the user's."""
    return path.parent == _folder()


def recipe_command(settings: Mapping[str, Any]) -> str:
    """Return the command that the settings of a recipe are for."""
    marks = {"methods": "compare", "rates": "profile", "operators": "bench"}
    return next((command for key, command in marks.items() if key in settings), "prune")


def _folder() -> Path:
    # The package is never imported from an archive: it is installed as files.
    return Path(str(resources.files("wide") / "recipes"))
