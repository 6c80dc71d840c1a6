"""What identifies a base model: its architecture and a sample of its weights."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from wide.models.block_spec import BlockSpec

_NUM_TENSORS = 32
_VALUES_PER_TENSOR = 8
_NEEDED_AGREEMENT = 0.95
# What wide itself puts into a model.
_ADDED = re.compile(r"wide_(router|gate|stream)\b")


def fingerprint(model: nn.Module, specs: Sequence[BlockSpec]) -> dict[str, Any]:
    """Return JSON-ready facts by which an adapter recognises its base model.

    The weight sample is rounded to bfloat16, so that the same checkpoint loaded as float32 or bfloat16 agrees.
    """
    config = getattr(model, "config", None)
    text_config = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    attention = specs[0].attention
    return {
        "model_type": str(getattr(text_config, "model_type", type(model).__name__)).removeprefix("wide_"),
        "name_or_path": str(getattr(config, "_name_or_path", "") or ""),
        "revision": getattr(config, "_commit_hash", None),
        "num_layers": len(specs),
        "hidden_size": specs[0].hidden_size,
        "num_query_heads": attention.num_query_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "ffn_width": None if specs[0].ffn is None else specs[0].ffn.width,
        "vocab_size": getattr(text_config, "vocab_size", None),
        "weight_sample": _weight_sample(model),
    }


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return what distinguishes two fingerprints, in words; empty means the same base model.

    Names and revisions are not compared: a moved or renamed checkpoint is the same model.
    """
    facts = [key for key in expected if key not in ("name_or_path", "revision", "weight_sample")]
    words = [
        f"{key} is {found.get(key)!r}, expected {expected[key]!r}" for key in facts if found.get(key) != expected[key]
    ]
    if not words and not _same_sample(expected.get("weight_sample"), found.get("weight_sample")):
        words.append("the weights differ (another checkpoint of the same architecture)")
    return words


def _same_sample(expected: Any, found: Any) -> bool:
    if not expected or not found:
        # Weights that cannot be sampled (quantised, on the meta device) cannot be compared either.
        return True
    if len(expected) != len(found):
        return False
    equal = sum(a == b for a, b in zip(expected, found, strict=True))
    return equal >= _NEEDED_AGREEMENT * len(expected)


def _weight_sample(model: nn.Module) -> list[float]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and not _ADDED.search(name)]
    if not matrices or any(p.is_meta or not p.is_floating_point() for p in matrices):
        return []
    step = max(1, len(matrices) // _NUM_TENSORS)
    pieces = []
    for matrix in matrices[::step]:
        flat = matrix.detach().reshape(-1)
        stride = max(1, flat.numel() // _VALUES_PER_TENSOR)
        pieces.append(flat[::stride][:_VALUES_PER_TENSOR].to(torch.bfloat16).float().cpu())
    return [float(value) for value in torch.cat(pieces)]
