"""Decode attention: one new token a sequence over a KV cache, skipping what it does not execute."""
