"""Standard errors of perplexities by resampling windows of the scored text."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_RESAMPLES = 2000

Windows = Sequence[tuple[float, int]]
"""Of each window of the text: summed loss in nats, and scored tokens."""


def perplexity_error(windows: Windows) -> float | None:
    """Return the bootstrap standard error of the token perplexity; None with fewer than two windows.

    Windows are the independent unit: tokens inside one are not.

    Args:
        windows: Losses of the model on the text.
    """
    return _error(*_columns(windows))


def ratio_error(windows: Windows, dense: Windows) -> float | None:
    """Return the bootstrap standard error of a perplexity divided by the dense one on the same windows.

    The two are resampled together, so that windows that are hard for both do not count as noise.

    Args:
        windows: Losses of the model.
        dense: Losses of the dense model; None is returned where they are of other windows, or fewer than two.
    """
    losses, tokens = _columns(windows)
    dense_losses, dense_tokens = _columns(dense)
    if not np.array_equal(tokens, dense_tokens):
        return None
    with np.errstate(invalid="ignore"):
        difference = losses - dense_losses
    return _error(difference, tokens)


def _columns(windows: Windows) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    table = np.asarray(windows, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _error(losses: npt.NDArray[np.float64], tokens: npt.NDArray[np.float64]) -> float | None:
    """Return the standard deviation of exp(loss per token) over resamples of the windows, the same at every call."""
    size = len(losses)
    # A perplexity that overflows has no error worth a number.
    if size < 2 or not bool(np.isfinite(losses).all()):
        return None
    draws = _draws(size)
    # Windows without scored tokens may be all that a resample holds.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values = np.exp((draws @ losses) / (draws @ tokens))
    return float(values.std(ddof=1)) if bool(np.isfinite(values).all()) else None


# A page asks for hundreds of errors on one text, and drawing takes nearly all of their time.
@lru_cache(maxsize=1)
def _draws(size: int) -> npt.NDArray[np.float64]:
    """Return how often each resample holds each window, [resamples, size], the same at every call."""
    draws = np.random.default_rng(0).multinomial(size, np.full(size, 1.0 / size), size=_RESAMPLES).astype(np.float64)
    draws.setflags(write=False)
    return draws
