"""Prefill attention: the queries that execute, over dense keys and values."""

from wide.kernels.attention_prefill.op import PrefillShape, attention_prefill

__all__ = ["PrefillShape", "attention_prefill"]
