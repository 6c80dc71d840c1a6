"""Decode attention: one new token a sequence over a KV cache, skipping what it does not execute."""

from wide.kernels.attention_decode.op import DecodeShape, attention_decode

__all__ = ["DecodeShape", "attention_decode"]
