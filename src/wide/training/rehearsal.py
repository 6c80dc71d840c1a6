"""Running something until it reads text: what it refuses is known before anything is computed or written."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from wide.data.progress import without_bars


class _TextIsReadError(Exception):
    """Raised in the place of the first embedding."""


@contextmanager
def rehearsal(model: Any) -> Iterator[None]:
    """Leave the block quietly where the model would embed its first tokens.

    What raises before that does so as ever; layers may be probed on numbers of their own. Whatever runs inside must
    take back on an exception what it changed. A compiled model cannot be rehearsed. No progress bar is shown: it would
    never move.

    Args:
        model: The Hugging Face model that the block works on.
    """
    handle = model.get_input_embeddings().register_forward_pre_hook(_stop)
    try:
        with without_bars():
            yield
    except _TextIsReadError:
        return
    finally:
        handle.remove()


def _stop(_module: object, _args: object) -> NoReturn:
    raise _TextIsReadError
