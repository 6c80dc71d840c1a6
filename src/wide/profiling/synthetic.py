"""Models of real shape with random weights, built where they run, and random masks at given rates."""

from typing import Any

import torch
from torch import Tensor

from wide.errors import ConfigError
from wide.inference.run import Masks, force
from wide.inference.weights import LayerWeights

_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
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
# Rows up to which every row gets its share exactly; more rows average out by themselves.
_FEW_ROWS = 64


def random_model(shape: str, *, num_layers: int | None, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a Llama of a known shape with random weights, in evaluation mode.

    Args:
        shape: Key of `SHAPES`.
        num_layers: Decoder layers; None = as the shape says.
        device: Where the weights are drawn.
        dtype: Of the weights.

    Raises:
        ConfigError: If the shape is unknown.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; choose one of {sorted(SHAPES)}")
    sizes = SHAPES[shape] | ({} if num_layers is None else {"num_hidden_layers": num_layers})
    config = LlamaConfig(**sizes, tie_word_embeddings=False, attn_implementation="sdpa")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def random_masks(
    layers: tuple[LayerWeights, ...], num_rows: int, skipped: tuple[float, float], seed: int = 17
) -> Masks:
    """Return forced masks for a run of `num_rows` tokens.

    Args:
        layers: Of the decoder.
        num_rows: Tokens of a forward.
        skipped: Shares of (token, group) pairs skipped in attention and FFN, each in [0, 1].
        seed: Of the masks.
    """
    device = layers[0].attention.qkv.device
    generator = torch.Generator(device=device).manual_seed(seed)
    masks: list[tuple[Tensor | None, Tensor | None]] = []
    for layer in layers:
        halves = zip((layer.attention.router, layer.ffn.router), skipped, strict=True)
        masks.append(
            tuple(  # type: ignore[arg-type]
                None if router is None else _mask(num_rows, router.num_groups, rate, generator)
                for router, rate in halves
            )
        )
    return force(layers, masks)


def _mask(num_rows: int, num_groups: int, skipped: float, generator: torch.Generator) -> Tensor:
    draws = torch.rand(num_rows, num_groups, generator=generator, device=generator.device)
    if num_rows > _FEW_ROWS:
        return draws >= skipped
    # Rounded up or down at random, so that few groups reach the rate on average too.
    lift = torch.rand(num_rows, 1, generator=generator, device=generator.device)
    count = (num_groups * skipped + lift).floor()
    return draws.argsort(1).argsort(1) >= count
