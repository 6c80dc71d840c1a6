"""Runs once, before a server answers, what requests will run: then none of them waits until a kernel is compiled."""

import logging
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from wide.vllm.sublayers import Attention, FeedForward, scale_of

# Rows of logits that are run: more of them run the same, and take much memory.
_MOST_LOGITS = 512
_LOGGER = logging.getLogger("vllm.wide")


def warm(model: nn.Module, most_rows: int) -> None:
    """Run each kind of layer on a GPU with numbers of rows, up to a step's, that need all kernels and variants."""
    started, kinds = time.monotonic(), dict[Any, nn.Module]()
    for module in model.modules():
        if isinstance(module, FeedForward | Attention) and module.skips and module.decides:
            kinds.setdefault(module.kind, module)
        elif isinstance(module, LinearBase | ParallelLMHead) and scale_of(module) is not None and module.weight.is_cuda:
            kinds.setdefault((module.weight.shape, module.bias is None, type(module)), module)
    for rows in rows_to_run(most_rows):
        for module in kinds.values():
            if rows <= _MOST_LOGITS or not isinstance(module, ParallelLMHead):
                run(module, rows)
    if kinds:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.monotonic() - started
        _LOGGER.info("wide ran the kernels of %d kinds of layers in %.1f s", len(kinds), seconds)


def rows_to_run(most: int) -> list[int]:
    """Return numbers of rows up to a largest one that meet all choices of a table and all variants of kernels.

    Both tell apart powers of two; otherwise kernels are compiled for any number of rows.
    """
    near = {(1 << shift) + more for shift in range(most.bit_length()) for more in (0, 1)}
    return sorted(rows for rows in {*near, most} if rows <= most)


def run(module: Any, rows: int) -> None:
    """Run a layer's operators for some rows."""
    weight: Tensor = (getattr(module, "qkv_proj", None) or getattr(module, "gate_up_proj", module)).weight
    linear = isinstance(module, LinearBase | ParallelLMHead)
    dtype = module.params_dtype if linear else module.wide_router.dtype
    x = torch.randn(rows, weight.shape[1], dtype=dtype, device=weight.device)
    padding = torch.zeros(rows, dtype=torch.bool, device=weight.device)
    # What operators read of vLLM's context of a step.
    with override_forward_context(SimpleNamespace(is_padding=padding)):
        if linear:
            module.quant_method.apply(module, x, module.bias)
        else:
            module.warm(x)
