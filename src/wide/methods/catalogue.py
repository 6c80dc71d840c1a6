"""All rows of the benchmark by name; a row's code is imported when it is asked for."""

import importlib
from typing import TYPE_CHECKING

from wide.errors import ConfigError

# So that listing the names imports no torch.
if TYPE_CHECKING:
    from wide.methods.method import Method

_ROWS: dict[str, tuple[str, str]] = {
    "dense": ("dense", "METHOD"),
    "shortened-ppl": ("shortened", "BY_PERPLEXITY"),
    "shortened-taylor": ("shortened", "BY_TAYLOR"),
    "cooppruner": ("cooppruner", "METHOD"),
    "blockpruner": ("blockpruner", "METHOD"),
    "slicegpt": ("slicegpt", "METHOD"),
    "tyr": ("tyr", "METHOD"),
    "ddp": ("ddp", "METHOD"),
    "skipgpt": ("skipgpt", "METHOD"),
    "skipgpt-original": ("skipgpt", "ORIGINAL"),
    "dllm": ("dllm", "METHOD"),
    "dllm-original": ("dllm", "ORIGINAL"),
    "wide": ("wide", "METHOD"),
    "wanda": ("wanda", "METHOD"),
    "sparsegpt": ("sparsegpt", "METHOD"),
}
"""Name -> (module beside this one, its constant), in the order of the table."""


def names() -> tuple[str, ...]:
    """Return the names of all rows, in the order of the table."""
    return tuple(_ROWS)


def get(name: str) -> "Method":
    """Return a row.

    Raises:
        ConfigError: If there is none of this name; the message lists all.
    """
    if name not in _ROWS:
        raise ConfigError(f"no method is named {name!r}; choose one of {', '.join(_ROWS)}")
    module, constant = _ROWS[name]
    method: Method = getattr(importlib.import_module(f"wide.methods.{module}"), constant)
    return method
