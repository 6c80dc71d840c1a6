"""Forwards in which no row packs several sequences, which transformers would look for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor


class _Told(threading.local):
    unpacked = False


_TOLD = _Told()


@contextmanager
def unpacked() -> Iterator[None]:
    """Let the forwards of this thread inside the block take each row for one sequence, as without position ids it is.

    Otherwise transformers compares position ids in every forward without a cache, once for each kind of mask, and the
    host waits for the device. A compiled graph, which cannot look, is given a mask and leaves the fast attention
    kernels, which take none (transformers before 5.24, or torch before 2.13, always gives it one).
    """
    _install()
    before, _TOLD.unpacked = _TOLD.unpacked, True
    try:
        yield
    finally:
        _TOLD.unpacked = before


def _install() -> None:
    """Wrap transformers' search, once per process."""
    from transformers import masking_utils

    search: Any = masking_utils.find_packed_sequence_indices
    if hasattr(search, "wide_told"):
        return

    @wraps(search)
    def told(*args: Any, **kwargs: Any) -> Tensor | None:
        return None if _TOLD.unpacked else search(*args, **kwargs)

    told.wide_told = True  # type: ignore[attr-defined]
    masking_utils.find_packed_sequence_indices = told
