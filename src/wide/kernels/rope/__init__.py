"""Rotary position embedding that also fills the KV cache."""

from wide.kernels.rope.operator import ROPE, rope_to_cache

__all__ = ["ROPE", "rope_to_cache"]
