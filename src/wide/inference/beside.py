"""Work that runs beside the current stream's until its result is needed; graphs keep it as a branch of their own."""

from collections.abc import Callable

import torch
from torch import Tensor


class Beside:
    """A second stream, for a router beside a product that does not wait for its mask.

    What runs there reads memory of the current stream, which therefore has to live until `wait`.

    Args:
        device: A GPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing runs."""
        # Of the lowest priority: its blocks are to take what the product's leave over.
        self._stream = torch.cuda.Stream(device)
        self._device, self.runs = device, False

    def begin(self, call: Callable[[], Tensor]) -> Tensor:
        """Return what `call` returns, which nobody may read before `wait`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self.runs = True
        with torch.cuda.stream(self._stream):
            return call()

    def wait(self) -> None:
        """Let the current stream wait for what was begun, if anything was."""
        if self.runs:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self.runs = False
