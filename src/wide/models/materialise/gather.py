"""Keys and values for query heads that no longer share them evenly: one copy per query head, after the cache.

Grouped attention repeats every KV head the same number of times. Where pruning leaves different numbers of query heads
to the KV heads, each query head picks its own: the cache holds every KV head once, the attention function sees as many
KV heads as query heads.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wide.errors import UnsupportedModelError

GATHER_NAME = "wide_gather"
_MARK = "wide_gathered"


class HeadGather(nn.Module):
    """Picks the heads that an attention function sees.

    Args:
        kv_index: For every query head that is left, the KV head it reads, as the cache counts them.
        query_index: Query heads to pick where all of them had to be computed; None picks none out.
    """

    kv_index: Tensor
    query_index: Tensor | None

    def __init__(self, kv_index: Sequence[int], query_index: Sequence[int] | None = None) -> None:
        """Keep the two lists as int64 buffers, which are part of a checkpoint."""
        super().__init__()
        self.register_buffer("kv_index", torch.tensor(kv_index, dtype=torch.int64))
        picked = None if query_index is None else torch.tensor(query_index, dtype=torch.int64)
        self.register_buffer("query_index", picked)
        self.done = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value `[B, H', T, d]`, with as many KV heads as query heads."""
        self.done = True
        if self.query_index is not None:
            query = query.index_select(1, self.query_index)
        return query, key.index_select(1, self.kv_index), value.index_select(1, self.kv_index)


def add_gather(attention: nn.Module, gather: HeadGather) -> None:
    """Let an attention module see the picked heads, whatever attention function it calls."""
    install_gather()
    attention.add_module(GATHER_NAME, gather)
    attention.num_key_value_groups = 1  # type: ignore[assignment]
    attention.register_forward_pre_hook(_expect)
    attention.register_forward_hook(_check)


def install_gather() -> None:
    """Wrap every attention function of transformers, once per process; modules without a gather are untouched."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from wide.models.gates import install_attention_gates

    # It also names the eager functions of the model files, which are no part of the interface by themselves.
    install_attention_gates()
    for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        function = ALL_ATTENTION_FUNCTIONS[name]
        if not hasattr(function, _MARK):
            AttentionInterface.register(name, _gathering(function))


def _gathering(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        gather = getattr(module, GATHER_NAME, None)
        if gather is not None:
            query, key, value = gather(query, key, value)
        return function(module, query, key, value, *args, **kwargs)

    setattr(wrapper, _MARK, True)
    return wrapper


def _expect(attention: nn.Module, _args: tuple[Any, ...]) -> None:
    gather = getattr(attention, GATHER_NAME)
    gather.done = False


def _check(attention: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
    gather = getattr(attention, GATHER_NAME)
    if not gather.done:
        implementation = getattr(getattr(attention, "config", None), "_attn_implementation", "unknown")
        raise UnsupportedModelError(
            f"the KV heads of a sliced {type(attention).__name__} were not gathered: attention implementation "
            f"{implementation!r} was registered after the model was sliced or does not go through transformers' "
            "attention interface. Choose 'sdpa' or 'eager', or load the model after registering it"
        )
