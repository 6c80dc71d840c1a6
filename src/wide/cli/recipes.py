"""`wide recipes`: list or show the configurations that ship with wide; `--config` finds them by name."""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from wide.errors import UsageError, nearest

USAGE = """usage: wide recipes list                  names and what they are for
       wide recipes show NAME             print one; to change it: wide recipes show NAME > mine.yaml

Run one with: wide COMMAND --config NAME [FLAGS], where the list says which command it is for."""
# The package is never imported from an archive: it is installed as files.
_FOLDER = Path(str(resources.files("wide") / "recipes"))


def run(arguments: Sequence[str]) -> None:
    match list(arguments):
        case ["list"] | []:
            found = {name: yaml.safe_load(recipe_path(name).read_text(encoding="utf-8")) for name in recipe_names()}
            width = max(map(len, found))
            for name, settings in found.items():
                print(f"{name:<{width}}  {recipe_command(settings):<7}  {settings['description']}")
        case ["show", name]:
            print(recipe_path(name).read_text(encoding="utf-8"), end="")
        case _:
            raise UsageError(f"cannot understand: wide recipes {' '.join(arguments)}\n{USAGE}")


def recipe_names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the file of a recipe, or refuse its name with the nearest."""
    names = recipe_names()
    if name not in names:
        hint = nearest(name, names, otherwise=".")
        raise UsageError(f"there is no recipe {name!r}{hint} Recipes: {', '.join(names)}")
    return _FOLDER / f"{name}.yaml"


def find_recipe(name: str) -> Path:
    """Return the file that `--config` means: a YAML file, or else a recipe of that name."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml") or path.name != name:
        raise UsageError(f"there is no configuration file {name}; name a YAML file, or one of the recipes")
    return recipe_path(name)


def is_recipe(path: Path) -> bool:
    """Return whether a file is a recipe that ships, not a file of the user's."""
    return path.parent == _FOLDER


def recipe_command(settings: Mapping[str, Any]) -> str:
    """Return the command that the settings of a recipe are for."""
    marks = {"methods": "compare", "prompt": "profile", "operators": "bench"}
    return next((command for key, command in marks.items() if key in settings), "prune")
