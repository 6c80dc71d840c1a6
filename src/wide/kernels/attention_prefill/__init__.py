"""Prefill attention: the queries that execute, over dense keys and values."""
