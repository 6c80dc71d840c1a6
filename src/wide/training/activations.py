"""What chosen modules of a model read, kept while text runs through it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wide.data.batches import BatchSource, TokenBatch
from wide.data.progress import progress
from wide.training.trainer import split_batch

K = TypeVar("K")
# Activations that are held at a time, bfloat16; more modules take more passes.
_BYTES, _BYTES_PER_VALUE = 1 << 33, 2


@contextmanager
def judging(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and each back into its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def first_batches(source: BatchSource, *, batch_size: int, micro_batch_size: int, tokens: int) -> list[TokenBatch]:
    """Return the batches that training reads first, at least so many tokens, in pieces that fit in memory."""
    batches: list[TokenBatch] = []
    while sum(batch.input_ids.numel() for batch in batches) < tokens:
        batches.append(source.batch_at(len(batches), batch_size=batch_size))
    return [piece for batch in batches for piece in split_batch(batch, micro_batch_size)]


def read_inputs(
    model: nn.Module,
    modules: Mapping[K, nn.Module],
    batches: Sequence[TokenBatch],
    *,
    title: str,
    keep: Callable[[K, Tensor], Tensor] | None = None,
) -> dict[K, Tensor]:
    """Return what modules read at all tokens that are not padding, `[tokens, C]` on the CPU.

    Args:
        model: Run as it is, without gradients, in evaluation mode.
        modules: What to watch, by any key.
        batches: Text.
        title: Of the progress bar.
        keep: What to keep of an input `[t, C]`, given its key; None keeps it as bfloat16.
    """
    found: dict[K, list[Tensor]] = {key: [] for key in modules}
    valid: list[Tensor] = []

    def watch(key: K) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            rows = hidden.flatten(0, -2)[valid[-1].to(hidden.device)]
            found[key].append((rows.to(torch.bfloat16) if keep is None else keep(key, rows)).cpu())

        return hook

    device = next(model.parameters()).device
    decoder = getattr(model, "base_model", model)
    with ExitStack() as hooks, judging(model), torch.no_grad():
        for key, module in modules.items():
            hooks.callback(module.register_forward_pre_hook(watch(key), with_kwargs=True).remove)
        for batch in progress(batches, title=title, unit="batch"):
            valid.append(batch.valid.flatten())
            decoder(input_ids=batch.input_ids.to(device), attention_mask=_mask(batch, device), use_cache=False)
    return {key: torch.cat(pieces) for key, pieces in found.items()}


def in_passes(widths: Mapping[K, int], tokens: int) -> list[list[K]]:
    """Return the keys of inputs of these widths, cut into runs of which so many tokens fit into memory at a time."""
    passes: list[list[K]] = []
    room = 0
    for key, width in widths.items():
        size = width * tokens * _BYTES_PER_VALUE
        if size > room:
            passes.append([])
            room = _BYTES
        passes[-1].append(key)
        room -= size
    return passes


def _mask(batch: TokenBatch, device: torch.device) -> Tensor | None:
    return None if bool(batch.valid.all()) else batch.valid.long().to(device)
