"""Prefill attention: the queries that execute, over dense keys and values."""

from wide.kernels.attention_prefill.cases import ATTENTION_PREFILL
from wide.kernels.attention_prefill.op import PrefillShape, attention_prefill

__all__ = ["ATTENTION_PREFILL", "PrefillShape", "attention_prefill"]
