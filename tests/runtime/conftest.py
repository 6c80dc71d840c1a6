"""Kernels run in Triton's interpreter where there is no GPU."""

import os

import torch

# Read by Triton when a kernel is decorated, so before any `_triton` module is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
