"""Kernels run in Triton's interpreter where there is no GPU; uninitialised memory holds NaN."""

import os
from collections.abc import Iterator

import pytest
import torch

# Read by Triton when a kernel is decorated, so before any `_triton` module is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill `torch.empty` with NaN or extreme integers, so that a place never written is noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
