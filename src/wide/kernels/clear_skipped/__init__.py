"""Zeros in the channels of skipped groups."""
