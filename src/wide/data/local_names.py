"""Which names can only be paths on this machine, so that a mistyped one does not cost a minute of asking the hub."""

import functools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from wide.errors import MissingExtraError

HubKind = Literal["model", "dataset"]
_SIGNS = (".", "/", "~")
_SECONDS = 4.0


def is_path(name: str) -> bool:
    """Return whether a name is a path on this machine, by its first sign or because it is there."""
    return name.startswith(_SIGNS) or Path(name).exists()


def is_repository(name: str) -> bool:
    """Return whether a name can be one of the hub's, `user/name`, and no file or folder here has it."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not Path(name).exists()


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file, there or not."""
    return name.lower().endswith(".gguf") and not Path(name).is_dir()


def as_transformers_takes(name: str) -> tuple[str, dict[str, str]]:
    """Return the name of a model, its configuration or its tokenizer, and options, for `from_pretrained`.

    Raises MissingExtraError if it is a GGUF file, and what reads them is not installed.
    """
    if not is_gguf(name):
        return name, {}
    if find_spec("gguf") is None:
        raise MissingExtraError(f"{name} is a GGUF file, which needs the package gguf: pip install 'wide[gguf]'")
    # Absolute, because transformers looks for a file of that name where it runs before it looks into the folder.
    return str(Path(name).parent), {"gguf_file": str(Path(name).absolute())}


def missing_folder(name: str, *, cache: str | Path | None = None, subfolder: str = "") -> str | None:
    """Return why a model can be loaded from nowhere, None if it may be; `cache` is as the hub's library has it."""
    if is_gguf(name):
        return None if Path(name).is_file() else f"there is no file {name!r} to load a model from; check the path"
    if Path(name).exists():
        if (Path(name, subfolder) / "config.json").is_file():
            return None
        return (
            f"{name or repr(name)} holds no config.json, so it is no model; name the folder of a model, or a GGUF file "
            "(an adapter goes beside its base: --adapter, in Python wide.load(base, adapter))"
        )
    if name.startswith(_SIGNS):
        return f"there is no folder {name!r} to load a model and its tokenizer from; check the path"
    return unreachable(name, "model", cache=cache)


def unreachable(name: str, kind: HubKind, *, cache: str | Path | None = None) -> str | None:
    """Return why a hub name cannot be loaded, where the hub's cache does not have it and the hub does not answer.

    Asked once: a download would be tried again for a minute, file by file.
    """
    from huggingface_hub import constants

    folder = f"{kind}s--{name.replace('/', '--')}"
    # Offline nothing is retried: the loader itself looks into its cache and says what it misses.
    if constants.HF_HUB_OFFLINE or (Path(cache or constants.HF_HUB_CACHE) / folder).is_dir():
        return None
    try:
        _ask_hub(name, kind)
    except OSError as error:
        return (
            f"there is no folder {name!r}, the hub's cache has no {kind} of this name, and {constants.ENDPOINT} does "
            f"not answer ({' '.join(str(error).split())}); check the name, or the network"
        )
    return None


# Exceptions are not kept: the network may come back.
@functools.lru_cache(maxsize=64)
def _ask_hub(name: str, kind: HubKind) -> None:
    """Raise OSError if the hub does not answer; whether it has the name the loader says, which may have a token."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_SECONDS)
    except (HfHubHTTPError, HFValidationError):
        return
    # Each version of the hub's library has errors of its own for a network that is not there.
    except Exception as error:
        raise OSError(str(error)) from error
