"""The recipes that ship inside the package: YAML files, found by name."""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from wide.cli.usage import UsageError


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
        close = get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]}?" if close else "."
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
