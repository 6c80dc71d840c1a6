"""Watch, replay or switch off routing for the forwards inside a `with` block; leave modes and random states alone.

Blocks act on the calls of the thread that entered them; other threads that share the model do not notice.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from wide.errors import NotAttachedError, ShapeError
from wide.models.attach import attachment
from wide.models.having import having
from wide.models.packing import unpacked
from wide.models.sharding import is_sharded
from wide.routing import LayerRouting, Routing


@contextmanager
def judging(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode without gradients, and each back into its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def own_randomness(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Leave the random states (Python, NumPy, torch on CPU and this device) as they were; inside, torch has a seed."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    # Without a list, torch saves the state of every GPU of the host, and warns about it.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            if seed is not None:
                torch.manual_seed(seed)
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def model_device(model: nn.Module) -> torch.device:
    """Return where the model's inputs belong."""
    return next(model.parameters()).device


def now(device: torch.device) -> float:
    """Return the time in seconds, once a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@unpacked()
def forward_without_head(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> None:
    """Run the decoder layers for token ids int64 `[B, T]`, with a mask of padding, for what is observed on the way."""
    if is_sharded(model):
        # FSDP gathers layers only on the way through the whole model; the head runs for one token.
        model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
    else:
        getattr(model, "base_model", model)(input_ids=ids, attention_mask=mask, use_cache=False)


@contextmanager
def observe(model: nn.Module) -> Iterator[list[LayerRouting]]:
    """Yield a list whose entry i is layer i's routing in the latest forward.

    Masks are those that the gates apply: bool in evaluation, float32 with straight-through gradient in training.
    Raises NotAttachedError if the model carries no routers.
    """
    state = attachment(model)
    routing = [LayerRouting() for _ in state.specs]
    with having(state.control, observed=routing):
        yield routing


@contextmanager
def capture_routing(model: nn.Module) -> Iterator[list[LayerRouting]]:
    """Yield a list; after a forward, `routing[i].attention` and `routing[i].ffn` are layer i's boolean masks.

    Masks have shape `[B, T, N_G]`, True = execute, detached from the graph. Raises NotAttachedError if the model
    carries no routers.
    """
    control = attachment(model).control
    with observe(model) as routing:
        captured = [LayerRouting() for _ in routing]

        def copy(*_: object) -> None:
            # Other threads run forwards of this model, too.
            for layer, found in zip(routing, captured, strict=True) if control.observed is routing else ():
                for name in ("attention", "ffn", "attention_margin", "ffn_margin"):
                    value = getattr(layer, name)
                    if value is not None:
                        value = value.detach() if name.endswith("_margin") else value.detach().bool()
                    setattr(found, name, value)

        with model.register_forward_hook(copy):
            yield captured


@contextmanager
def force_routing(model: nn.Module, masks: Routing) -> Iterator[None]:
    """Replay masks instead of the routers' own decisions: one entry per layer, as `capture_routing` gives.

    None inside an entry leaves that sublayer to its router. An FFN that follows the attention goes by the attention's
    mask. Masks `[B, T, N_G]` longer than a forward are used up in order by successive forwards, as in cached decoding.
    Raises ShapeError if the number of layers, or in a forward a mask's shape, does not fit.
    """
    state = attachment(model)
    if len(masks) != len(state.specs):
        raise ShapeError(f"masks for {len(masks)} layers were given, the model has {len(state.specs)}")
    with having(state.control, forced=list(masks), forced_position={}):
        yield


@contextmanager
def bypass(model: nn.Module) -> Iterator[None]:
    """Run the dense model: nothing skipped or pruned, original weights, exactly the untouched computation but for LoRA.

    FFN channels in another order stay there, so their sums are equal to the untouched model's up to rounding only.
    Raises NotAttachedError without a plan, or where the originals of replaced weights, or theirs with LoRA, are gone.
    """
    state = attachment(model)
    if state.originals_lost or (state.replaced and state.lora and state.lora.merged):
        raise NotAttachedError("these weights are the pruned ones; load the base, or give compare_dense=False")
    with having(state.control, enabled=False):
        yield
