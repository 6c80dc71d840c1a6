"""Rotary position embedding that also fills the KV cache."""

from wide.kernels.rope.op import rope_to_cache

__all__ = ["rope_to_cache"]
