"""Which names can only be paths on this machine, so that no hub is asked for a mistyped one."""

from pathlib import Path

_SIGNS = (".", "/", "~")


def is_path(name: str) -> bool:
    """Return whether a name is a path, there or not: by its first sign, or because it begins with a folder here."""
    return name.startswith(_SIGNS) or _begins_with_folder(name)


def missing_folder(name: str) -> str | None:
    """Return what is wrong with the path of a model that is not there; None if it is there or may be a hub name."""
    if not is_path(name) or Path(name).exists():
        return None
    return f"there is no folder {name!r} to load a model and its tokenizer from; check the path{way_to_hub(name)}"


def way_to_hub(name: str) -> str:
    """Return how a hub name is reached that begins with the name of a folder here, as the end of a message."""
    if name.startswith(_SIGNS) or not _begins_with_folder(name):
        return ""
    folder = name.partition("/")[0]
    return f" ({folder!r} is a folder here; for {name!r} on the hub, run the command from another folder)"


def _begins_with_folder(name: str) -> bool:
    first, _, rest = name.partition("/")
    return bool(first and rest) and Path(first).is_dir()
