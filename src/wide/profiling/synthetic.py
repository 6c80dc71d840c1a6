"""Models of real shape with random weights, built where they run, and routers that execute a wanted share."""

import math
from importlib import resources
from typing import Any

import torch
import yaml
from torch import Tensor

from wide.errors import ConfigError
from wide.models.attach import attachment
from wide.models.cost import SkipCounter
from wide.models.observe import capture_routing, observe

_FILE = resources.files("wide.profiling") / "shapes.yaml"
SHAPES: dict[str, dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
# Below every margin.
_EVERYTHING = -math.inf
# What a layer reads depends on what earlier ones skip, so that later thresholds settle after earlier ones.
_PASSES = 4


def random_model(shape: str, *, num_layers: int | None, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a Llama of a shape in `SHAPES` with random weights, in evaluation mode, of `num_layers` or all layers.

    Raises ConfigError if the shape is unknown.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; choose one of {sorted(SHAPES)}")
    sizes = SHAPES[shape] | ({} if num_layers is None else {"num_hidden_layers": num_layers})
    config = LlamaConfig(**sizes, tie_word_embeddings=False, attn_implementation="sdpa")
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@torch.no_grad()
def set_shares(model: Any, ids: Tensor, skipped: tuple[float, float] | list[tuple[float, float]]) -> None:
    """Put each router's threshold where it skips a share of its (token, group) pairs on some tokens.

    Args:
        model: Attached, not optimised.
        ids: Tokens, [1, T].
        skipped: Shares in attention and FFN, each in [0, 1), of all layers or of each; at 0 everything executes, on
            other tokens, too.
    """
    by_layer = skipped if isinstance(skipped, list) else [skipped] * len(attachment(model).specs)
    for _ in range(_PASSES):
        with capture_routing(model) as routing:
            model(ids, use_cache=False, logits_to_keep=1)
        for router in attachment(model).routers():
            share = by_layer[router.layer_index][("attention", "ffn").index(router.half_layer)]
            margins = getattr(routing[router.layer_index], f"{router.half_layer}_margin").flatten().float().sort()[0]
            router.threshold = float(margins[int(share * len(margins))]) if share else _EVERYTHING


@torch.no_grad()
def skipped_shares(model: Any, ids: Tensor, last: int | None = None) -> tuple[float, float]:
    """Return the shares of pairs that attention and FFN skip, of the last or all tokens [1, T]; 0 without routers."""
    counter, counted = SkipCounter(model), torch.ones_like(ids, dtype=torch.bool)
    counted[:, : -last if last else 0] = False
    with observe(model) as routing:
        model(ids, use_cache=False, logits_to_keep=1)
    counter.add(routing, counted)
    found = counter.result()
    return found.attention, found.ffn
