"""Prefill attention: the queries that execute, over dense keys and values."""

from wide.kernels.attention_prefill.operator import ATTENTION_PREFILL, attention_prefill

__all__ = ["ATTENTION_PREFILL", "attention_prefill"]
