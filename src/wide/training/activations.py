"""What chosen modules of a model read, kept while text runs through it."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBatch
from wide.data.progress import progress
from wide.errors import TrainingError
from wide.models.gates import input_of
from wide.models.observe import forward_without_head, judging

K = TypeVar("K")
# What all processes of one machine hold at a time; more modules take more passes.
_BYTES = 1 << 33
BYTES_PER_ACTIVATION = 2  # bfloat16


@dataclass(slots=True)
class TokensRead:
    """Tokens that ran through a model, padding included: through a forward alone, and with gradients."""

    forward: int = 0
    backward: int = 0


@contextmanager
def counting(model: nn.Module, counts: TokensRead) -> Iterator[None]:
    """Add the tokens of all forwards inside the block to `counts`."""

    def count(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read = kwargs["input_ids"].numel()
        if torch.is_grad_enabled():
            counts.backward += read
        else:
            counts.forward += read

    with getattr(model, "base_model", model).register_forward_pre_hook(count, with_kwargs=True):
        yield


def read_inputs(
    model: nn.Module,
    modules: Mapping[K, nn.Module],
    batches: Sequence[TokenBatch],
    *,
    title: str,
    keep: Callable[[K, Tensor], Tensor] | None = None,
) -> dict[K, Tensor]:
    """Return what modules read at all tokens that are not padding, `[tokens, C]` on the CPU, by their keys.

    The model runs as it is, without gradients, in evaluation mode. `keep` says what to keep of an input `[t, C]`, given
    its key; without it that is all, as bfloat16. Raises TrainingError if an input is not finite.
    """
    found: dict[K, list[Tensor]] = {key: [] for key in modules}
    # Of the running batch: places of its tokens, and per module whether what it read is finite, looked at once.
    places: list[Tensor] = []
    finite: list[tuple[Tensor, torch.dtype]] = []

    def note(key: K, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = input_of(args, kwargs)
        places[0] = places[0].to(hidden.device)
        rows = hidden.flatten(0, -2).index_select(0, places[0])
        finite.append((rows.isfinite().all().to(device), rows.dtype))
        found[key].append((rows.to(torch.bfloat16) if keep is None else keep(key, rows)).cpu())

    device = next(model.parameters()).device
    with ExitStack() as hooks, judging(model):
        for key, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(note, key), with_kwargs=True))
        for batch in progress(batches, title=title, unit="batch"):
            places[:], mask = [batch.valid.flatten().nonzero().squeeze(1)], batch.attention_mask()
            finite.clear()
            forward_without_head(model, batch.input_ids.to(device), None if mask is None else mask.to(device))
            # Nothing can be fitted to these, and clustering them would never end.
            if finite and not torch.stack([flag for flag, _ in finite]).all():
                wrong = next(dtype for flag, dtype in finite if not flag)
                raise TrainingError(
                    f"{title}: inf or nan in {wrong}; load a base that is whole, in bfloat16 or float32"
                )
    # One after the other: all of the pieces beside all of the wholes would be twice the memory.
    return {key: torch.cat(found.pop(key)) for key in list(found)}


def in_passes(sizes: Mapping[K, int]) -> list[list[K]]:
    """Return the keys of things of these sizes in bytes, cut into runs that fit into memory at a time.

    The memory is shared with the other processes of this machine under torchrun.
    """
    most = _BYTES // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    passes: list[list[K]] = []
    room = 0
    for key, size in sizes.items():
        if not passes or size > room:
            passes.append([])
            room = most
        passes[-1].append(key)
        room -= size
    return passes
