"""Calls of the order by given kernels."""

from collections.abc import Callable
from typing import Any

import torch

from wide.kernels.reorder_rows import _cuda, reorder_rows

Kernels = Callable[[int], dict[str, Any]]


class Recorded:
    """Launches of one call, with all tensors they take, to be launched again."""

    def __init__(self, kernels: Kernels, mask: torch.Tensor) -> None:
        self.launches: list[tuple[str, Any, tuple[Any, ...]]] = []

        def noted(name: str, kernel: Any) -> Callable[..., None]:
            def run(*arguments: Any) -> None:
                self.launches.append((name, kernel, arguments))
                kernel(*arguments)

            return run

        def find(words: int) -> dict[str, Any]:
            return {name: noted(name, kernel) for name, kernel in kernels(words).items()}

        self.mask = mask
        self.result = called(find, mask)

    def again(self, only: str | None = None) -> None:
        for name, kernel, arguments in self.launches:
            if only is None or name == only:
                kernel(*arguments)

    def fill(self, byte: int) -> None:
        """Overwrite everything but the mask."""
        for _, _, arguments in self.launches:
            for argument in arguments:
                if isinstance(argument, torch.Tensor) and argument.data_ptr() != self.mask.data_ptr():
                    argument.view(torch.uint8).fill_(byte)


SHIPPED: Kernels = _cuda._kernels


def called(kernels: Kernels, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the order by these kernels."""
    kept = _cuda._kernels
    _cuda._kernels = kernels
    try:
        return reorder_rows(mask, backend="cuda")
    finally:
        _cuda._kernels = kept
