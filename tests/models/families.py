"""Tiny random models of every supported family."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# Where a family needs more than the common sizes; sliding windows are wider than the tests' sequences.
SPECIAL: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64, "tie_word_embeddings": True},
    "cohere2": {"sliding_window": 64, "tie_word_embeddings": True},
    "exaone4": {"sliding_window": 64},
    "olmo3": {"sliding_window": 64},
    "glm4": {"partial_rotary_factor": 0.5},
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "smollm3": {"no_rope_layers": [1, 0]},
}
REQUIRED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "granite")
FURTHER = ("glm4", "cohere2", "exaone4", "olmo3", "seed_oss", "arcee", "apertus", "ernie4_5", "helium", "ministral3")
# Windows shorter than the tests' sequences, and caps and multipliers that bite.
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
STRAIGHT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "mistral": {"sliding_window": 5},
    "smollm3": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 4.0},
    "gemma2": SLIDING | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": SLIDING,
    "exaone4": SLIDING,
    "olmo2": {},
    "olmo3": SLIDING,
    "glm4": {},
    "ernie4_5": {},
    "helium": {},
    "cohere2": SLIDING | {"logit_scale": 0.5},
}
# Their layers are of two kinds.
ALTERNATING = ("gemma2", "gemma3_text", "cohere2", "exaone4", "olmo3", "smollm3")
# One of each shape of layers: packed products, norms of heads and behind sublayers, windows, caps, multipliers,
# parallel halves, heads turned by half, an FFN without a gate. Where other tests run every family, these stand for it.
DISTINCT = ("llama", "qwen3", "gemma2", "phi3", "granite", "exaone4", "glm4", "cohere2", "apertus")
FAMILIES = [name for name in REQUIRED + FURTHER if name in CONFIG_MAPPING]


def distinct(families: Iterable[str]) -> list[Any]:
    """Return the families as parameters; those that are not of a shape of their own are slow."""
    return [name if name in DISTINCT else pytest.param(name, marks=pytest.mark.slow) for name in families]


def alternating(families: Iterable[str], values: Sequence[Any]) -> list[Any]:
    """Return all pairs as parameters; those of every family but one, in turn, are slow."""
    return [
        pytest.param(name, value, marks=() if place % len(values) == number else pytest.mark.slow)
        for place, name in enumerate(families)
        for number, value in enumerate(values)
    ]


def make(family: str, **changes: Any) -> Any:
    """Return a tiny random float32 model of a family in evaluation mode."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**(COMMON | SPECIAL.get(family, {}) | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if family == "gemma2" else "sdpa")
    return model.float().eval()


def stirred(model: Any) -> Any:
    """Return the model with norms of their own and weights so large that positions, windows and caps matter."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data + 0.3 * noise if parameter.dim() == 1 else parameter.data * 6
    return model


def tokens(batch: int = 2, length: int = 12, *, seed: int = 0) -> torch.Tensor:
    """Return random token ids `[B, T]` without special tokens."""
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_borrowing(**changes: Any) -> Any:
    """Return a tiny Gemma 4 whose last two layers attend to the keys and values of the first two."""
    sizes = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
    shared = {"num_kv_shared_layers": 2, "global_head_dim": 8}
    sizes |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
    return make("gemma4_text", **(sizes | shared | changes))
