"""Running a model for judgement: evaluation mode, no gradients, and what it skips on the way."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from wide.models.attach import attachment, is_attached
from wide.models.cost import SkipCounter, Sparsity
from wide.models.lora import without_lora
from wide.models.observe import bypass, observe
from wide.routing import LayerRouting


@contextmanager
def dense(model: nn.Module) -> Iterator[None]:
    """Run the base model: no routing, nothing pruned, no LoRA that is not merged; others are left as they are."""
    if not is_attached(model):
        yield
        return
    with bypass(model), without_lora(model):
        yield


def has_merged_lora(model: nn.Module) -> bool:
    """Return whether LoRA was added to the weights for good, so that the base model is not at hand."""
    if not is_attached(model):
        return False
    state = attachment(model)
    return "recover" in state.provenance if state.lora is None else bool(state.lora.merged)


def model_device(model: nn.Module) -> torch.device:
    """Return where the model's inputs belong."""
    return next(model.parameters()).device


def longest_input(model: nn.Module) -> int | None:
    """Return the most tokens that the model takes at once, None where its configuration does not say."""
    config = getattr(model, "config", None)
    # Multimodal configurations keep the language model's in a part of their own.
    config = getattr(config, "text_config", config)
    return getattr(config, "max_position_embeddings", None)


class SkipMeter:
    """Counts what an attached model skips in the forwards inside a `with` block; nothing for a plain model.

    Args:
        model: Attached or not; None counts nothing.
    """

    def __init__(self, model: nn.Module | None) -> None:
        """Start at zero."""
        self._model = model
        self._counter = SkipCounter(model) if model is not None and is_attached(model) else None
        self._routing: list[LayerRouting] = []

    @contextmanager
    def watching(self) -> Iterator["SkipMeter"]:
        """Watch the forwards inside the block."""
        if self._counter is None or self._model is None:
            yield self
            return
        with observe(self._model) as self._routing:
            yield self

    def add(self, valid: Tensor) -> None:
        """Count the latest forward.

        Args:
            valid: Bool `[B, T]`, True for tokens that count.
        """
        if self._counter is not None:
            self._counter.add(self._routing, valid)

    def result(self) -> Sparsity | None:
        """Return the rates so far, None for a plain model (waits for the device)."""
        return None if self._counter is None else self._counter.result()
