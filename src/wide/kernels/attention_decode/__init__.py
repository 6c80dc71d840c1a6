"""Decode attention: one new token a sequence over a KV cache, skipping what it does not execute."""

from wide.kernels.attention_decode.operator import ATTENTION_DECODE, attention_decode

__all__ = ["ATTENTION_DECODE", "attention_decode"]
