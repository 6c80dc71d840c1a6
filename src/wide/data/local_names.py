"""Which names can only be paths on this machine, so that a mistyped one does not cost a minute of asking the hub."""

import functools
from pathlib import Path
from typing import Literal

HubKind = Literal["model", "dataset"]
_SIGNS = (".", "/", "~")
_SECONDS = 4.0


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


def missing_folder(name: str, *, cache: str | Path | None = None) -> str | None:
    """Return what is wrong with the name of a model that can be loaded from nowhere; None if it may be loaded.

    Args:
        name: A folder, or of the hub.
        cache: Folder of the hub's cache; None means the usual one.
    """
    if Path(name).exists():
        return None
    if not is_path(name, "model"):
        return _unreachable(name, cache)
    return f"there is no folder {name!r} to load a model and its tokenizer from; check the path{without_hub(name)}"


def without_hub(name: str) -> str:
    """Return what the hub said of a name that begins with a folder here, as the end of a message."""
    if name.startswith(_SIGNS) or not _begins_with_folder(name):
        return ""
    return f" ({name.partition('/')[0]!r} is a folder here, and the hub has no {name!r} or was not reached)"


def _begins_with_folder(name: str) -> bool:
    first, _, rest = name.partition("/")
    return bool(first and rest) and Path(first).is_dir()


def _unreachable(name: str, cache: str | Path | None) -> str | None:
    """Return why a hub name cannot be loaded, where the hub's cache does not have it and the hub does not answer.

    Asked once: a download would be tried again for a minute, file by file.
    """
    from huggingface_hub import constants

    cached = Path(cache or constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if constants.HF_HUB_OFFLINE or cached.is_dir():
        return None
    try:
        _ask_hub(name)
    except OSError as error:
        return (
            f"there is no folder {name!r}, the hub's cache has no model of this name, and {constants.ENDPOINT} does "
            f"not answer ({' '.join(str(error).split())}); check the name, or the network"
        )
    return None


# Exceptions are not kept: the network may come back.
@functools.lru_cache(maxsize=64)
def _ask_hub(name: str) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().repo_info(name, timeout=_SECONDS)
    except (HfHubHTTPError, HFValidationError):
        # It answers, and whoever loads the model says more.
        return
    # Each version of the hub's library has errors of its own for a network that is not there.
    except Exception as error:
        raise OSError(str(error)) from error


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
