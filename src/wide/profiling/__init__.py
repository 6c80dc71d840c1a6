"""Timing of operators and models."""
