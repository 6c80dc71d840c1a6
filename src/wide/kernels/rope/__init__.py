"""Rotary position embedding that also fills the KV cache."""
