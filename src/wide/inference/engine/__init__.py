"""The engine: what an optimised model runs."""
