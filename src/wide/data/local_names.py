"""Which names can only be paths on this machine, so that a mistyped one does not cost a minute of asking the hub."""

import functools
from pathlib import Path
from typing import Literal

HubKind = Literal["model", "dataset"]
_SIGNS = (".", "/", "~")
_SECONDS = 5.0


def is_path(name: str, kind: HubKind) -> bool:
    """Return whether a name is a path, there or not.

    It is by its first sign, or if it begins with a folder here and neither the hub nor its cache has it.

    Args:
        name: Of a model or of text.
        kind: What the hub would be asked for.
    """
    if name.startswith(_SIGNS):
        return True
    return _begins_with_folder(name) and (Path(name).exists() or not _is_on_hub(name, kind))


def missing_folder(name: str) -> str | None:
    """Return what is wrong with the path of a model that is not there; None if it is there or is a hub name."""
    if Path(name).exists() or not is_path(name, "model"):
        return None
    return f"there is no folder {name!r} to load a model and its tokenizer from; check the path{without_hub(name)}"


def without_hub(name: str) -> str:
    """Return what the hub said of a name that begins with a folder here, as the end of a message."""
    if name.startswith(_SIGNS) or not _begins_with_folder(name):
        return ""
    return f" ({name.partition('/')[0]!r} is a folder here, and the hub has no {name!r} or was not reached)"


def _begins_with_folder(name: str) -> bool:
    first, _, rest = name.partition("/")
    return bool(first and rest) and Path(first).is_dir()


@functools.lru_cache(maxsize=64)
def _is_on_hub(name: str, kind: HubKind) -> bool:
    """Return whether the hub or its cache has a name: asked once, without the retries of a download."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE:
        # Nothing is retried then: the loader itself looks into its cache and says what it misses.
        return True
    repository = name.partition(":")[0]
    try:
        if isinstance(try_to_load_from_cache(repository, "config.json", repo_type=kind), str):
            return True
        HfApi().repo_info(repository, repo_type=kind, timeout=_SECONDS)
    # Not there, no such name, or no network, each with an error of its own.
    except Exception:
        return False
    return True
