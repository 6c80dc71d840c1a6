"""Every error that wide raises on purpose.

Each message says what was seen, what was wanted and what to do. The command line prints the message without a
traceback; in Python the classes also derive from the built-in error that a caller would expect.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class WideError(Exception):
    """Base of all errors caused by input, configuration or environment, never by a defect of wide."""


class ConfigError(WideError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class UsageError(ConfigError):
    """A flag, key, method or recipe is unknown, or a value has a wrong type; the command line exits with 2."""


class ShapeError(WideError, ValueError):
    """A width, group size or tensor shape does not fit."""


class UnsupportedModelError(WideError, TypeError):
    """The structure of a model cannot be routed; the message names the part and the reason."""


class NotAttachedError(WideError, RuntimeError):
    """The operation needs a model with routers and this one has none (or has them already)."""


class AdapterError(WideError, ValueError):
    """An adapter or checkpoint on disk is incomplete, malformed, or made for another base model."""


class DataError(WideError, ValueError):
    """A text source is missing, empty, too short, of a wrong type, or does not fit the tokenizer."""


class TrainingError(WideError, RuntimeError):
    """Training cannot go on (for example the loss is not finite); the message names what was kept."""


class EvaluationError(WideError, RuntimeError):
    """An evaluation cannot be carried out as asked."""


class UnsupportedBackendError(WideError, NotImplementedError):
    """An operator has no such backend here; the message names operator, backend, device and reason."""


class MissingExtraError(WideError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the memory of a GPU or of the host is full; torch and the system often say so in words alone.

    Known by its name, because importing torch here would slow every command down.
    """
    words = "allocate memory" in str(error) or "CUDA error: out of memory" in str(error)
    return words or type(error).__name__ in ("OutOfMemoryError", "MemoryError")


def first_line(error: Exception) -> str:
    """Return the first line of an error's words, or the name of its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def nearest(name: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return the end of a message about an unknown name: the known one that is spelt most like it, else `otherwise`."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else otherwise
