"""Models of real shape with random weights, built where they run, and routers that execute a wanted share."""

import math
from typing import Any

import torch
from torch import Tensor

from wide.errors import ConfigError
from wide.models.attach import attachment
from wide.models.cost import SkipCounter
from wide.models.observe import capture_routing

_LLAMA_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192}
_LLAMA_ROPE |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_parameters": _LLAMA_ROPE,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 32768,
    },
}
# Below every margin.
_EVERYTHING = -math.inf
# What a layer reads depends on what earlier ones skip, so that later thresholds settle after earlier ones.
_PASSES = 4


def random_model(shape: str, *, num_layers: int | None, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a Llama of a known shape with random weights, in evaluation mode.

    Raises ConfigError if the shape is unknown.

    Args:
        shape: Key of `SHAPES`.
        num_layers: Decoder layers; None = as the shape says.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; choose one of {sorted(SHAPES)}")
    sizes = SHAPES[shape] | ({} if num_layers is None else {"num_hidden_layers": num_layers})
    config = LlamaConfig(**sizes, tie_word_embeddings=False, attn_implementation="sdpa")
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@torch.no_grad()
def set_shares(model: Any, ids: Tensor, skipped: tuple[float, float]) -> None:
    """Put each router's threshold where it skips a share of its (token, group) pairs on some tokens.

    Args:
        model: Attached, not optimised.
        ids: Tokens, [1, T].
        skipped: Shares in attention and FFN, each in [0, 1); at 0 everything executes, on other tokens, too.
    """
    shares = dict(zip(("attention", "ffn"), skipped, strict=True))
    for _ in range(_PASSES):
        with capture_routing(model) as routing:
            model(ids, use_cache=False, logits_to_keep=1)
        for router in attachment(model).routers():
            share = shares[router.half_layer]
            margins = getattr(routing[router.layer_index], f"{router.half_layer}_margin").flatten().float().sort()[0]
            router.threshold = float(margins[int(share * len(margins))]) if share else _EVERYTHING


@torch.no_grad()
def skipped_shares(model: Any, ids: Tensor, last: int | None = None) -> tuple[float, float]:
    """Return the shares of (token, group) pairs that attention and FFN skip, measured; 0 where nothing routes.

    Args:
        ids: Tokens, [1, T].
        last: Of how many tokens at the end; None = of all.
    """
    counter, counted = SkipCounter(model), torch.ones_like(ids, dtype=torch.bool)
    counted[:, : -last if last else 0] = False
    with counter.watching():
        model(ids, use_cache=False, logits_to_keep=1)
        counter.add_latest(counted)
    found = counter.result()
    return found.attention, found.ffn
